"""Phi-3, 3.5 and 4: fused projections, LongRoPE, a rotation of a part of each head, a window."""

from collections.abc import Sequence
from typing import Any

from farsight.checkpoints.model_dir.families import mistral
from farsight.checkpoints.model_dir.families.family import ANY, Family, Layer, decoder, one_rope
from farsight.checkpoints.model_dir.families.rope import read_rope
from farsight.checkpoints.model_dir.families.values import Values
from farsight.checkpoints.model_dir.names import PRE
from farsight.configs.schema import LongRope, Rope
from farsight.errors import ConfigError
from farsight.model.build import ModelConfig

_SHARE = "partial_rotary_factor"
_FUSED = dict.fromkeys(("attention.wq", "attention.wk", "attention.wv"), "self_attn.qkv_proj") | dict.fromkeys(
    ("feed_forward.w1", "feed_forward.w3"), "mlp.gate_up_proj"
)


def read(values: Values) -> ModelConfig:
    values.only("hidden_act", "silu")
    # Its code calls LongRoPE so, whatever the config says.
    rotary, own = read_rope(values, extra=(_SHARE,), longrope=("su", "yarn"))
    if not isinstance(rotary, Rope | LongRope):
        raise ConfigError(f"{values.path} has rope_type {rotary.kind!r}; Phi-3 has default and longrope.")
    head_dim = values.get("head_dim") or values.get("hidden_size") // values.get("num_attention_heads")
    share = own.get(_SHARE) or values.get(_SHARE) or 1.0
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise ConfigError(f"{values.path} has {_SHARE} = {share!r}; it must be more than 0 and at most 1.")
    rotated = int(head_dim * share)
    layers = [(rotary, values.whole("sliding_window"))] * values.get("num_hidden_layers")
    return decoder(values, layers, rotary_dim=0 if rotated == head_dim else rotated)


def write(config: ModelConfig, layers: Sequence[Layer]) -> dict[str, Any] | None:
    a, rotary, rope = config.architecture, one_rope(layers), mistral.write(config, layers)
    if rope is None or not isinstance(rotary, Rope | LongRope) or a.n_heads * a.head_dim != a.dim:
        return None
    fields = {**rope, _SHARE: a.rotated_dim / a.head_dim}
    if isinstance(rotary, LongRope):
        scaling = rope["rope_scaling"]
        del scaling["original_max_position_embeddings"]
        # Before version 5, transformers takes these three alone, and derives the factor from the two lengths.
        if scaling["factor"] == config.trained_length / rotary.original_length:
            del scaling["factor"], rope["rope_parameters"]["factor"]
        scaling["type"] = scaling.pop("rope_type")
        fields["original_max_position_embeddings"] = rotary.original_length
    rope["rope_parameters"][_SHARE] = fields[_SHARE]
    if a.rotated_dim != a.head_dim:
        fields["transformers_version"] = "4.50.0"
    return fields


FAMILY = Family(
    "phi3", "Phi3", "4.46.0", read, write,
    has={"rotary_dim": (ANY,)}, defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}, modules={**PRE, **_FUSED},
)  # fmt: skip
