"""Needle pictures: a heat map over length and depth for each model, or lines over length for tasks without depth."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farsight.outputs import short_names
from farsight.plots import PALETTE, borders, cell_map, length_ticks, line_style, picture

_WRITTEN = 144
"""Most cells of a heat map with figures written in; with more, cells are too small."""

Panel = tuple[str, list[dict[str, Any]], float, int]
"""Name, cells, mean and trained length."""


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Writes the picture (PNG, SVG or PDF) of each model's `farsight needle` figures."""
    panels = _panels(results)
    lengths = sorted({cell["length"] for panel in panels for cell in panel[1]})
    depths = list(dict.fromkeys(cell["depth"] for cell in panels[0][1]))
    lines = math.ceil(len(panels) / 4)
    columns = math.ceil(len(panels) / lines)
    size = 6.4, 4.6
    if depths != [None]:
        width, height = max(2.8, 0.45 * len(lengths) + 1), max(2.4, 0.26 * len(depths) + 1.3)
        size = columns * width + 1.2, lines * height + 0.4
    with picture(path, *size) as figure:
        if depths == [None]:
            _lines(figure.subplots(), panels, lengths)
        else:
            _heat_maps(figure, figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True), panels, depths)
        first = next(iter(results.values()))
        extend = f", {first['extend']}" if first["extend"] else ""
        extend += f", scope_max {first['scope_max']}" if first["scope_max"] else ""
        extend += f", {first['quantization']}" if first["quantization"] else ""
        figure.suptitle(
            f"{first['task']}{extend}: accuracy, {first['trials']} trial{'s' * (first['trials'] > 1)} a cell"
        )


def _panels(results: dict[str, dict[str, Any]]) -> list[Panel]:
    """A panel for each model, and a second one if its scopes can grow."""
    panels = []
    for name, figures in zip(short_names(results), results.values(), strict=True):
        grown = "cells_scope_length" in figures
        trained = figures["trained_length"]
        panels.append((f"{name}, scopes as trained" if grown else name, figures["cells"], figures["mean"], trained))
        if grown:
            cells, mean = figures["cells_scope_length"], figures["mean_scope_length"]
            panels.append((f"{name}, scopes grown", cells, mean, trained))
    return panels


def _heat_maps(figure: Any, grid: Any, panels: Sequence[Panel], depths: Sequence[float]) -> None:
    from matplotlib.ticker import PercentFormatter

    lengths = list(dict.fromkeys(cell["length"] for cell in panels[0][1]))
    text = (lambda value: f"{100 * value:.0f}") if len(lengths) * len(depths) <= _WRITTEN else None
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (name, cells, mean, trained) in zip(grid.flat, panels, strict=False):
        at = {(cell["length"], cell["depth"]): cell["accuracy"] for cell in cells}
        values = [[at[length, depth] for length in lengths] for depth in depths]
        image = cell_map(axes, values, text, vmin=0, vmax=1)
        # Between the last length within the trained one and the first beyond it.
        border = sum(length <= trained for length in lengths) - 0.5
        for colour, line in (("white", "-"), (PALETTE[1], "--")):  # legible on every colour of the map
            axes.axvline(border, color=colour, linestyle=line, linewidth=2.5, clip_on=False)
        axes.set_title(f"{name}\nmean {100 * mean:.1f} %", fontsize="small")
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45, ha="right")
        axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths])
        axes.tick_params(labelsize="x-small")
    ends = ", ".join(f"{trained:,}" for trained in sorted({panel[3] for panel in panels}))
    figure.supxlabel(f"length in tokens (dashed: end of the trained length, {ends})", fontsize="small")
    figure.supylabel("depth of the needle", fontsize="small")
    figure.colorbar(image, ax=list(grid.flat), label="accuracy", shrink=0.9, format=PercentFormatter(1, symbol=" %"))


def _lines(axes: Any, panels: Sequence[Panel], lengths: Sequence[int]) -> None:
    from matplotlib.ticker import PercentFormatter

    models = list(dict.fromkeys(panel[0].partition(", scopes ")[0] for panel in panels))
    for name, cells, mean, _ in panels:
        model, _, reading = name.partition(", scopes ")
        style = line_style(models.index(model), hollow=reading == "grown")
        points = [cell["length"] for cell in cells], [cell["accuracy"] for cell in cells]
        axes.plot(*points, **style, label=f"{name} (mean {100 * mean:.1f} %)", clip_on=False)
    borders(axes, {panel[3] for panel in panels})
    length_ticks(axes, lengths)
    axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    axes.set(xlabel="length in tokens (dotted: trained)", ylabel="accuracy", ylim=(0, 1))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14))
