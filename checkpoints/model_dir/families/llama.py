"""Llama 2, 3, 3.1 and 3.2."""

from collections.abc import Sequence
from typing import Any

from farsight.checkpoints.model_dir.families.family import Family, Layer, biases, decoder, dense, uniform
from farsight.checkpoints.model_dir.families.rope import read_rope
from farsight.checkpoints.model_dir.families.values import Values
from farsight.model.build import ModelConfig


def read(values: Values) -> ModelConfig:
    values.only("hidden_act", "silu")
    rotary, _ = read_rope(values)
    return decoder(values, [(rotary, None)] * values.get("num_hidden_layers"), **biases(values))


def write(config: ModelConfig, layers: Sequence[Layer]) -> dict[str, Any] | None:
    a, rope = config.architecture, uniform(config, layers)
    # transformers wants heads that divide the model, even where head_dim is another.
    if rope is None or not dense(layers) or a.dim % a.n_heads:
        return None
    return {**rope, "attention_bias": a.attention_bias == "all", "mlp_bias": a.mlp_bias}


FAMILY = Family(
    "llama", "Llama", "4.46.0", read, write, has={"attention_bias": ("none", "all"), "mlp_bias": (False, True)}
)
