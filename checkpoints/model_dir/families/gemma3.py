"""Gemma 3's text model: local layers with a window and a RoPE of their own, norms on both sides, scaled embeddings."""

from collections.abc import Sequence
from typing import Any

from farsight.checkpoints.model_dir.families.family import (
    ANY,
    Family,
    Layer,
    biases,
    decoder,
    layer_types,
    typed,
    windows,
)
from farsight.checkpoints.model_dir.families.rope import FULL, SLIDING, read_rope_by_type
from farsight.checkpoints.model_dir.families.values import Values
from farsight.checkpoints.model_dir.names import SANDWICH
from farsight.configs.schema import Rope
from farsight.errors import ConfigError
from farsight.model.build import ModelConfig

THETA, LOCAL_THETA, PATTERN = 1000000.0, 10000.0, 6
_OWN: dict[str, Any] = {
    "activation": "gelu_tanh", "norm_placement": "sandwich", "zero_centered_norms": True, "qk_norm": True,
    "scaled_embeddings": True,
}  # fmt: skip


def read(values: Values) -> ModelConfig:
    values.only("hidden_activation", "gelu_pytorch_tanh")
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        values.only(name)
    values.only("use_bidirectional_attention", False)
    every = values.whole("sliding_window_pattern") or values.whole("_sliding_window_pattern") or PATTERN
    types = layer_types(values, lambda number: (number + 1) % every != 0)
    rotaries = read_rope_by_type(values, THETA, LOCAL_THETA)
    layers = [(rotaries[kind], size) for kind, size in zip(types, windows(values, types), strict=True)]
    scalar = values.get("query_pre_attn_scalar")
    if not isinstance(scalar, int | float) or not scalar > 0:
        raise ConfigError(f"{values.path} has query_pre_attn_scalar = {scalar!r}; it must be more than 0.")
    scale = None if scalar == values.get("head_dim") else scalar**-0.5
    return decoder(values, layers, softmax_scale=scale, **_OWN, **biases(values) | {"mlp_bias": False})


def write(config: ModelConfig, layers: Sequence[Layer]) -> dict[str, Any] | None:
    a = config.architecture
    fields = typed(config, layers, sliding=Rope(theta=LOCAL_THETA))
    scalar = a.head_dim if a.softmax_scale is None else a.softmax_scale**-2
    if fields is None or a.dim % a.n_heads:
        return None
    # transformers takes a whole number.
    if abs(scalar - round(scalar)) > 1e-9 * scalar:
        return None
    types = fields["layer_types"]
    every = types.index(FULL) + 1 if FULL in types else len(types) + 1
    if types == [SLIDING if (number + 1) % every else FULL for number in range(len(types))]:
        fields["sliding_window_pattern"] = every  # what transformers before 4.53 goes by
    return {
        **fields,
        "rope_local_base_freq": fields["rope_parameters"][SLIDING]["rope_theta"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(scalar),
        "attention_bias": a.attention_bias == "all",
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    }


FAMILY = Family(
    "gemma3_text", "Gemma3", "4.50.0", read, write,
    has={**{name: (value,) for name, value in _OWN.items()}, "attention_bias": ("none", "all"), "softmax_scale": (ANY,)},
    defaults={
        # The hub's configs leave out most of these.
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256, "sliding_window": 4096, "tie_word_embeddings": True,
    },
    modules=SANDWICH,
)  # fmt: skip
