"""The picture of farsight probes: a map by layer and position for each model, and all models' errors by layer."""

import math
from pathlib import Path
from typing import Any

from farsight.json_files import or_nan
from farsight.outputs import short_names
from farsight.plots import GREY, MAP, line_style, picture, whole_numbers


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Writes the picture (PNG, SVG or PDF) of `probe_model`'s figures by model: SCOPE's figures 4, 13 and 12."""
    names, figures = short_names(results), list(results.values())
    columns = min(4, len(figures))
    rows = math.ceil(len(figures) / columns)
    with picture(path, max(6.4, 3.1 * columns + 1), 2.7 * rows + 3.4) as figure:
        maps, curves = figure.subfigures(2, 1, height_ratios=(2.7 * rows, 3.4))
        panels = maps.subplots(rows, columns, squeeze=False, sharey=True)
        cells = [x for of_one in figures for layer in of_one["layers"] for x in layer["by_position"] if x is not None]
        for axes in panels.flat[len(figures) :]:
            axes.set_visible(False)
        for axes, name, of_one in zip(panels.flat, names, figures, strict=False):
            values = [[or_nan(x) for x in layer["by_position"]] for layer in of_one["layers"]]
            depths = [x - 1.5 for x in range(len(values) + 1)]
            axes.grid(False)
            # Bright means a low error, as in the paper.
            scale = {"cmap": f"{MAP}_r", "vmin": min(cells), "vmax": max(cells)}
            image = axes.pcolormesh(of_one["positions"], depths, values, **scale)
            axes.set_facecolor("lightgrey")
            axes.set_title(name, fontsize="small")
            axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
            whole_numbers(axes.yaxis)
            axes.tick_params(labelsize="x-small")
        maps.supxlabel("position in the sequence", fontsize="small")
        maps.supylabel("layer (−1: embedding)", fontsize="small")
        maps.colorbar(image, ax=list(panels.flat), label="error in tokens")
        _curves(curves.subplots(), names, figures)
        figure.suptitle(f"position probes, {figures[0]['length']:,} tokens: mean absolute error on held-out sequences")


def _curves(axes: Any, names: list[str], figures: list[dict[str, Any]]) -> None:
    for number, (name, of_one) in enumerate(zip(names, figures, strict=True)):
        layers = of_one["layers"]
        points = [layer["layer"] for layer in layers], [layer["error"] for layer in layers]
        axes.plot(*points, **line_style(number), label=name)
    for guess in sorted({round(of_one["guess"], 1) for of_one in figures}):
        axes.axhline(guess, color=GREY, linestyle=":", linewidth=1.2)
    axes.set(xlabel="layer (−1: embedding; dotted: best single guess)", ylabel="error in tokens")
    axes.set_ylim(0, 1.06 * axes.dataLim.ymax)  # markers at the top stay whole
    whole_numbers(axes.xaxis)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
