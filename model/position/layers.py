"""The position settings of each layer: the one place where `[position]` of a config is resolved into layers.

Rules apply first, in the order given; then LASP, to whatever rotary the layer has by then; then GARFA's factors, and the
scopes and slopes of the layer's heads. NoPE in every k-th layer is the rule `layers = "k-1::k"` with `rotary.kind = "none"`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from farsight.configs.schema import LayerRule, LongRope, NoRotary, Position, Rotary, Scope
from farsight.errors import ConfigError
from farsight.model.position.bias import LayerBias, layer_bias
from farsight.model.position.garfa import LayerGarfa, alpha, layer_garfas
from farsight.model.position.lasp import apply_lasp, check_lasp
from farsight.model.position.rope import rope_frequencies
from farsight.model.position.scope import DENSE_SCOPE, head_scopes, layout_order


@dataclass(frozen=True)
class LayerPosition:
    """Position and attention of one layer, fully resolved; `Attention` and `Llama` are built from it."""

    rotary: Rotary
    """After rules and LASP."""
    scopes: tuple[int, ...]
    """Tokens that each of the N query heads sees, the query's own included, in physical head order."""
    bias: LayerBias | None
    """Term in the scores that depends on the distance; None for no bias."""
    scope_ranks: tuple[int, ...] | None = None
    """h in each query head's scope ceil(T^(h/N)), if T grows with sequences past the trained length; else None."""
    garfa: LayerGarfa | None = None
    """Factors on the base of each key/value head; None rotates all heads alike."""

    def alibi_slopes(self, user: str) -> tuple[float, ...] | None:
        """Slope of each query head's bias −slope · distance, in physical head order; None for no bias.

        Args:
            user: what has no other bias than ALiBi, for the error's message.

        Raises:
            ConfigError: another bias; names it and the user.
        """
        if self.bias is None:
            return None
        if self.bias.kind != "alibi":
            raise ConfigError(f'{user}: there is no bias of kind "{self.bias.kind}" here, only "alibi"')
        return self.bias.coefficients[0]


def resolve_layers(
    position: Position,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    rotated_dim: int,
    trained_length: int,
    length: int,
) -> tuple[LayerPosition, ...]:
    """Every layer's position. It follows from config alone, so that all ranks agree.

    `trained_length` is the training sequence length of the stage and `length` that of the current sequence, in tokens;
    they are equal during training.

    Raises ValueError, naming the setting, for rules that name no layer or set nothing and for settings out of range.
    """
    garfas, resolved = layer_garfas(position.garfa, n_layers, n_kv_heads), []
    for layer, setting in enumerate(layer_settings(position, n_layers)):
        rotary = setting.rotary
        if setting.lasp is not None:
            check_lasp(setting.lasp, n_layers)  # which concerns the section, and no single layer
        try:
            if setting.lasp is not None:
                rotary = apply_lasp(rotary, setting.lasp, layer, n_layers)
            if not isinstance(rotary, NoRotary):
                rope_frequencies(rotary, rotated_dim, length)  # refuses bad settings before a model is built
        except ValueError as error:
            raise ValueError(f"layer {layer}: {error}") from None
        if layer in garfas and isinstance(rotary, NoRotary):
            raise ValueError(f"position.garfa.layers names layer {layer}, which does not rotate: leave it out")
        scopes = head_scopes(setting.heads, n_heads, n_kv_heads, trained_length, length)
        bias = layer_bias(setting.bias, n_heads)
        ranks = None
        if isinstance(setting.heads, Scope) and setting.heads.scope_max == "length":
            ranks = tuple(index + 1 for index in layout_order(setting.heads.layout, n_heads, n_kv_heads))
        resolved.append(LayerPosition(rotary, scopes, bias, ranks, garfas.get(layer)))
    return tuple(resolved)


def layer_settings(position: Position, n_layers: int) -> list[Position]:
    """The position of each layer after its rules, before LASP and GARFA.

    Raises ValueError for rules that name no layer or set nothing.
    """
    settings = [replace(position, rules=())] * n_layers
    for number, rule in enumerate(position.rules):
        try:
            layers = select_layers(rule.layers, n_layers)
            settings = [_ruled(setting, rule) if layer in layers else setting for layer, setting in enumerate(settings)]
        except ValueError as error:
            raise ValueError(f"position.rules[{number}]: {error}") from None
    return settings


