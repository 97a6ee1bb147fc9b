"""A heat map of GARFA's factors: alpha of each key/value head in each layer."""

from pathlib import Path
from typing import Any

from farsight.configs.schema import Garfa
from farsight.model.position.garfa import alphas
from farsight.plots import DIVERGING, cell_map, picture


def draw_alphas(path: Path, garfa: Garfa) -> None:
    """Writes the picture, a PNG, SVG or PDF file."""
    heads = len(garfa.layers[0].raw)
    with picture(path, max(3.6, 0.6 * heads + 1.8), max(2.4, 0.32 * len(garfa.layers) + 1.2)) as figure:
        draw_alphas_on(figure.subplots(), garfa)


def draw_alphas_on(axes: Any, garfa: Garfa) -> None:
    """Draws the heat map on `axes`: a symmetric logarithmic scale whose white is alpha = 1, which changes nothing."""
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

    by_layer = alphas(garfa)
    layers = sorted(by_layer)
    values = [by_layer[layer] for layer in layers]
    farthest = max(1.05, *(max(a, 1 / a) for row in values for a in row))
    norm = LogNorm(1 / farthest, farthest)
    image = cell_map(axes, values, "{:.3f}".format, cmap=DIVERGING, norm=norm)
    factor = "alpha" if garfa.equation == 12 else "√alpha"
    axes.set(xlabel="key/value head", ylabel="layer", title=f"alpha; factor on the RoPE base: {factor}")
    axes.set_xticks(range(len(values[0])))
    axes.set_yticks(range(len(layers)), labels=[str(layer) for layer in layers])
    bar = axes.figure.colorbar(image, ax=axes, format=StrMethodFormatter("{x:.3g}"))
    bar.ax.yaxis.set_major_locator(FixedLocator([1 / farthest, farthest**-0.5, 1.0, farthest**0.5, farthest]))
    bar.ax.yaxis.set_minor_locator(NullLocator())
