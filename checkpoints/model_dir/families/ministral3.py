"""Ministral 3: Mistral with YaRN, and queries that are scaled by their position."""

from collections.abc import Sequence
from typing import Any

from farsight.checkpoints.model_dir.families import mistral
from farsight.checkpoints.model_dir.families.family import Family, Layer, decoder, one_rope
from farsight.checkpoints.model_dir.families.rope import read_rope
from farsight.checkpoints.model_dir.families.values import Values
from farsight.configs.schema import QueryScaling
from farsight.errors import ConfigError
from farsight.model.build import ModelConfig

_BETA = "llama_4_scaling_beta"


def read(values: Values) -> ModelConfig:
    values.only("hidden_act", "silu")
    values.only("layer_types")
    rotary, own = read_rope(values, extra=(_BETA, "max_position_embeddings"))
    scaling = None
    if beta := own.get(_BETA):
        original = getattr(rotary, "original_length", None)
        if original is None:
            raise ConfigError(
                f"{values.path} has {_BETA} = {beta!r} with {rotary.kind!r} RoPE, which lacks original_max_position_embeddings."
            )
        scaling = QueryScaling(beta=float(beta), original_length=original)
    layers = [(rotary, values.whole("sliding_window"))] * values.get("num_hidden_layers")
    return decoder(values, layers, scaling)


def write(config: ModelConfig, layers: Sequence[Layer]) -> dict[str, Any] | None:
    rotary, fields, scaling = one_rope(layers), mistral.write(config, layers), config.position.query_scaling
    # transformers computes the scale from RoPE's own settings, and of every model of this type.
    if fields is None or scaling is None or scaling.original_length != getattr(rotary, "original_length", None):
        return None
    for name in ("rope_parameters", "rope_scaling"):
        fields[name][_BETA] = scaling.beta
    return fields


FAMILY = Family(
    "ministral3", "Ministral3", "5.0.0", read, write,
    defaults={
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, _BETA: 0.1,
        },
    },
    query_scaling=True,
)  # fmt: skip
