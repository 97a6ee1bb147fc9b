"""Converts between our config and the `config.json` of a model directory.

For `transformers`, a model whose layers are all dense and rotate alike is a Llama (with QK-norm a Qwen3). Every other model
has its own model type and comes with `modeling_farsight.py`, and its `config.json` gives each layer's positions as numbers.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

from farsight.configs.schema import (
    Architecture,
    Dense,
    DynamicNtkRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    NoBias,
    NoRotary,
    NtkRope,
    Position,
    Rope,
    Rotary,
    YarnRope,
)
from farsight.configs.typed import from_dict, to_dict
from farsight.errors import ConfigError
from farsight.json_files import fields_of
from farsight.model.build import ModelConfig
from farsight.model.position.rope import rope_frequencies
from farsight.model.position.scope import DENSE_SCOPE

MODEL_TYPE = "farsight"
FAMILIES = ("llama", "qwen3", "mistral")
"""Model types of `transformers` that are built here."""
MODELING = "modeling_farsight"
"""Module that goes with a model of that type; it imports none of our packages."""
TRANSFORMERS = "5.0.0"
"""The earliest version that the module runs with."""


def to_hf_config(config: ModelConfig, dtype: str, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
    """`config.json` for a model; Llama's or Qwen3's if `transformers` has the same model."""
    a = config.architecture
    values = {
        "vocab_size": a.vocab_size,
        "hidden_size": a.dim,
        "intermediate_size": a.ffn_dim,
        "num_hidden_layers": a.n_layers,
        "num_attention_heads": a.n_heads,
        "num_key_value_heads": a.n_kv_heads,
        "head_dim": a.head_dim,
        "rms_norm_eps": a.norm_eps,
        "tie_word_embeddings": a.tie_embeddings,
        "max_position_embeddings": config.trained_length,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "use_cache": True,
        "dtype": dtype,
    }
    rotary = uniform_rotary(config.position)
    if rotary is None:
        return {
            "architectures": ["FarsightForCausalLM"],
            "model_type": MODEL_TYPE,
            "auto_map": {
                "AutoConfig": f"{MODELING}.FarsightConfig",
                "AutoModel": f"{MODELING}.FarsightModel",
                "AutoModelForCausalLM": f"{MODELING}.FarsightForCausalLM",
            },
            **values,
            "transformers_version": TRANSFORMERS,
            "qk_norm": a.qk_norm,
            "sinusoidal": config.position.embedding == "sinusoidal",
            "trained_length": config.trained_length,
            **_resolved_layers(config),
            # The source of the numbers above; it survives when transformers saves the model again.
            "farsight": to_dict(config),
        }
    family = "Qwen3" if a.qk_norm else "Llama"
    rope, length = _rope_parameters(rotary, a.head_dim, config.trained_length)
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        **values,
        "max_position_embeddings": length,
        **({} if a.qk_norm else {"mlp_bias": False}),
        "rope_parameters": rope,
        # transformers before version 5 reads these two.
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None
        if rope["rope_type"] == "default"
        else {k: v for k, v in rope.items() if k != "rope_theta"},
    }


def _resolved_layers(config: ModelConfig) -> dict[str, Any]:
    """The layers' positions as numbers, for `modeling_farsight.FarsightConfig`."""
    kinds: list[dict[str, Any]] = []
    rotaries: list[Rotary] = []
    layer_kinds = []
    for layer in config.layers():
        if not isinstance(layer.rotary, NoRotary) and layer.rotary not in rotaries:
            rotaries.append(layer.rotary)
        slopes = layer.alibi_slopes("the exported model")
        kind: dict[str, Any] = {
            "rotary": None if isinstance(layer.rotary, NoRotary) else rotaries.index(layer.rotary),
            "scopes": None if min(layer.scopes) == DENSE_SCOPE else list(layer.scopes),
            "scope_ranks": None if layer.scope_ranks is None else list(layer.scope_ranks),
            "alibi_slopes": None if slopes is None else list(slopes),
        }
        if layer.garfa is not None:
            g = layer.garfa
            kind["garfa"] = {"raw": list(g.raw), "exponent": 0.5 if g.equation == 14 else 1.0, "queries": g.queries}
        if kind not in kinds:
            kinds.append(kind)
        layer_kinds.append(kinds.index(kind))
    head_dim, length = config.architecture.head_dim, config.trained_length
    resolved = [_resolved_rotary(rotary, head_dim, length) for rotary in rotaries]
    return {"layer_kinds": layer_kinds, "kinds": kinds, "rotaries": resolved}


