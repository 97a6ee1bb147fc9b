"""How the layers of a model know position, before anything is trained: a table, a picture, figures.

    farsight positions lasp_llama3_8b --picture lasp.png
    farsight positions runs/my_run/model --length 32768 --json positions.json

It takes a config, a recipe (of which the last stage, or `--stage`) or a model directory. The picture has a panel for
each thing the layers use: the wavelengths of what rotates, GARFA's factors, who sees whom, how much ALiBi leaves of a
weight, the sinusoidal embedding.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farsight.cli import bounded, command
from farsight.configs.load import ConfigError
from farsight.configs.schema import NoRotary, Rope, Rotating
from farsight.files import prepare_file, write_text
from farsight.model.build import ModelConfig
from farsight.model.position.garfa import LayerGarfa, alpha, alphas, head_scales
from farsight.model.position.layers import LayerPosition, describe, layer_selection
from farsight.model.position.rope import rope_frequencies
from farsight.model.position.scope import DENSE_SCOPE, cost_ratio
from farsight.model.position.sinusoidal import sinusoidal_embedding
from farsight.training.finetune.garfa_picture import draw_alphas_on
from farsight.training.stages import read_config


def wavelengths(rotary: Rotating, head_dim: int, length: int) -> Tensor:
    """Tokens in which each pair of dimensions turns once, in a sequence of `length` tokens: fp32 [H/2]."""
    return 2 * math.pi / rope_frequencies(rotary, head_dim, length).inv_freq


def head_wavelengths(rotary: Rotating, garfa: LayerGarfa, head_dim: int, length: int) -> Tensor:
    """The same of each key/value head under GARFA: fp32 [K, H/2]."""
    scales = head_scales(torch.tensor(garfa.raw), head_dim, garfa.equation)
    return wavelengths(rotary, head_dim, length) / scales


def share_by_distance(layers: Sequence[LayerPosition], length: int) -> Tensor:
    """Share of all layers' heads that see a key 0, 1, … length − 1 tokens back: fp32 [length]."""
    scopes = torch.tensor(sorted(scope for layer in layers for scope in layer.scopes))
    return 1 - torch.searchsorted(scopes, torch.arange(length), right=True) / len(scopes)


def figures(config: ModelConfig, length: int) -> dict[str, Any]:
    """What the picture shows, as numbers."""
    layers, head_dim = config.layers(length), config.architecture.head_dim
    return {
        "length": length,
        "trained_length": config.trained_length,
        "embedding": config.position.embedding,
        "pairs_of_dense_over_visible": _ratio(layers, length),
        "layers": [
            {
                "rotary": layer.rotary.kind,
                "wavelengths": []
                if isinstance(layer.rotary, NoRotary)
                else wavelengths(layer.rotary, head_dim, length).tolist(),
                "scopes": [min(scope, length) for scope in layer.scopes],
                "alibi_slopes": list(layer.alibi_slopes or ()),
                "garfa": None if layer.garfa is None else _garfa_figures(layer, layer.garfa, head_dim, length),
            }
            for layer in layers
        ],
    }


def _garfa_figures(layer: LayerPosition, garfa: LayerGarfa, head_dim: int, length: int) -> dict[str, Any]:
    assert not isinstance(layer.rotary, NoRotary)
    return {
        "alpha": alpha(torch.tensor(garfa.raw)).tolist(),
        "queries": garfa.queries,
        "wavelengths": head_wavelengths(layer.rotary, garfa, head_dim, length).tolist(),
    }


def _ratio(layers: Sequence[LayerPosition], length: int) -> float:
    return cost_ratio(length, tuple(min(scope, length) for layer in layers for scope in layer.scopes))


# ── The picture ───────────────────────────────────────────────────────────────────────────────────────


