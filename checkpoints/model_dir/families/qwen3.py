"""Qwen 3: Qwen 2 with norms of queries and keys, and biases in all of attention's projections or in none."""

from collections.abc import Sequence
from typing import Any

from farsight.checkpoints.model_dir.families import qwen2
from farsight.checkpoints.model_dir.families.family import Family, Layer, biases, decoder
from farsight.checkpoints.model_dir.families.values import Values
from farsight.model.build import ModelConfig


def read(values: Values) -> ModelConfig:
    return decoder(values, qwen2.read_layers(values), qk_norm=True, **biases(values) | {"mlp_bias": False})


def write(config: ModelConfig, layers: Sequence[Layer]) -> dict[str, Any] | None:
    fields = qwen2.write(config, layers)
    return None if fields is None else {**fields, "attention_bias": config.architecture.attention_bias == "all"}


FAMILY = Family(
    "qwen3", "Qwen3", "4.51.0", read, write,
    has={"qk_norm": (True,), "attention_bias": ("none", "all")}, defaults={**qwen2.DEFAULTS, "head_dim": 128},
)  # fmt: skip
