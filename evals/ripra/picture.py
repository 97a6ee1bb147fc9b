"""Draws RiPRA's diagnostics."""

from pathlib import Path
from typing import Any

from farsight.json_files import or_nan
from farsight.plots import PALETTE, cell_map, picture


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws the similarity of the layers' relevance, with a box around layers that share an anchor, and the relevance around each
    document's evidence, if there is any (figures 3 and 4 of the paper).

    Args:
        result: from `evals.ripra.diagnose.diagnose`.
    """
    evidence = result["evidence"]
    with picture(path, 6 + 6 * bool(evidence), 5) as figure:
        axes, *others = figure.subplots(1, 1 + bool(evidence), squeeze=False)[0]
        image = cell_map(axes, result["similarity"], None, vmin=0, vmax=1, aspect="equal")
        layers = len(result["similarity"])
        for anchor, end in zip(result["anchors"], [*result["anchors"][1:], layers], strict=True):
            _box(axes, anchor - 0.5, anchor - 0.5, end - anchor, end - anchor)
        axes.set(xlabel="layer", ylabel="layer", title=f"cosine of relevance, {result['tokens'][0]:,} tokens")
        for axes in others:
            windows = [[or_nan(value) for value in found["window"]] for found in evidence]
            half = len(windows[0]) // 2
            edges = -half - 0.5, half + 0.5, len(windows) - 0.5, -0.5
            cell_map(axes, windows, None, vmin=0, vmax=1, extent=edges)
            _box(axes, -0.5, -0.5, 1, len(windows))
            axes.set(
                xlabel=f"chunks of {result['settings']['chunk']} tokens from the evidence",
                ylabel="document",
                title=f"relevance in layer {result['anchors'][-1]}",
            )
        for axes in figure.axes:
            axes.locator_params(integer=True)
        figure.colorbar(image, ax=figure.axes, shrink=0.8)


def _box(axes: Any, left: float, top: float, width: float, height: float) -> None:
    """A dashed box that is legible on every colour of the map."""
    from matplotlib.patches import Rectangle

    for colour, line in (("white", "-"), (PALETTE[1], "--")):
        box = Rectangle((left, top), width, height, fill=False, edgecolor=colour, linestyle=line, linewidth=2)
        axes.add_patch(box)