def select_layers(selection: str, n_layers: int) -> frozenset[int]:
    """Layers named by comma-separated Python indices and slices: "0", "-1", "0:8", "3::4", "0:4,28:".

    Stricter than Python: an index or bound outside the model, or a part that names no layer, raises ValueError,
    because it means that the rule was written for a model of another depth.
    """
    layers: set[int] = set()
    for part in selection.split(","):
        try:
            numbers = [int(number) if number.strip() else None for number in part.split(":")]
        except ValueError:
            numbers = []
        match numbers:
            case [int(index)]:
                bounds, chosen = [index], range(index % n_layers, index % n_layers + 1)
                valid = range(-n_layers, n_layers)
            case [_, _] | [_, _, _]:
                if len(numbers) == 3 and numbers[2] is not None and numbers[2] < 1:
                    raise ValueError(f"layers {selection!r} has step {numbers[2]}; set a step of 1 or more")
                bounds, chosen = [bound for bound in numbers[:2] if bound is not None], range(n_layers)[slice(*numbers)]
                valid = range(-n_layers, n_layers + 1)
            case _:
                raise ValueError(
                    f"layers {selection!r} can't be read at {part!r}; write indices and slices such as "
                    '"0", "-1", "0:8", "3::4" or "0:4,28:"'
                )
        for bound in bounds:
            if bound not in valid:
                raise ValueError(
                    f"layers {selection!r} names {bound}, but the model has {n_layers} layers: 0 to {n_layers - 1}"
                )
        if not chosen:
            raise ValueError(f"layers {selection!r} selects none of the model's {n_layers} layers at {part!r}")
        layers.update(chosen)
    return frozenset(layers)


def describe(layers: tuple[LayerPosition, ...]) -> str:
    """A human-readable table of the layers, with equal layers on one row; layers are named as in a rule."""
    alike: dict[LayerPosition, list[int]] = {}
    for index, layer in enumerate(layers):
        alike.setdefault(layer, []).append(index)
    garfa = any(layer.garfa for layer in layers)
    rows: list[tuple[str, ...]] = [("layers", "rotary", "theta", "factor", "scopes", "bias", *["alpha"] * garfa)]
    for layer, indices in alike.items():
        columns = *_rotary_columns(layer.rotary), _scopes(layer), _bias(layer), *[_alphas(layer)] * garfa
        rows.append((layer_selection(indices), *columns))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _ruled(setting: Position, rule: LayerRule) -> Position:
    """The setting, with the fields that the rule sets replaced."""
    fields = {name: getattr(rule, name) for name in ("rotary", "heads", "bias") if getattr(rule, name) is not None}
    if not fields:
        raise ValueError(f"layers {rule.layers!r} sets nothing; give it a rotary, heads or bias, or leave it out")
    return replace(setting, **fields)


def layer_selection(indices: Sequence[int]) -> str:
    """Ascending layer indices in a rule's syntax: [0, 1, 2, 5] is "0:3,5"."""
    runs: list[range] = []
    for index in indices:
        if runs and index == runs[-1].stop:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return ",".join(str(run.start) if len(run) == 1 else f"{run.start}:{run.stop}" for run in runs)


def _rotary_columns(rotary: Rotary) -> tuple[str, str, str]:
    """Kind, theta and factor; "-" where the kind has none."""
    match rotary:
        case NoRotary():
            return rotary.kind, "-", "-"
        case LongRope():
            return rotary.kind, _number(rotary.theta), "by dimension"
        case _:
            factor = getattr(rotary, "factor", None)
            return rotary.kind, _number(rotary.theta), "-" if factor is None else _number(factor)


def _scopes(layer: LayerPosition) -> str:
    narrowest, widest = min(layer.scopes), max(layer.scopes)
    if narrowest == DENSE_SCOPE:
        return "all"
    return str(widest) if narrowest == widest else f"{narrowest}..{widest}"


def _bias(layer: LayerPosition) -> str:
    if layer.bias is None:
        return "-"
    spans = []
    for values in layer.bias.coefficients:
        smallest, largest = min(values), max(values)
        spans.append(f"{smallest:.4g}" if smallest == largest else f"{smallest:.4g}..{largest:.4g}")
    return " ".join([layer.bias.kind, *spans])


def _alphas(layer: LayerPosition) -> str:
    """Smallest and largest alpha, and whether they apply to queries too."""
    if layer.garfa is None:
        return "-"
    values = alpha(torch.tensor(layer.garfa.raw))
    return f"{values.min():.4g}..{values.max():.4g}" + ", queries too" * layer.garfa.queries


def _number(value: float) -> str:
    return f"{value:.8g}"
