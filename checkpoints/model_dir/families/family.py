"""A family of models: reading its `config.json`, writing it, and the names of its tensors.

Each family is a file of its own beside this one, and `known.py` lists them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from farsight.checkpoints.model_dir.families.rope import (
    FULL,
    SLIDING,
    plain,
    rope_table,
    write_rope,
    write_rope_by_type,
)
from farsight.checkpoints.model_dir.families.values import Values
from farsight.checkpoints.model_dir.names import PRE
from farsight.configs.schema import (
    Architecture,
    Dense,
    DynamicNtkRope,
    LayerRule,
    LongRope,
    NoRotary,
    Position,
    QueryScaling,
    Rotary,
    Rotating,
    SlidingWindow,
)
from farsight.errors import ConfigError
from farsight.model.build import ModelConfig
from farsight.model.position.layers import layer_selection
from farsight.model.position.scope import DENSE_SCOPE

Layer = tuple[Rotary, int | None]
"""A layer's rotation, and its window in tokens, None for dense attention."""


@dataclass(frozen=True)
class Family:
    """A model type of transformers that we read and write."""

    model_type: str
    model_class: str
    """The class's name without `ForCausalLM`."""
    since: str
    """The first version of transformers that has the class; `write` may ask for a later one, as `transformers_version`."""
    read: Callable[[Values], ModelConfig]
    write: Callable[[ModelConfig, Sequence[Layer]], dict[str, Any] | None]
    """The config's fields beside sizes, or None if the class can't express these layers; called if `has` allows the rest."""
    has: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """The values that a field of the architecture can have, where these are not only its default."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """transformers' values of fields that a `config.json` may leave out."""
    modules: Mapping[str, str] = field(default_factory=lambda: PRE)
    """Our name of each of a layer's modules, and theirs; modules of ours that share one are its rows, in this order."""
    query_scaling: bool = False

    def to_hf(self, config: ModelConfig) -> dict[str, Any] | None:
        """`config.json` without sizes and tokens; None if the class can't express the model."""
        layers = plain_layers(config)
        if layers is None or not self._has(config.architecture):
            return None
        if config.position.query_scaling is not None and not self.query_scaling:
            return None
        return self.write(config, layers)

    def _has(self, a: Architecture) -> bool:
        default = Architecture()
        for name in _MECHANISMS:
            allowed = self.has.get(name, (getattr(default, name),))
            if ANY not in allowed and getattr(a, name) not in allowed:
                return False
        # Settings that say the default in other words.
        span = a.qk_norm_span in self.has.get("qk_norm_span", ("head",)) or not a.qk_norm
        partial = a.rotary_dim in (0, a.head_dim) or "rotary_dim" in self.has
        scale = a.softmax_scale in (None, a.head_dim**-0.5) or "softmax_scale" in self.has
        return span and partial and scale


ANY = object()
"""In `Family.has`: every value."""
_SIZES = {
    "vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "norm_eps", "tie_embeddings", "depth_init",
}  # fmt: skip
_MECHANISMS = [
    f.name for f in fields(Architecture) if f.name not in {*_SIZES, "qk_norm_span", "rotary_dim", "softmax_scale"}
]


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────────


def decoder(
    values: Values, layers: Sequence[Layer], query_scaling: QueryScaling | None = None, **own: Any
) -> ModelConfig:
    """A model of a config's sizes.

    Args:
        layers: each layer's rotation and window.
        own: the architecture's fields that the family decides.

    Raises:
        ConfigError: dropout, which our model does not have.
    """
    for name in ("attention_dropout", "resid_pdrop", "embd_pdrop"):
        values.only(name, 0)
    heads, dim = values.get("num_attention_heads"), values.get("hidden_size")
    architecture = Architecture(
        vocab_size=values.get("vocab_size"),
        dim=dim,
        n_layers=values.get("num_hidden_layers"),
        n_heads=heads,
        n_kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or dim // heads,
        ffn_dim=values.get("intermediate_size"),
        norm_eps=float(values.get("rms_norm_eps") or 1e-6),
        tie_embeddings=values.flag("tie_word_embeddings"),
        **own,
    )
    position = position_of(layers, query_scaling)
    return ModelConfig(architecture, position, values.get("max_position_embeddings"), family=values.get("model_type"))


def position_of(layers: Sequence[Layer], query_scaling: QueryScaling | None = None) -> Position:
    """Positions in which the most frequent kind of layer is the default, and every other one a rule."""
    common = max(layers, key=layers.count)
    rules = []
    for kind in dict.fromkeys(layers):
        if kind != common:
            where = layer_selection([number for number, layer in enumerate(layers) if layer == kind])
            rotary = None if kind[0] == common[0] else kind[0]
            rules.append(LayerRule(where, rotary=rotary, heads=None if kind[1] == common[1] else _heads(kind[1])))
    return Position(rotary=common[0], heads=_heads(common[1]), query_scaling=query_scaling, rules=tuple(rules))


def _heads(window: int | None) -> Dense | SlidingWindow:
    return Dense() if window is None else SlidingWindow(window=window)


