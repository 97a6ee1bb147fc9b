"""The picture of farsight order-awareness."""

from pathlib import Path
from typing import Any

from farsight.plots import GREY, line_style, picture, shades, whole_numbers


def draw(figures: dict[str, Any], path: Path) -> None:
    """Writes the picture (PNG, SVG or PDF): the change by span, a line per layer, and each layer's horizon."""
    with picture(path, 10, 4) as figure:
        left, right = figure.subplots(1, 2)
        tokens = [row["tokens"] for row in figures["spans"]]
        count = len(figures["layers"])
        for (layer, values), shade in zip(figures["layers"].items(), shades(count), strict=True):
            points = [(x, y) for x, y in zip(tokens, values["exchange"], strict=True) if y]  # 0 has no logarithm
            if points:
                left.plot(*zip(*points, strict=True), "o-", markersize=3, color=shade, label=f"after layer {layer}")
        left.axhline(figures["tolerance"], color=GREY, linestyle=":", label="tolerance")
        left.set_xscale("log", base=2)
        left.set_yscale("log")
        left.set(xlabel="tokens from the exchanged pair to the end", ylabel="relative change of the last state, median")
        left.legend(fontsize="x-small", ncols=2)
        horizons = [values["horizon"] for values in figures["layers"].values()]
        right.plot(range(count), horizons, **line_style(0))
        right.set_yscale("log", base=2)
        right.set(xlabel="layer", ylabel="order horizon in tokens", ylim=(0.9, 1.15 * figures["length"]))
        whole_numbers(right.xaxis)
