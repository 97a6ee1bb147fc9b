"""The picture of farsight order-awareness."""

from pathlib import Path
from typing import Any


def draw(figures: dict[str, Any], path: Path) -> None:
    """Writes the picture (PNG, SVG or PDF): the change by span, a line per layer, and each layer's horizon."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    tokens = [row["tokens"] for row in figures["spans"]]
    colours = plt.get_cmap("viridis")
    count = len(figures["layers"])
    for layer, values in figures["layers"].items():
        points = [(x, y) for x, y in zip(tokens, values["exchange"], strict=True) if y]  # 0 has no logarithm
        shade = colours(0.9 * int(layer) / max(1, count - 1))
        if points:
            left.plot(*zip(*points, strict=True), marker="o", markersize=3, color=shade, label=f"after layer {layer}")
    left.axhline(figures["tolerance"], color="grey", linestyle=":", label="tolerance")
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.set(xlabel="tokens from the exchanged pair to the end", ylabel="relative change of the last state, median")
    left.grid(alpha=0.3)
    left.legend(fontsize="x-small", ncols=2)
    horizons = [values["horizon"] for values in figures["layers"].values()]
    right.plot(range(count), horizons, marker="o", color="#0072B2")
    right.set_yscale("log", base=2)
    right.set(xlabel="layer", ylabel="order horizon in tokens", ylim=(0.9, 1.15 * figures["length"]))
    right.xaxis.get_major_locator().set_params(integer=True)
    right.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
