"""SmolLM3: Llama without RoPE in every fourth layer, or in the layers of a list."""

from collections.abc import Sequence
from typing import Any

from farsight.checkpoints.model_dir.families.family import (
    Family,
    Layer,
    biases,
    decoder,
    one_window,
    uniform,
    used_windows,
)
from farsight.checkpoints.model_dir.families.rope import FULL, SLIDING, read_rope
from farsight.checkpoints.model_dir.families.values import Values
from farsight.configs.schema import NoRotary
from farsight.model.build import ModelConfig


def read(values: Values) -> ModelConfig:
    values.only("hidden_act", "silu")
    rotary, _ = read_rope(values)
    every = values.whole("no_rope_layer_interval") or 4
    rotates = values.by_layer("no_rope_layers", 0, 1)  # 1 is a layer *with* RoPE
    if rotates is None:
        rotates = [int((number + 1) % every != 0) for number in range(values.get("num_hidden_layers"))]
    sizes = used_windows(values, lambda number: not rotates[number])
    layers = [(rotary if turns else NoRotary(), size) for turns, size in zip(rotates, sizes, strict=True)]
    return decoder(values, layers, **biases(values))


def write(config: ModelConfig, layers: Sequence[Layer]) -> dict[str, Any] | None:
    turning = [(rotary, window) for rotary, window in layers if not isinstance(rotary, NoRotary)]
    rope, (same, window) = uniform(config, turning) if turning else None, one_window(layers)
    a = config.architecture
    if rope is None or not same or len(turning) == len(layers):
        return None
    return {
        **rope,
        "no_rope_layers": [int(not isinstance(rotary, NoRotary)) for rotary, _ in layers],
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": [FULL if own is None else SLIDING for _, own in layers],
        "attention_bias": a.attention_bias == "all",
        "mlp_bias": a.mlp_bias,
    }


FAMILY = Family(
    "smollm3", "SmolLM3", "4.53.0", read, write,
    has={"attention_bias": ("none", "all"), "mlp_bias": (False, True)},
    defaults={"num_key_value_heads": 4, "rope_theta": 2000000.0, "tie_word_embeddings": True},
)  # fmt: skip