def draw(config: ModelConfig, length: int, path: Path) -> None:
    """One panel for each mechanism that the layers use; a model without any gets the panel of who sees whom."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    layers = config.layers(length)
    panels: list[Callable[[Any], None]] = []
    if any(not isinstance(layer.rotary, NoRotary) for layer in layers):
        panels.append(lambda axes: _draw_wavelengths(axes, config, layers, length))
    if (garfa := config.position.garfa) is not None and garfa.layers:
        panels.append(lambda axes: draw_alphas_on(axes, alphas(garfa)))
    if any(layer.alibi_slopes for layer in layers):
        panels.append(lambda axes: _draw_alibi(axes, layers, length))
    if config.position.embedding == "sinusoidal":
        panels.append(lambda axes: _draw_sinusoidal(axes, config.architecture.dim))
    if not panels or any(scope < DENSE_SCOPE for layer in layers for scope in layer.scopes):
        panels.append(lambda axes: _draw_who_sees_whom(axes, layers, length))
        panels.append(lambda axes: _draw_scopes(axes, layers, length))
    figure, axes = plt.subplots(1, len(panels), figsize=(5.6 * len(panels), 4.2), layout="constrained", squeeze=False)
    for panel, axis in zip(panels, axes[0], strict=True):
        panel(axis)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _draw_wavelengths(axes: Any, config: ModelConfig, layers: Sequence[LayerPosition], length: int) -> None:
    """Wavelength of each pair, a line for each rotation; dashed the same theta unscaled."""
    from matplotlib import colormaps

    head_dim = config.architecture.head_dim
    layers_of: dict[Rotating, list[int]] = {}
    for number, layer in enumerate(layers):
        if not isinstance(layer.rotary, NoRotary):
            layers_of.setdefault(layer.rotary, []).append(number)
    host = config.position.rotary
    if isinstance(host, NoRotary):  # rules alone rotate
        host = next(iter(layers_of))
    plain = Rope(theta=host.theta)
    for order, (rotary, numbers) in enumerate(layers_of.items()):
        colour = colormaps["viridis"](order / max(1, len(layers_of) - 1) * 0.9)
        shown = len(layers_of) < 8 or order in (0, len(layers_of) - 1)
        label = f"{rotary.kind}, " + (_layers(numbers, len(layers))) if shown else None
        axes.plot(wavelengths(rotary, head_dim, length), color=colour, label=label)
    if list(layers_of) != [plain]:
        axes.plot(wavelengths(plain, head_dim, length), "k--", linewidth=1, label=f"unscaled, θ {plain.theta:,.0f}")
    with_garfa = [(layer, layer.garfa) for layer in layers if layer.garfa is not None]
    for order, (layer, garfa) in enumerate(with_garfa):
        assert not isinstance(layer.rotary, NoRotary)
        turns_KF = head_wavelengths(layer.rotary, garfa, head_dim, length)
        label = "with GARFA, heads of a layer" if order == 0 else None
        axes.fill_between(range(head_dim // 2), turns_KF.amin(0), turns_KF.amax(0), color="C0", alpha=0.25, label=label)
    axes.axhline(length, color="C3", linewidth=1, linestyle=":", label=f"{length:,} tokens")
    original = getattr(host, "original_length", None)
    if original:
        axes.axhline(original, color="C1", linewidth=1, linestyle=":", label=f"{original:,} tokens, before")
    rotated = [n for numbers in layers_of.values() for n in numbers]
    still = [n for n in range(len(layers)) if n not in rotated]
    title = "what rotates" + (f" (not {_layers(still, len(layers))})" if still else "")
    axes.set(xlabel="pair of dimensions", ylabel="tokens a turn", yscale="log", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _layers(numbers: Sequence[int], n_layers: int) -> str:
    if len(numbers) == n_layers:
        return "all layers"
    return "layer" + "s" * (len(numbers) > 1) + " " + layer_selection(numbers)


def _draw_alibi(axes: Any, layers: Sequence[LayerPosition], length: int) -> None:
    """What is left of a weight that is 1 without the bias, a line a head."""
    from matplotlib import colormaps

    slopes = sorted({slope for layer in layers for slope in layer.alibi_slopes or ()}, reverse=True)
    distance = torch.logspace(0, math.log10(length), 200)
    for order, slope in enumerate(slopes):
        label = f"slope {slope:.3g}" if order in (0, len(slopes) - 1) else None
        colour = colormaps["viridis"](order / max(1, len(slopes) - 1) * 0.9)
        axes.plot(distance, torch.exp(-slope * distance), color=colour, label=label)
    axes.set(xlabel="distance in tokens", xscale="log", ylabel="weight left, exp(−slope · distance)")
    axes.set_title("what ALiBi takes away, a line a head")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _draw_sinusoidal(axes: Any, dim: int) -> None:
    sines = sinusoidal_embedding(torch.arange(256)[None], dim)[0, :, ::2]  # beside its cosine, each would be a stripe
    image = axes.imshow(sines, aspect="auto", cmap="RdBu", interpolation="nearest")
    axes.set(xlabel="pair of dimensions, its sine", ylabel="position", title="what is added to the embedding")
    axes.figure.colorbar(image, ax=axes)


def _draw_who_sees_whom(axes: Any, layers: Sequence[LayerPosition], length: int) -> None:
    """Share of heads by query and key, on at most 512 positions of each."""
    share = share_by_distance(layers, length)
    at = torch.linspace(0, length - 1, min(length, 512)).long()
    distance = at[:, None] - at[None]
    image = torch.where(distance >= 0, share[distance.clamp(min=0)], torch.nan)
    drawn = axes.imshow(image, extent=(0, length, length, 0), cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
    axes.set(xlabel="key", ylabel="query", title="who sees whom: share of heads")
    axes.figure.colorbar(drawn, ax=axes)


def _draw_scopes(axes: Any, layers: Sequence[LayerPosition], length: int) -> None:
    """How far back each head sees, kinds of layer beside each other."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for number, layer in enumerate(layers):
        alike.setdefault(layer.scopes, []).append(number)
    width = 0.8 / len(alike)
    for order, (scopes, numbers) in enumerate(alike.items()):
        heads = [head + (order + 0.5) * width - 0.4 for head in range(len(scopes))]
        axes.bar(heads, [min(s, length) for s in scopes], width, label=_layers(numbers, len(layers)))
    axes.set(xlabel="head", ylabel="tokens seen", yscale="log", ylim=(1, 2 * length))
    axes.set_title(f"scopes: 1/{_ratio(layers, length):.2f} of the causal pairs")
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize="small")


@command
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="farsight positions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="config file, recipe (or a shipped one's name) or model directory")
    parser.add_argument("--tiny", action="store_true", help="the small form of a config file or recipe")
    parser.add_argument("--stage", help="stage of a recipe (default: the last)")
    parser.add_argument(
        "--length", type=bounded(int, least=1), help="sequence length in tokens (default: the trained one)"
    )
    parser.add_argument("--picture", type=Path, help="PNG, SVG or PDF file to write")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    for name in ("picture", "json"):
        if path := getattr(options, name):
            prepare_file(path)
    if options.picture and options.picture.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--picture {options.picture} must end with .png, .svg or .pdf.")
    config = read_config(options.model, options.stage, options.tiny)
    length = options.length or config.trained_length
    layers = config.layers(length)
    print(describe(layers))
    print(f"{length:,} tokens: {_ratio(layers, length):.2f} × fewer query-key pairs than dense causal attention")
    if options.json:
        write_text(options.json, json.dumps(figures(config, length), indent=2) + "\n")
    if options.picture:
        draw(config, length, options.picture)
        print(options.picture)


if __name__ == "__main__":
    main()
