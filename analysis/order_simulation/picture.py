"""The picture of farsight order-simulation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farsight.plots import legend_below, line_style, picture, whole_numbers


def draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes the picture (PNG, SVG or PDF): a panel per length, a line per configuration (the paper's Figures 10 and 11)."""
    lengths = list(dict.fromkeys(row["length"] for row in results))
    names = list(dict.fromkeys(row["windows"] for row in results))
    with picture(path, 1.4 + 4.2 * len(lengths), 4.4) as figure:
        panels = figure.subplots(1, len(lengths), squeeze=False, sharey=True)[0]
        for axes, length in zip(panels, lengths, strict=True):
            rows = [row for row in results if row["length"] == length]
            for row in rows:
                style = line_style(names.index(row["windows"]))
                layers = range(1, len(row["ratio"]) + 1)
                axes.errorbar(layers, row["ratio"], yerr=row["spread"], capsize=2, label=row["windows"], **style)
            axes.set(xlabel="layers", title=f"T = {length:,}, {rows[0]['heads']} heads", ylim=(0, 1.03))
            whole_numbers(axes.xaxis)
        panels[0].set_ylabel("distinct coefficients / T")
        legend_below(figure, min(len(names), 6), panels[0])
