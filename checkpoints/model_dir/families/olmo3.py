"""Olmo 3: Olmo 2 with windows in three of four layers; scaled RoPE only where attention is full."""

from collections.abc import Sequence
from typing import Any

from farsight.checkpoints.model_dir.families import olmo2
from farsight.checkpoints.model_dir.families.family import Family, Layer, layer_types, typed, windows
from farsight.checkpoints.model_dir.families.rope import read_rope_by_type
from farsight.checkpoints.model_dir.families.values import Values
from farsight.checkpoints.model_dir.names import POST
from farsight.model.build import ModelConfig

THETA = 500000.0


def read(values: Values) -> ModelConfig:
    types = layer_types(values, lambda number: (number + 1) % 4 != 0)
    rotaries = read_rope_by_type(values, THETA, local_theta=None)
    layers = [(rotaries[kind], size) for kind, size in zip(types, windows(values, types), strict=True)]
    return olmo2.read_layers(values, layers)


def write(config: ModelConfig, layers: Sequence[Layer]) -> dict[str, Any] | None:
    fields = typed(config, layers)
    return None if fields is None else {**fields, "attention_bias": config.architecture.attention_bias == "all"}


FAMILY = Family(
    "olmo3", "Olmo3", "4.57.0", read, write, has=olmo2.HAS, defaults={**olmo2.DEFAULTS, "sliding_window": 4096}, modules=POST
)  # fmt: skip
