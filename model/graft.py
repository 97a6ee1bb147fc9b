"""Grafting: the first layers of one model in front of the remaining layers of another (Anchors First, Reason Later; Algorithm 1).

The algorithm's two modes are the same rule with the models swapped: the front model gives the embedding and layers 0 … l − 1,
the back model layers l … N − 1, the final norm and the output head. Each layer brings its own position settings. The paper's
appendix A.3 says "at or prior to" l, Algorithm 1 says i < l: here it is i < l.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import torch

from farsight.configs.schema import Bias, Garfa, Heads, LayerRule, Position, Rotary, Scope
from farsight.errors import ConfigError
from farsight.model.build import ModelConfig, build_model
from farsight.model.llama import Llama
from farsight.model.position.lasp import apply_lasp
from farsight.model.position.layers import LayerPosition, layer_selection, layer_settings

_MAY_DIFFER = ("tie_embeddings", "depth_init")
"""Fields of the architecture that may differ: tied heads are handled separately, and initialisation no longer matters."""


def source(name: str, layers: int, back: ModelConfig) -> tuple[bool, str]:
    """Whether a parameter of the graft comes from the front model, and its name in the model it comes from.

    Algorithm 1, lines 7–10: E and L^(i) for i < l from the front; L^(i) for i ≥ l, N and H from the back, whose head may be
    its embedding.
    """
    part, _, rest = name.partition(".")
    if part == "layers":
        return int(rest.partition(".")[0]) < layers, name
    if part == "output" and back.architecture.tie_embeddings:
        return False, "tok_embeddings.weight"
    return part == "tok_embeddings", name


def grafted_config(
    front: ModelConfig,
    back: ModelConfig,
    layers: int,
    same_embeddings: Callable[[], bool],
    untie: bool = False,
) -> ModelConfig:
    """The graft's config: each layer keeps the position settings of the model it comes from, at every length.

    Its trained length is the longer of the two; scopes that follow the other trained length get that as their `s_max`. Scopes
    that grow with the sequence start past the trained length; where that would be too late, the shorter length is used.

    Args:
        layers: l, the number of layers from the front model.
        same_embeddings: whether the embeddings are equal; called only if both models use them as their heads.
        untie: if they are not equal, give the graft a separate head.

    Raises:
        ConfigError: models that do not fit, tied embeddings that differ, or positions that one config can't express.
    """
    n = front.architecture.n_layers
    if unlike := _unlike(front, back):
        raise ConfigError(f"The models do not fit: {'; '.join(unlike)}.")
    if not 0 <= layers <= n:
        raise ConfigError(f"--layers {layers}: the models have {n} layers; set 0 to {n}.")
    tied = front.architecture.tie_embeddings and back.architecture.tie_embeddings
    if tied and not same_embeddings():
        if not untie:
            raise ConfigError(
                "Both models use their embedding as output head, and the two embeddings differ: the graft takes its embedding "
                "from the front model and its head from the back model. --untie stores them as two matrices."
            )
        tied = False
    graft = replace(front, architecture=replace(front.architecture, tie_embeddings=tied))
    lengths = sorted({front.trained_length, back.trained_length}, reverse=True)
    expected = _resolved(front, back, layers, _telling_lengths(front, back))
    for trained_length in lengths:
        for position in (front.position, back.position, _by_rules(front, back, layers, trained_length)):
            found = replace(graft, position=position, trained_length=trained_length)
            if all(found.layers(length) == positions for length, positions in expected.items()):
                return found
    raise ConfigError(
        f"Scopes that grow with the sequence (scope_max = 'length') do so past the trained length. A model has only one, but "
        f"these grow past {lengths[-1]:,} and {lengths[0]:,} tokens, each from its own s_max. Set scope_max = 'trained' "
        "in the farsight.json of one of the models, and graft that."
    )


def grafted_model(front: Llama, back: Llama, back_config: ModelConfig, config: ModelConfig, layers: int) -> Llama:
    """The graft of two models in memory; it shares their parameters, and only has its own position buffers.

    Args:
        back_config: config of the back model.
        config: the graft's config, from `grafted_config` with these `layers`.
    """
    with torch.device("meta"):
        model = build_model(config)
    for name, _ in list(model.named_parameters()):
        from_front, theirs = source(name, layers, back_config)
        module, _, last = name.rpartition(".")
        setattr(model.get_submodule(module), last, (front if from_front else back).get_parameter(theirs))
    device = next(model.parameters()).device
    for part in model.modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            part.register_buffer(name, torch.empty_like(buffer, device=device), persistent=False)
    model.set_position(model.positions, model.length)
    return model.eval()


# ── Whether they fit ──────────────────────────────────────────────────────────────────────────────────


def _unlike(front: ModelConfig, back: ModelConfig) -> list[str]:
    """The differences that rule out a graft, in words."""
    pairs = {
        f"architecture.{field.name}": (getattr(front.architecture, field.name), getattr(back.architecture, field.name))
        for field in fields(front.architecture)
        if field.name not in _MAY_DIFFER
    }
    for name in ("embedding", "query_scaling"):
        pairs[f"position.{name}"] = getattr(front.position, name), getattr(back.position, name)
    return [
        f"{name} is {a!r} in the front model and {b!r} in the back model" for name, (a, b) in pairs.items() if a != b
    ]


# ── Positions ─────────────────────────────────────────────────────────────────────────────────────────


def _resolved(
    front: ModelConfig, back: ModelConfig, layers: int, lengths: list[int]
) -> dict[int, tuple[LayerPosition, ...]]:
    """The position that each layer of the graft must have at these lengths."""
    return {length: front.layers(length)[:layers] + back.layers(length)[layers:] for length in lengths}


def _telling_lengths(*configs: ModelConfig) -> list[int]:
    """Lengths such that two positions equal at these are equal at all lengths: scopes change their formula only at a trained
    length or an s_max."""
    turns = {config.trained_length for config in configs}
    for config in configs:
        settings = layer_settings(config.position, config.architecture.n_layers)
        turns |= {s.heads.s_max for s in settings if isinstance(s.heads, Scope) and s.heads.s_max}
    return sorted({length for turn in turns for length in (turn, turn + 1, 2 * turn)})


def _by_rules(front: ModelConfig, back: ModelConfig, layers: int, trained_length: int) -> Position:
    """A position whose defaults are what most layers share, with a rule for each other kind of layer.

    LASP's S(l) and B(l) are written out as numbers for each layer, unless both models have the same LASP.

    Raises:
        ConfigError: the models have different kinds of GARFA.
    """
    n = front.architecture.n_layers
    lasp = front.position.lasp if front.position.lasp == back.position.lasp else None
    kinds = []
    for layer in range(n):
        config = front if layer < layers else back
        own = layer_settings(config.position, n)[layer]
        rotary = own.rotary
        if lasp is None and own.lasp is not None:
            rotary = apply_lasp(rotary, own.lasp, layer, n)
        kinds.append((rotary, _with_fixed_longest(own.heads, config, trained_length), own.bias))
    position = replace(front.position, lasp=lasp, garfa=_garfa(front, back, layers))
    return _with_kinds(position, kinds)


def with_rope(config: ModelConfig, rope: ModelConfig) -> ModelConfig:
    """A model with the RoPE of another, layer by layer, and everything else its own: a row of the LASP paper's Table 1 is Llama-3-8B "with
    long embedding", Llama 3.1's.

    The trained length is the longer of the two, as this RoPE is meant for it; scopes that follow the lesser get it as their `s_max`.

    Raises:
        ConfigError: models of other numbers of layers or dimensions of a head, or scopes that grow past a trained length.
    """
    shapes = [(one.architecture.n_layers, one.architecture.rotated_dim) for one in (config, rope)]
    if shapes[0] != shapes[1]:
        (n, dim), (other_n, other_dim) = shapes
        raise ConfigError(
            f"--rope: that model has {other_n} layers whose heads rotate {other_dim} dimensions, and this one {n} with "
            f"{dim}: name one of the same shape."
        )
    settings, length = layer_settings(config.position, shapes[0][0]), max(config.trained_length, rope.trained_length)
    if length != config.trained_length and any(
        isinstance(s.heads, Scope) and s.heads.scope_max == "length" for s in settings
    ):
        raise ConfigError(
            f"--rope: scopes that grow with the sequence (scope_max = 'length') do so past {config.trained_length:,} tokens, and this "
            f'RoPE is for {length:,}. Set scope_max = "trained" in farsight.json.'
        )
    kinds = [
        (theirs.rotary, _with_fixed_longest(own.heads, config, length), own.bias)
        for theirs, own in zip(rope.layers(), settings, strict=True)
    ]
    return replace(config, position=_with_kinds(replace(config.position, lasp=None), kinds), trained_length=length)


def _with_kinds(position: Position, kinds: Sequence[tuple[Rotary, Heads, Bias]]) -> Position:
    """A position whose defaults are what most layers share, with a rule for each other kind of layer."""
    shared = Counter(kinds).most_common(1)[0][0]
    rules = []
    for kind in dict.fromkeys(kinds):
        if kind != shared:
            rotary, heads, bias = kind
            rules.append(
                LayerRule(
                    layer_selection([layer for layer, own in enumerate(kinds) if own == kind]),
                    rotary if rotary != shared[0] else None,
                    heads if heads != shared[1] else None,
                    bias if bias != shared[2] else None,
                )
            )
    return replace(position, rotary=shared[0], heads=shared[1], bias=shared[2], rules=tuple(rules))


def _with_fixed_longest(heads: Heads, config: ModelConfig, trained_length: int) -> Heads:
    """The layer's heads; SCOPE that follows a trained length other than the graft's gets that length as its s_max."""
    if isinstance(heads, Scope) and not heads.s_max and config.trained_length != trained_length:
        return replace(heads, s_max=config.trained_length)
    return heads


def _garfa(front: ModelConfig, back: ModelConfig, layers: int) -> Garfa | None:
    kept = [
        (garfa, tuple(entry for entry in garfa.layers if (entry.layer < layers) == of_front))
        for of_front, garfa in ((True, front.position.garfa), (False, back.position.garfa))
        if garfa is not None
    ]
    kept = [(garfa, entries) for garfa, entries in kept if entries]
    if len({(garfa.equation, garfa.queries) for garfa, _ in kept}) > 1:
        (a, _), (b, _) = kept
        raise ConfigError(
            f"The front model's layers have GARFA of equation {a.equation} with queries = {str(a.queries).lower()}, the back "
            f"model's of equation {b.equation} with queries = {str(b.queries).lower()}, but a model can only have one kind: "
            "merge one of them again with --drop-garfa, or graft layers without GARFA."
        )
    return replace(kept[0][0], layers=tuple(e for _, entries in kept for e in entries)) if kept else None
