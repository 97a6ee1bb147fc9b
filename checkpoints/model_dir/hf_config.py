"""Converts between our config and the `config.json` of a model directory.

A model that a class of `transformers` can express is written as that class; `families/` has a file for each. Every other
model has its own model type and comes with `modeling_farsight.py`, and its `config.json` gives each layer's positions as
numbers.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from farsight.checkpoints.model_dir.families.family import Family
from farsight.checkpoints.model_dir.families.known import FAMILIES, VISION
from farsight.checkpoints.model_dir.families.values import Values
from farsight.checkpoints.model_dir.names import BY_PLACEMENT, TensorNames
from farsight.configs.schema import DynamicNtkRope, LongRope, NoRotary, Rotary
from farsight.configs.typed import from_dict, to_dict
from farsight.errors import ConfigError
from farsight.json_files import fields_of
from farsight.model.build import ModelConfig
from farsight.model.position.rope import rope_frequencies
from farsight.model.position.scope import DENSE_SCOPE

MODEL_TYPE = "farsight"
MODELING = "modeling_farsight"
"""Module that goes with a model of that type; it imports none of our packages."""
REQUIRES = {"torch": ">=2.5", "transformers": ">=4.46"}
"""Everything that the module imports."""
TRANSFORMERS = ("4.46.3", "5.23.0")
"""Earliest and latest version of transformers that the module is tested with."""


def to_hf_config(config: ModelConfig, dtype: str, bos_id: int | None, eos_id: int | None) -> dict[str, Any]:
    """`config.json` for a model; that of a family if `transformers` has the same model."""
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
        "hidden_act": {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}[a.activation],
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "pad_token_id": None,  # some classes have a default of their own, which this vocabulary may not hold
        "use_cache": True,
        "dtype": dtype,
    }
    native = native_family(config)
    if native is not None:
        family, fields = native
        return {
            "architectures": [f"{family.model_class}ForCausalLM"],
            "model_type": family.model_type,
            "transformers_version": family.since,
            **values,
            **fields,
        }
    return {
        "architectures": ["FarsightForCausalLM"],
        "model_type": MODEL_TYPE,
        "auto_map": {
            "AutoConfig": f"{MODELING}.FarsightConfig",
            "AutoModel": f"{MODELING}.FarsightModel",
            "AutoModelForCausalLM": f"{MODELING}.FarsightForCausalLM",
        },
        **values,
        "transformers_version": TRANSFORMERS[0],
        "requires": REQUIRES,
        "tested_with_transformers": list(TRANSFORMERS),
        **_layer_options(config),
        "sinusoidal": config.position.embedding == "sinusoidal",
        "trained_length": config.trained_length,
        **_resolved_layers(config),
        # The source of the numbers above; it survives when transformers saves the model again.
        "farsight": to_dict(config),
    }


def native_family(config: ModelConfig) -> tuple[Family, dict[str, Any]] | None:
    """The family whose class can express a model, and that class's own fields; None for our modelling file.

    The family that the weights came from is preferred.
    """
    origin = VISION[config.family].text if config.family in VISION else config.family
    families = sorted(FAMILIES.values(), key=lambda family: family.model_type != origin)
    for family in families:
        if (fields := family.to_hf(config)) is not None:
            return family, fields
    return None


def _layer_options(config: ModelConfig) -> dict[str, Any]:
    """The settings that all layers share, for `modeling_farsight.FarsightConfig`."""
    a, scaling = config.architecture, config.position.query_scaling
    names = (
        "norm_placement", "zero_centered_norms", "qk_norm", "qk_norm_span", "attention_bias", "mlp_bias", "rotary_dim",
        "softmax_scale", "scaled_embeddings",
    )  # fmt: skip
    query_scaling = None if scaling is None else {"beta": scaling.beta, "original_length": scaling.original_length}
    return {**{name: getattr(a, name) for name in names}, "query_scaling": query_scaling}


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
    rotated, length = config.architecture.rotated_dim, config.trained_length
    resolved = [_resolved_rotary(rotary, rotated, length) for rotary in rotaries]
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


def from_hf_config(values: dict[str, Any], path: Path = Path("config.json")) -> ModelConfig:
    """Converts the `config.json` of a family that we know to our config.

    Args:
        path: origin of the values, for errors.

    Raises:
        ConfigError: naming an invalid value, or a model or setting that is not supported.
    """
    with fields_of(path):
        return _from_values(values, path).checked(path)


def _from_values(values: dict[str, Any], path: Path) -> ModelConfig:
    model_type = values.get("model_type")
    if model_type == MODEL_TYPE and "farsight" in values:
        return from_dict(ModelConfig, values["farsight"], f"{path}: farsight")
    text, place = values, path
    if model_type in VISION:
        inner = values.get("text_config")
        if not isinstance(inner, dict):
            raise ConfigError(f"{path} has model_type {model_type!r}, but no text_config.")
        # transformers goes by the outer config to tie embedding and head.
        outer = {name: values[name] for name in ("tie_word_embeddings",) if name in values}
        text = {"model_type": VISION[model_type].text} | inner | outer
        place = Path(f"{path}: text_config")
    family = FAMILIES.get(str(text["model_type"])) if "model_type" in text else None
    if family is None:
        raise ConfigError(
            f"{place} has model_type {text.get('model_type')!r}, which this command does not take: it takes only the types that "
            f"Farsight builds itself, {', '.join(sorted([*FAMILIES, *VISION]))}. farsight capture, geometry, plasticity, probes, "
            "generate, serve, needle, perplexity, harness, loft and ripra also take types that only transformers builds "
            "(docs/inference/models.md)."
        )
    given = Values(text, place, family.defaults)
    given.check_sizes()
    config = family.read(given)
    return replace(config, family=model_type) if model_type in VISION else config


def tensor_names(values: Mapping[str, Any]) -> TensorNames:
    """The names of the tensors beside a `config.json`, from its content."""
    own = values.get("farsight", {}).get("architecture", {})
    inner = values.get("text_config") or {}
    return names_of_type(str(values.get("model_type")), own.get("norm_placement", "pre"), inner.get("model_type", ""))


def names_of_type(model_type: str, norm_placement: str, text_type: str = "") -> TensorNames:
    """The names of the tensors of a model of a type of `transformers`, or of our own.

    Args:
        norm_placement: the architecture's, for our own type.
        text_type: the type of the language model in a directory that holds a vision model too; empty is the usual one.
    """
    if model_type in VISION:
        return TensorNames(FAMILIES[text_type or VISION[model_type].text].modules, vision=True)
    return TensorNames(FAMILIES[model_type].modules if model_type in FAMILIES else BY_PLACEMENT[norm_placement])
