"""A heat map of GARFA's factors: alpha of each key/value head in each layer."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_alphas(path: Path, alphas: Mapping[int, Sequence[float]]) -> None:
    """Writes the picture.

    Args:
        path: PNG, SVG or PDF file.
        alphas: alpha of each key/value head, by layer; see `model.adapt.garfa.alphas`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    heads = len(next(iter(alphas.values())))
    size = max(3.6, 0.6 * heads + 1.8), max(2.4, 0.32 * len(alphas) + 1.2)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    draw_alphas_on(axes, alphas)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def draw_alphas_on(axes: Any, alphas: Mapping[int, Sequence[float]]) -> None:
    """Draws the heat map on `axes`: a symmetric logarithmic scale whose white is alpha = 1, which changes nothing."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    layers = sorted(alphas)
    values = [list(alphas[layer]) for layer in layers]
    farthest = max(1.05, *(max(a, 1 / a) for row in values for a in row))
    norm = LogNorm(1 / farthest, farthest)
    image = axes.imshow(values, cmap="RdBu_r", norm=norm, aspect="auto", interpolation="nearest")
    for row, alphas_K in enumerate(values):
        for head, value in enumerate(alphas_K):
            dark = abs(math.log(value)) > 0.6 * math.log(farthest)
            colour = "white" if dark else "black"
            axes.text(head, row, f"{value:.3f}", ha="center", va="center", fontsize="x-small", color=colour)
    axes.set(xlabel="key/value head", ylabel="layer", title="alpha: factor on the RoPE base")
    axes.set_xticks(range(len(values[0])))
    axes.set_yticks(range(len(layers)), labels=[str(layer) for layer in layers])
    bar = axes.figure.colorbar(image, ax=axes, format=StrMethodFormatter("{x:.3g}"))
    bar.ax.yaxis.set_major_locator(FixedLocator([1 / farthest, farthest**-0.5, 1.0, farthest**0.5, farthest]))
    bar.ax.yaxis.set_minor_locator(NullLocator())
