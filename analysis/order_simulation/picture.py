"""The picture of farsight order-simulation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farsight.outputs import model_style


def draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes the picture (PNG, SVG or PDF): a panel per length, a line per configuration (the paper's Figures 10 and 11)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lengths = list(dict.fromkeys(row["length"] for row in results))
    names = list(dict.fromkeys(row["windows"] for row in results))
    figure, panels = plt.subplots(
        1, len(lengths), figsize=(1.4 + 4.2 * len(lengths), 4.4), layout="constrained", squeeze=False, sharey=True
    )
    for axes, length in zip(panels[0], lengths, strict=True):
        rows = [row for row in results if row["length"] == length]
        for row in rows:
            style = model_style(names.index(row["windows"]))
            layers = range(1, len(row["ratio"]) + 1)
            axes.errorbar(layers, row["ratio"], yerr=row["spread"], capsize=2, label=row["windows"], **style)
        axes.set(xlabel="layers", title=f"T = {length:,}, {rows[0]['heads']} heads", ylim=(0, 1.03))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    panels[0, 0].set_ylabel("distinct coefficients / T")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(len(labels), 6), fontsize="small", frameon=False
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)
