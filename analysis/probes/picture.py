"""The picture of farsight probes: a map by layer and position for each model, and all models' errors by layer."""

import math
from pathlib import Path
from typing import Any

from farsight.outputs import model_style, short_names


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Writes the picture (PNG, SVG or PDF) of `probe_model`'s figures by model: SCOPE's figures 4, 13 and 12."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names, figures = short_names(results), list(results.values())
    columns = min(4, len(figures))
    rows = math.ceil(len(figures) / columns)
    figure = plt.figure(figsize=(max(6.4, 3.1 * columns + 1), 2.7 * rows + 3.4), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(2.7 * rows, 3.4))
    maps, curves = parts
    panels = maps.subplots(rows, columns, squeeze=False, sharey=True)
    brightest, darkest = _scale(figures)
    for axes in panels.flat[len(figures) :]:
        axes.set_visible(False)
    for axes, name, of_one in zip(panels.flat, names, figures, strict=False):
        values = [[math.nan if x is None else x for x in layer["by_position"]] for layer in of_one["layers"]]
        edges, depth = of_one["positions"], len(of_one["layers"])
        # Bright means a low error, as in the paper.
        image = axes.pcolormesh(
            edges, [x - 1.5 for x in range(depth + 1)], values, cmap="viridis_r", vmin=brightest, vmax=darkest
        )
        axes.set_facecolor("lightgrey")
        axes.set_title(name, fontsize="small")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
        axes.tick_params(labelsize="x-small")
    maps.supxlabel("position in the sequence", fontsize="small")
    maps.supylabel("layer (−1: embedding)", fontsize="small")
    maps.colorbar(image, ax=list(panels.flat), label="error in tokens")
    _curves(curves.subplots(), names, figures)
    first = figures[0]
    figure.suptitle(
        f"position probes, {first['length']:,} tokens: mean absolute error on held-out sequences", fontsize="medium"
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _scale(figures: list[dict[str, Any]]) -> tuple[float, float]:
    """Lowest and highest error of all cells."""
    cells = [x for of_one in figures for layer in of_one["layers"] for x in layer["by_position"] if x is not None]
    return min(cells), max(cells)


def _curves(axes: Any, names: list[str], figures: list[dict[str, Any]]) -> None:
    from matplotlib.ticker import MaxNLocator

    for number, (name, of_one) in enumerate(zip(names, figures, strict=True)):
        layers = of_one["layers"]
        points = [layer["layer"] for layer in layers], [layer["error"] for layer in layers]
        axes.plot(*points, **model_style(number), label=name)
    for guess in sorted({round(of_one["guess"], 1) for of_one in figures}):
        axes.axhline(guess, color="grey", linestyle=":", linewidth=1.2)
    axes.set(xlabel="layer (−1: embedding; dotted: best single guess)", ylabel="error in tokens")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
