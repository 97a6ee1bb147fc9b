"""Needle pictures: a heat map over length and depth for each model, or lines over length for tasks without depth."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farsight.outputs import model_style, short_names

_WRITTEN = 144
"""Most cells of a heat map with figures written in; with more, cells are too small."""


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Writes the picture (PNG, SVG or PDF) of each model's `farsight needle` figures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = _panels(results)
    if panels[0][1][0]["depth"] is None:
        figure = _lines(plt, panels)
    else:
        figure = _heat_maps(plt, panels)
    first = next(iter(results.values()))
    extend = f", {first['extend']}" if first["extend"] else ""
    figure.suptitle(f"{first['task']}{extend}: accuracy, {first['trials']} trials a cell", fontsize="medium")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _panels(results: dict[str, dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]], float, int]]:
    """Name, cells, mean and trained length of each model; a model whose scopes can grow has two panels."""
    panels = []
    for name, figures in zip(short_names(results), results.values(), strict=True):
        grown = "cells_scope_length" in figures
        trained = figures["trained_length"]
        panels.append((f"{name}, scopes as trained" if grown else name, figures["cells"], figures["mean"], trained))
        if grown:
            cells, mean = figures["cells_scope_length"], figures["mean_scope_length"]
            panels.append((f"{name}, scopes grown", cells, mean, trained))
    return panels


def _heat_maps(plt: Any, panels: Sequence[tuple[str, list[dict[str, Any]], float, int]]) -> Any:
    from matplotlib.ticker import PercentFormatter

    lengths = list(dict.fromkeys(cell["length"] for cell in panels[0][1]))
    depths = list(dict.fromkeys(cell["depth"] for cell in panels[0][1]))
    lines = math.ceil(len(panels) / 4)
    columns = math.ceil(len(panels) / lines)
    size = columns * max(2.8, 0.45 * len(lengths) + 1) + 1.2, lines * max(2.4, 0.26 * len(depths) + 1.3) + 0.4
    figure, grid = plt.subplots(
        lines, columns, figsize=size, layout="constrained", squeeze=False, sharex=True, sharey=True
    )
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (name, cells, mean, trained) in zip(grid.flat, panels, strict=False):
        at = {(cell["length"], cell["depth"]): cell["accuracy"] for cell in cells}
        values = [[at[length, depth] for length in lengths] for depth in depths]
        image = axes.imshow(values, cmap="viridis", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        if len(lengths) * len(depths) <= _WRITTEN:
            for row, accuracies in enumerate(values):
                for column, value in enumerate(accuracies):
                    colour = "black" if value > 0.6 else "white"
                    text = f"{100 * value:.0f}"
                    axes.text(column, row, text, ha="center", va="center", fontsize="x-small", color=colour)
        # Between the last length within the trained one and the first beyond it.
        border = sum(length <= trained for length in lengths) - 0.5
        for colour, line in (("white", "-"), ("crimson", "--")):  # legible on every colour of the map
            axes.axvline(border, color=colour, linestyle=line, linewidth=2.5, clip_on=False)
        axes.set_title(f"{name}\nmean {100 * mean:.1f} %", fontsize="small")
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45, ha="right")
        axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths])
        axes.tick_params(labelsize="x-small")
    ends = ", ".join(f"{trained:,}" for trained in sorted({panel[3] for panel in panels}))
    figure.supxlabel(f"length in tokens (dashed: end of the trained length, {ends})", fontsize="small")
    figure.supylabel("depth of the needle", fontsize="small")
    figure.colorbar(image, ax=list(grid.flat), label="accuracy", shrink=0.9, format=PercentFormatter(1))
    return figure


def _lines(plt: Any, panels: Sequence[tuple[str, list[dict[str, Any]], float, int]]) -> Any:
    from matplotlib.ticker import PercentFormatter

    figure, axes = plt.subplots(figsize=(6.4, 4.6), layout="constrained")
    models = list(dict.fromkeys(panel[0].partition(", scopes ")[0] for panel in panels))
    for name, cells, mean, _ in panels:
        model, _, reading = name.partition(", scopes ")
        style = model_style(models.index(model), grown=reading == "grown")
        points = [cell["length"] for cell in cells], [cell["accuracy"] for cell in cells]
        axes.plot(*points, **style, label=f"{name} (mean {100 * mean:.1f} %)", clip_on=False)
    lengths = sorted({cell["length"] for panel in panels for cell in panel[1]})
    for trained in {panel[3] for panel in panels}:
        axes.axvline(trained, color="grey", linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set(xlabel="length in tokens (dotted: trained)", ylabel="accuracy", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False)
    return figure
