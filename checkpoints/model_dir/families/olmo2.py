"""Olmo 2: norms of what attention and feed-forward add, and of all queries and all keys of a token together."""

from collections.abc import Sequence
from typing import Any

from farsight.checkpoints.model_dir.families.family import Family, Layer, biases, decoder, dense, uniform
from farsight.checkpoints.model_dir.families.rope import read_rope
from farsight.checkpoints.model_dir.families.values import Values
from farsight.checkpoints.model_dir.names import POST
from farsight.model.build import ModelConfig

OWN: dict[str, Any] = {"norm_placement": "post", "qk_norm": True, "qk_norm_span": "projection"}
"""The architecture's fields that differ from Llama's."""
HAS = {**{name: (value,) for name, value in OWN.items()}, "attention_bias": ("none", "all")}
DEFAULTS = {"rms_norm_eps": 1e-5}


def read(values: Values) -> ModelConfig:
    rotary, _ = read_rope(values)
    return read_layers(values, [(rotary, None)] * values.get("num_hidden_layers"))


def read_layers(values: Values, layers: Sequence[Layer]) -> ModelConfig:
    """A model with these layers, of Olmo 3 too."""
    values.only("hidden_act", "silu")
    return decoder(values, layers, **OWN, **biases(values) | {"mlp_bias": False})


def write(config: ModelConfig, layers: Sequence[Layer]) -> dict[str, Any] | None:
    rope = uniform(config, layers)
    if rope is None or not dense(layers):
        return None
    return {**rope, "attention_bias": config.architecture.attention_bias == "all"}


FAMILY = Family("olmo2", "Olmo2", "4.48.0", read, write, has=HAS, defaults=DEFAULTS, modules=POST)