def biases(values: Values) -> dict[str, Any]:
    """The architecture's fields for `attention_bias` and `mlp_bias`."""
    return {"attention_bias": "all" if values.flag("attention_bias") else "none", "mlp_bias": values.flag("mlp_bias")}


def layer_types(values: Values, slides: Callable[[int], bool]) -> list[str]:
    """Each layer's kind of attention.

    Args:
        slides: the family's rule for layers with sliding attention, by number, where the config has no list.
    """
    given = values.by_layer("layer_types", FULL, SLIDING)
    return given or [SLIDING if slides(number) else FULL for number in range(values.get("num_hidden_layers"))]


def windows(values: Values, types: Sequence[str]) -> list[int | None]:
    """Each layer's window.

    Raises:
        ConfigError: sliding attention without a size.
    """
    size = values.whole("sliding_window")
    if size is None and SLIDING in types:
        raise ConfigError(f"{values.path} has layers of sliding_attention, but no sliding_window.")
    return [size if kind == SLIDING else None for kind in types]


def used_windows(values: Values, slides: Callable[[int], bool]) -> list[int | None]:
    """Each layer's window, of families with `use_sliding_window`.

    Args:
        slides: as for `layer_types`; without a size, no layer slides.

    Raises:
        ConfigError: layers of sliding attention without `use_sliding_window`: transformers fails on some, and applies the window of
            others in one of its attention functions and not in another.
    """
    used = values.flag("use_sliding_window")
    sized = used and values.whole("sliding_window") is not None
    types = layer_types(values, lambda number: sized and slides(number))
    if not used and SLIDING in types:
        raise ConfigError(
            f"{values.path} has layers of {SLIDING} with use_sliding_window = False: set that to true, or their layer_types to {FULL}."
        )
    return windows(values, types) if used else [None] * len(types)


# ── Writing ───────────────────────────────────────────────────────────────────────────────────────────


def plain_layers(config: ModelConfig) -> list[Layer] | None:
    """Each layer's rotation and window; None if a layer has anything else: scopes, a bias, factors of its heads."""
    if config.position.embedding != "none":
        return None
    layers: list[Layer] = []
    for layer in config.layers():
        scope = layer.scopes[0]
        if (
            layer.bias is not None
            or layer.garfa is not None
            or layer.scope_ranks is not None
            or {*layer.scopes} != {scope}
        ):
            return None
        rotary = layer.rotary
        if not isinstance(rotary, NoRotary):
            rotary = plain(rotary, config.architecture.rotated_dim)
        layers.append((rotary, None if scope == DENSE_SCOPE else scope))
    return layers


def one_rope(layers: Sequence[Layer]) -> Rotating | None:
    """The rotation of all layers, or None if they differ or do not rotate."""
    first = layers[0][0]
    return None if isinstance(first, NoRotary) or any(rotary != first for rotary, _ in layers) else first


def one_window(layers: Sequence[Layer]) -> tuple[bool, int | None]:
    """True if all layers with a window have the same one, and its size; None without windows."""
    sizes = {window for _, window in layers if window is not None}
    return len(sizes) < 2, next(iter(sizes), None)


def dense(layers: Sequence[Layer]) -> bool:
    """True if no layer has a window."""
    return all(window is None for _, window in layers)


def length_of(rotary: Rotary, config: ModelConfig) -> int:
    """`max_position_embeddings`; with dynamic NTK it is the *original* length."""
    return rotary.original_length if isinstance(rotary, DynamicNtkRope) else config.trained_length


def uniform(config: ModelConfig, layers: Sequence[Layer], rotary: Rotating | None = None) -> dict[str, Any] | None:
    """RoPE's fields where all layers rotate alike.

    Args:
        rotary: the rotation of the layers that do, where others have none.
    """
    rotary = rotary or one_rope(layers)
    if rotary is None:
        return None
    return {**write_rope(rope_table(rotary)), "max_position_embeddings": length_of(rotary, config)}


def typed(config: ModelConfig, layers: Sequence[Layer], sliding: Rotating | None = None) -> dict[str, Any] | None:
    """`layer_types`, the window, and RoPE by layer type; None if layers of one type differ.

    Args:
        sliding: the rotation to write for sliding attention where no layer has it; None is that of full attention.
    """
    same, window = one_window(layers)
    kinds = [FULL if own is None else SLIDING for _, own in layers]
    by_kind: dict[str, Rotating] = {}
    for kind, (rotary, _) in zip(kinds, layers, strict=True):
        # Length-dependent scaling is beyond what these classes were tested with; dynamic NTK would need a length of its own.
        if isinstance(rotary, NoRotary | DynamicNtkRope | LongRope) or by_kind.setdefault(kind, rotary) != rotary:
            return None
    if not same:
        return None
    full = by_kind.get(FULL) or by_kind[SLIDING]
    tables = {FULL: rope_table(full), SLIDING: rope_table(by_kind.get(SLIDING) or sliding or full)}
    return {
        **write_rope_by_type(tables),
        "layer_types": kinds,
        # These classes make masks for both kinds, whether layers use them or not.
        "sliding_window": window or config.trained_length,
        "max_position_embeddings": config.trained_length,
    }
