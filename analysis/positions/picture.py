"""The picture of farsight positions: a panel for each position mechanism that a model uses."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from farsight.analysis.positions.figures import head_wavelengths, pair_ratio, share_by_distance, wavelengths
from farsight.configs.schema import NoRotary, Rope, Rotating
from farsight.model.build import ModelConfig
from farsight.model.position.garfa import alphas
from farsight.model.position.layers import LayerPosition, layer_selection
from farsight.model.position.scope import DENSE_SCOPE
from farsight.model.position.sinusoidal import sinusoidal_embedding
from farsight.plots import DIVERGING, PALETTE, cell_map, picture, shades
from farsight.training.finetune.garfa_picture import draw_alphas_on


def draw(config: ModelConfig, length: int, path: Path) -> None:
    """Writes the picture (PNG, SVG or PDF); a model without any mechanism gets the panels of scopes."""
    layers = config.layers(length)
    panels: list[Callable[[Any], None]] = []
    if any(not isinstance(layer.rotary, NoRotary) for layer in layers):
        panels.append(lambda axes: _draw_wavelengths(axes, config, layers, length))
    height = 4.2
    if (garfa := config.position.garfa) is not None and garfa.layers:
        panels.append(lambda axes: draw_alphas_on(axes, garfa))
        height = max(height, 0.2 * len(alphas(garfa)) + 1.2)  # room for each layer's figures
    if any(layer.bias for layer in layers):
        panels.append(lambda axes: _draw_alibi(axes, layers, length))
    if config.position.embedding == "sinusoidal":
        panels.append(lambda axes: _draw_sinusoidal(axes, config.architecture.dim))
    if not panels or any(scope < DENSE_SCOPE for layer in layers for scope in layer.scopes):
        panels.append(lambda axes: _draw_visibility(axes, layers, length))
        panels.append(lambda axes: _draw_scopes(axes, layers, length))
    with picture(path, 5.6 * len(panels), height) as figure:
        for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
            panel(axes)


def _draw_wavelengths(axes: Any, config: ModelConfig, layers: Sequence[LayerPosition], length: int) -> None:
    """Wavelength of each pair of dimensions, a line per kind of rotation; dashed for the same theta unscaled."""
    head_dim = config.architecture.rotated_dim
    layers_of: dict[Rotating, list[int]] = {}
    for number, layer in enumerate(layers):
        if not isinstance(layer.rotary, NoRotary):
            layers_of.setdefault(layer.rotary, []).append(number)
    host = config.position.rotary
    if isinstance(host, NoRotary):  # only rules add rotation
        host = next(iter(layers_of))
    plain = Rope(theta=host.theta)
    for order, ((rotary, numbers), colour) in enumerate(zip(layers_of.items(), shades(len(layers_of)), strict=True)):
        shown = len(layers_of) < 8 or order in (0, len(layers_of) - 1)
        label = f"{rotary.kind}, " + (_layers(numbers, len(layers))) if shown else None
        axes.plot(wavelengths(rotary, head_dim, length), color=colour, label=label)
    if list(layers_of) != [plain]:
        axes.plot(
            wavelengths(plain, head_dim, length),
            "--",
            color=PALETTE[4],
            linewidth=1,
            label=f"unscaled, θ {plain.theta:,.0f}",
        )
    with_garfa = [(layer, layer.garfa) for layer in layers if layer.garfa is not None]
    for order, (layer, garfa) in enumerate(with_garfa):
        assert not isinstance(layer.rotary, NoRotary)
        turns_KF = head_wavelengths(layer.rotary, garfa, head_dim, length)
        label = "with GARFA, heads of a layer" if order == 0 else None
        axes.fill_between(
            range(head_dim // 2), turns_KF.amin(0), turns_KF.amax(0), color=PALETTE[0], alpha=0.25, label=label
        )
    axes.axhline(length, color=PALETTE[1], linewidth=1, linestyle=":", label=f"{length:,} tokens")
    original = getattr(host, "original_length", None)
    if original:
        axes.axhline(original, color=PALETTE[3], linewidth=1, linestyle="-.", label=f"{original:,} tokens, originally")
    rotated = [n for numbers in layers_of.values() for n in numbers]
    still = [n for n in range(len(layers)) if n not in rotated]
    title = "wavelengths of RoPE" + (f" (not in {_layers(still, len(layers))})" if still else "")
    axes.set(xlabel="pair of dimensions", ylabel="tokens per turn", yscale="log", title=title)
    axes.legend()


def _layers(numbers: Sequence[int], n_layers: int) -> str:
    if len(numbers) == n_layers:
        return "all layers"
    return "layer" + "s" * (len(numbers) > 1) + " " + layer_selection(numbers)


def _draw_alibi(axes: Any, layers: Sequence[LayerPosition], length: int) -> None:
    """The factor ALiBi puts on an attention weight by distance, a line per slope."""
    of_layers = (layer.alibi_slopes("the picture of positions") or () for layer in layers)
    slopes = sorted({slope for slopes in of_layers for slope in slopes}, reverse=True)
    distance = torch.logspace(0, math.log10(length), 200)
    for slope, colour in zip(slopes, shades(len(slopes)), strict=True):
        label = f"slope {slope:.3g}" if slope in (slopes[0], slopes[-1]) else None
        axes.plot(distance, torch.exp(-slope * distance), color=colour, label=label)
    axes.set(xlabel="distance in tokens", xscale="log", ylabel="factor on the weight, exp(−slope · distance)")
    axes.set_title("ALiBi, a line per slope")
    axes.legend()


def _draw_sinusoidal(axes: Any, dim: int) -> None:
    sines_TP = sinusoidal_embedding(torch.arange(256)[None], dim)[0, :, ::2]  # cosines between them would make stripes
    image = cell_map(axes, sines_TP.tolist(), None, cmap=DIVERGING)
    axes.set(xlabel="pair of dimensions (sine)", ylabel="position", title="sinusoidal embedding")
    axes.figure.colorbar(image, ax=axes)


def _draw_visibility(axes: Any, layers: Sequence[LayerPosition], length: int) -> None:
    """Share of heads that see each key from each query, at up to 512 positions of each."""
    from matplotlib.ticker import MaxNLocator

    share = share_by_distance(layers, length)
    at = torch.linspace(0, length - 1, min(length, 512)).long()
    distance = at[:, None] - at[None]
    image = torch.where(distance >= 0, share[distance.clamp(min=0)], torch.nan)
    drawn = cell_map(axes, image.tolist(), None, extent=(0, length, length, 0), vmin=0, vmax=1, aspect="equal")
    axes.set(xlabel="key", ylabel="query", title="share of heads that see the key")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5))
        axis.set_major_formatter("{x:,.0f}")
    axes.figure.colorbar(drawn, ax=axes)


def _draw_scopes(axes: Any, layers: Sequence[LayerPosition], length: int) -> None:
    """How far back each head sees, with different layers side by side."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for number, layer in enumerate(layers):
        alike.setdefault(layer.scopes, []).append(number)
    width = 0.8 / len(alike)
    for order, (scopes, numbers) in enumerate(alike.items()):
        heads = [head + (order + 0.5) * width - 0.4 for head in range(len(scopes))]
        axes.bar(heads, [min(s, length) for s in scopes], width, label=_layers(numbers, len(layers)))
    axes.set(xlabel="head", ylabel="tokens seen", yscale="log", ylim=(1, 2 * length))
    axes.set_title(f"scopes: 1/{pair_ratio(layers, length):.2f} of causal pairs")
    axes.grid(False, axis="x")
    axes.legend()
