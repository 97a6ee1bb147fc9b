"""Draws RiPRA's diagnostics."""

import math
from pathlib import Path
from typing import Any


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws the similarity of the layers' relevance, with a box around layers that share an anchor, and the relevance around each
    document's evidence, if there is any (figures 3 and 4 of the paper).

    Args:
        result: from `evals.ripra.diagnose.diagnose`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Rectangle

    evidence = result["evidence"]
    figure, panels = plt.subplots(
        1, 1 + bool(evidence), figsize=(6 + 6 * bool(evidence), 5), layout="constrained", squeeze=False
    )
    axes = panels[0, 0]
    image = axes.imshow(result["similarity"], vmin=0, vmax=1, cmap="Blues")
    layers = len(result["similarity"])
    for anchor, end in zip(result["anchors"], [*result["anchors"][1:], layers], strict=True):
        side = end - anchor
        axes.add_patch(
            Rectangle((anchor - 0.5, anchor - 0.5), side, side, fill=False, edgecolor="crimson", linestyle="--")
        )
    axes.set(xlabel="layer", ylabel="layer", title=f"cosine of relevance, {result['tokens'][0]:,} tokens")
    axes.locator_params(integer=True)
    figure.colorbar(image, ax=axes, shrink=0.8)
    if evidence:
        axes = panels[0, 1]
        windows = [[math.nan if value is None else value for value in found["window"]] for found in evidence]
        half = len(windows[0]) // 2
        image = axes.imshow(
            windows,
            vmin=0,
            vmax=1,
            cmap="Blues",
            aspect="auto",
            extent=(-half - 0.5, half + 0.5, len(windows) - 0.5, -0.5),
        )
        axes.add_patch(Rectangle((-0.5, -0.5), 1, len(windows), fill=False, edgecolor="crimson"))
        axes.set(
            xlabel=f"chunks of {result['settings']['chunk']} tokens from the evidence",
            ylabel="document",
            title=f"relevance in layer {result['anchors'][-1]}",
        )
        axes.locator_params(integer=True)
        figure.colorbar(image, ax=axes, shrink=0.8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
