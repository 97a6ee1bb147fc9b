"""Mistral v0.1 and v0.2, with a window, and v0.3 without."""

from collections.abc import Sequence
from typing import Any

from farsight.checkpoints.model_dir.families.family import Family, Layer, decoder, uniform
from farsight.checkpoints.model_dir.families.rope import read_rope
from farsight.checkpoints.model_dir.families.values import Values
from farsight.model.build import ModelConfig


def read(values: Values) -> ModelConfig:
    values.only("hidden_act", "silu")
    values.only("layer_types")
    rotary, _ = read_rope(values)
    return decoder(values, [(rotary, values.whole("sliding_window"))] * values.get("num_hidden_layers"))


def write(config: ModelConfig, layers: Sequence[Layer]) -> dict[str, Any] | None:
    rope, (window, *others) = uniform(config, layers), {window for _, window in layers}
    return None if rope is None or others else {**rope, "sliding_window": window}


FAMILY = Family(
    "mistral", "Mistral", "4.46.0", read, write, defaults={"num_key_value_heads": 8, "sliding_window": 4096}
)
