"""GARFA on a model: makes the factors of some layers trainable, and reads the factors that a model has now.

The factors themselves are in `position/garfa.py`.
"""

import math
from collections.abc import Sequence
from typing import Literal

from torch.distributed.tensor import DTensor

from farsight.configs.schema import Garfa, GarfaLayer, NoRotary
from farsight.model.llama import Llama
from farsight.model.position.garfa import HeadFrequencies, LayerGarfa

INITIAL = {"identity": -math.log(10), "paper": 2.2}
"""Initial w: alpha = 1, or the paper's value, which it takes to mean alpha = 1 but which gives 9.012."""


def train_garfa(
    model: Llama,
    layers: Sequence[int],
    init: Literal["identity", "paper"] = "identity",
    equation: Literal[14, 12] = 14,
    queries: bool = False,
) -> None:
    """Gives these layers trainable factors, in place, before sharding; `Llama.init_parameter` fills them.

    A layer that has factors from its config continues from them, unless `init` is "paper".

    Raises:
        ValueError: a layer that does not rotate or does not exist, or config factors with another equation or `queries`.
    """
    attentions = {int(name): attention for name, attention in model.attentions()}
    for layer in layers:
        if layer not in attentions:
            raise ValueError(f"garfa.layers names layer {layer}; the model has 0 to {len(model.positions) - 1}")
        if isinstance(model.positions[layer].rotary, NoRotary):
            raise ValueError(
                f"layer {layer} does not rotate (position.rotary.kind = 'none'), so GARFA has nothing to scale there: "
                "leave it out of garfa.layers, or set garfa.enable = false"
            )
    for layer, attention in attentions.items():
        known = attention.garfa
        if known is not None and (known.equation, known.queries) != (equation, queries):
            raise ValueError(
                f"layer {layer} has factors of equation {known.equation} with queries = {str(known.queries).lower()} "
                f"from its config, and a model has one kind: set garfa.equation = {known.equation} and garfa.queries = "
                f"{str(known.queries).lower()}"
            )
        if layer in layers:
            raw = (INITIAL[init],) * model.architecture.n_kv_heads
            if known is not None and init == "identity":
                raw = known.initial
            with model.rope_frequencies.device:
                attention.garfa = HeadFrequencies(LayerGarfa(raw, equation, queries), trained=True)


def garfa_of(model: Llama) -> Garfa | None:
    """The model's current factors in the form of its config; None if it has none. Collective if the model is sharded."""
    entries, kind = [], None
    for name, attention in model.attentions():
        if attention.garfa is not None:
            kind, raw = attention.garfa, attention.garfa.raw.detach()
            whole = raw.full_tensor() if isinstance(raw, DTensor) else raw
            numbers = kind.initial if not kind.trained else tuple(whole.tolist())
            entries.append(GarfaLayer(int(name), numbers))
    return None if kind is None else Garfa(kind.equation, kind.queries, tuple(entries))