def _resolved_rotary(rotary: Rotary, head_dim: int, length: int) -> dict[str, Any]:
    frequencies = rope_frequencies(rotary, head_dim, length)
    values: dict[str, Any] = {"attention_factor": frequencies.attention_factor}
    match rotary:
        case DynamicNtkRope():
            values["dynamic"] = {
                "theta": rotary.theta, "factor": rotary.factor, "original_length": rotary.original_length,
            }  # fmt: skip
        case LongRope():
            original = rotary.original_length
            values["longrope"] = {
                "short_inv_freq": rope_frequencies(rotary, head_dim, original).inv_freq.tolist(),
                "long_inv_freq": rope_frequencies(rotary, head_dim, original + 1).inv_freq.tolist(),
                "original_length": original,
            }
        case _:
            values["inv_freq"] = frequencies.inv_freq.tolist()
    return values


def uniform_rotary(position: Position) -> Rotary | None:
    """The rotation of all layers if it is one that `transformers` has and the layers are otherwise like a Llama's, else None."""
    plain = position.embedding == "none" and isinstance(position.bias, NoBias) and isinstance(position.heads, Dense)
    same = position.lasp is None and not position.rules and (position.garfa is None or not position.garfa.layers)
    known = type(position.rotary) in (NtkRope, *_TYPES.values())
    return position.rotary if plain and same and known else None


def from_hf_config(values: dict[str, Any], path: Path = Path("config.json")) -> ModelConfig:
    """Converts a Llama-family `config.json` to our config.

    Args:
        path: origin of the values, for errors.

    Raises:
        ConfigError: naming an invalid value, or a model or setting that is not supported.
    """
    with fields_of(path):
        return _from_values(values, path).checked(path)


def _from_values(values: dict[str, Any], path: Path) -> ModelConfig:
    family = values.get("model_type")
    if family == MODEL_TYPE and "farsight" in values:
        return from_dict(ModelConfig, values["farsight"], f"{path}: farsight")
    if family not in FAMILIES:
        raise ConfigError(
            f"{path} has model_type {family!r}; models of type {', '.join(sorted(FAMILIES))} are built here. Analyses and evaluations "
            "also take others, which transformers builds (docs/inference/models.md)."
        )
    for name in ("attention_bias", "mlp_bias"):
        if values.get(name):
            raise ConfigError(f"{path} has {name} = true; layers with biases are not supported.")
    if values.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{path} has hidden_act {values['hidden_act']!r}; only silu is supported.")
    # The family's default applies if the config does not say.
    window = values.get("sliding_window", 4096 if family == "mistral" else None)
    if window and values.get("use_sliding_window", family == "mistral"):
        raise ConfigError(f"{path} has sliding_window {window}; only dense attention can be read.")
    if missing := [name for name in _REQUIRED if name not in values]:
        raise ConfigError(f"{path} lacks {', '.join(missing)}.")
    for name in (*_REQUIRED, "num_key_value_heads", "head_dim"):
        value = values.get(name)
        if (type(value) is not int or value < 1) and not (value is None and name not in _REQUIRED):
            raise ConfigError(f"{path} has {name} = {value!r}; it must be a whole number of 1 or more.")
    heads, dim = values["num_attention_heads"], values["hidden_size"]
    architecture = Architecture(
        vocab_size=values["vocab_size"],
        dim=dim,
        n_layers=values["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or (128 if family == "qwen3" else dim // heads),
        ffn_dim=values["intermediate_size"],
        norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        qk_norm=family == "qwen3",
        tie_embeddings=bool(values.get("tie_word_embeddings", False)),
    )
    length = values["max_position_embeddings"]
    return ModelConfig(architecture, Position(rotary=_rotary(values, length, path)), trained_length=length)


_REQUIRED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings",
)  # fmt: skip

