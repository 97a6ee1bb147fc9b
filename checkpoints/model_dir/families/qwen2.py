"""Qwen 2 and 2.5: biases of queries, keys and values, and windows from a layer on."""

from collections.abc import Sequence
from typing import Any

from farsight.checkpoints.model_dir.families.family import (
    Family,
    Layer,
    decoder,
    one_window,
    uniform,
    used_windows,
)
from farsight.checkpoints.model_dir.families.rope import FULL, SLIDING, read_rope
from farsight.checkpoints.model_dir.families.values import Values
from farsight.model.build import ModelConfig

DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}


def read(values: Values) -> ModelConfig:
    return decoder(values, read_layers(values), attention_bias="qkv")


def read_layers(values: Values) -> list[Layer]:
    """Each layer's RoPE and window, of Qwen 3 too."""
    values.only("hidden_act", "silu")
    rotary, _ = read_rope(values)
    return [(rotary, size) for size in used_windows(values, lambda number: number >= values.get("max_window_layers"))]


def write(config: ModelConfig, layers: Sequence[Layer]) -> dict[str, Any] | None:
    rope, (same, window) = uniform(config, layers), one_window(layers)
    if rope is None or not same:
        return None
    types = [FULL if own is None else SLIDING for _, own in layers]
    first = types.index(SLIDING) if SLIDING in types else len(types)
    return {
        **rope,
        **({} if window is None else {"transformers_version": "4.53.0"}),  # before, windows are known only in part
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": first,  # what transformers before 4.53 goes by
        "layer_types": types,
    }


FAMILY = Family("qwen2", "Qwen2", "4.46.0", read, write, has={"attention_bias": ("qkv",)}, defaults=DEFAULTS)