# Hugging Face's rope_parameters: our field → theirs.
_FIELDS = {
    "theta": "rope_theta",
    "factor": "factor",
    "original_length": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "truncate": "truncate",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "short_factor": "short_factor",
    "long_factor": "long_factor",
}
_TYPES: dict[str, type] = {
    "default": Rope,
    "linear": LinearRope,
    "dynamic": DynamicNtkRope,
    "yarn": YarnRope,
    "llama3": Llama3Rope,
    "longrope": LongRope,
}


def _rope_parameters(rotary: Rotary, head_dim: int, trained_length: int) -> tuple[dict[str, Any], int]:
    """`rope_parameters` and `max_position_embeddings`."""
    if isinstance(rotary, NtkRope):
        # transformers has no static NTK, which is plain RoPE with another base.
        rotary = Rope(theta=rotary.theta * rotary.factor ** (head_dim / (head_dim - 2)))
    names = {kind: name for name, kind in _TYPES.items()}
    fields = {_FIELDS[f.name]: getattr(rotary, f.name) for f in dataclasses.fields(rotary) if f.name != "kind"}
    fields = {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items() if v is not None}
    length = trained_length
    if isinstance(rotary, DynamicNtkRope):
        # In transformers the original length *is* max_position_embeddings.
        length = fields.pop("original_max_position_embeddings")
    return {"rope_type": names[type(rotary)], **fields}, length


def _rotary(values: dict[str, Any], length: int, path: Path) -> Rotary:
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ConfigError(f"{path}: its rope settings are {given!r}, not a JSON object.")
    given = dict(given)
    given.setdefault("rope_theta", values.get("rope_theta") or 10000.0)
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    if kind not in _TYPES:
        raise ConfigError(f"{path} has rope_type {kind!r}; known: {', '.join(_TYPES)}.")
    if "original_max_position_embeddings" in values:  # Phi-3 keeps it outside
        given.setdefault("original_max_position_embeddings", values["original_max_position_embeddings"])
    ours = {theirs: name for name, theirs in _FIELDS.items()}
    fields = {f.name for f in dataclasses.fields(_TYPES[kind])}
    if kind == "dynamic":  # transformers uses the model's length, whatever else is given
        given["original_max_position_embeddings"] = length
    elif "original_length" in fields and kind != "llama3":
        given.setdefault("original_max_position_embeddings", length)
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        for number in value if isinstance(value, list) else [value]:
            if not isinstance(number, int | float) or not 0 <= number < math.inf:
                raise ConfigError(
                    f"{path}: {name} = {value!r} of its rope settings must be a finite number, 0 or more."
                )
    for name in ("rope_theta", "factor", "original_max_position_embeddings"):
        if given.get(name) == 0:
            raise ConfigError(f"{path}: {name} = 0 of its rope settings must be more than 0.")
    if kind == "longrope" and "factor" not in given:  # Phi-3 derives it from the two lengths
        given["factor"] = length / given["original_max_position_embeddings"]
    if unknown := [name for name in given if ours.get(name) not in fields]:
        raise ConfigError(f"{path}: its rope settings have {', '.join(unknown)}, which {kind} scaling does not take.")
    settings = {ours[name]: value for name, value in given.items()}
    return from_dict(_TYPES[kind], settings, f"{path}: rope settings")
