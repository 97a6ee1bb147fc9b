"""RoPE in a `config.json`: `rope_parameters` of transformers 5, or `rope_scaling` and `rope_theta` of transformers 4."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

from farsight.checkpoints.model_dir.families.values import Values
from farsight.configs.schema import DynamicNtkRope, LinearRope, Llama3Rope, LongRope, NtkRope, Rope, Rotating, YarnRope
from farsight.configs.typed import from_dict
from farsight.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"
"""transformers' names of the kinds of layers in `layer_types`."""

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


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────────


def read_rope(
    values: Values, extra: Collection[str] = (), longrope: Collection[str] = ()
) -> tuple[Rotating, dict[str, Any]]:
    """The rotation that all layers share, and the family's own settings beside it.

    Args:
        extra: names of further settings that the family keeps there.
        longrope: other names of LongRoPE.

    Raises:
        ConfigError: an unknown kind, or a setting that it does not take.
    """
    # In this order, as transformers 5 does where both are given.
    given = _table(values, "rope_scaling") or _table(values, "rope_parameters")
    if any(isinstance(given.get(kind), dict) for kind in (FULL, SLIDING)):
        raise ConfigError(
            f"{values.path} has rope_parameters by layer type, which {values.get('model_type')} models are not read with."
        )
    given.setdefault("rope_theta", values.get("rope_theta") or 10000.0)
    return _rotary(given, values, extra, longrope)


def read_rope_by_type(values: Values, theta: float, local_theta: float | None) -> dict[str, Rotating]:
    """The rotations of the layers with full and with sliding attention.

    In transformers 4's form scaling is that of full attention alone, and `rope_local_base_freq` is the base under sliding
    attention.

    Args:
        theta: the family's base where the config does not say.
        local_theta: likewise under sliding attention; None is the base of full attention.

    Raises:
        ConfigError: as `read_rope`.
    """
    given = _table(values, "rope_parameters")
    if given and not any(kind in given for kind in (FULL, SLIDING)):
        given = {FULL: given, SLIDING: given}
    theta = values.get("rope_theta") or theta
    local = values.get("rope_local_base_freq") or local_theta or theta
    full = {"rope_theta": theta} | (given.get(FULL) or {}) | _table(values, "rope_scaling")
    sliding = {"rope_theta": local} | (given.get(SLIDING) or {})
    return {kind: _rotary(table, values)[0] for kind, table in ((FULL, full), (SLIDING, sliding))}


def _table(values: Values, name: str) -> dict[str, Any]:
    found = values.get(name)
    if found is not None and not isinstance(found, dict):
        raise ConfigError(f"{values.path}: its rope settings are {found!r}, not a JSON object.")
    return dict(found or {})


def _rotary(
    given: Mapping[str, Any], values: Values, extra: Collection[str] = (), longrope: Collection[str] = ()
) -> tuple[Rotating, dict[str, Any]]:
    path, length = values.path, values.get("max_position_embeddings")
    settings = {name: value for name, value in given.items() if value is not None}
    kind, old_name = settings.pop("rope_type", None), settings.pop("type", None)
    kind = kind or old_name or "default"
    kind = "longrope" if kind in longrope else kind
    if kind not in _TYPES:
        raise ConfigError(f"{path} has rope_type {kind!r}; known: {', '.join(_TYPES)}.")
    own = {name: settings.pop(name) for name in extra if name in settings}
    if "partial_rotary_factor" in settings and settings.pop("partial_rotary_factor") != 1:
        given_share = given["partial_rotary_factor"]
        raise ConfigError(
            f"{path}: partial_rotary_factor = {given_share!r} of its rope settings: {values.get('model_type')} rotates whole heads."
        )
    fields = {f.name for f in dataclasses.fields(_TYPES[kind])}
    if kind == "dynamic":  # transformers uses the model's length, whatever else is given
        settings["original_max_position_embeddings"] = length
    elif "original_length" in fields:
        if values.get("original_max_position_embeddings"):  # Phi-3 keeps it outside, where it takes precedence
            settings["original_max_position_embeddings"] = values.get("original_max_position_embeddings")
        if kind != "llama3":
            settings.setdefault("original_max_position_embeddings", length)
    for name, value in (own | settings).items():
        for number in value if isinstance(value, list) else [value]:
            if not isinstance(number, int | float) or not 0 <= number < math.inf:
                raise ConfigError(
                    f"{path}: {name} = {value!r} of its rope settings must be a finite number, 0 or more."
                )
    for name in ("rope_theta", "factor", "original_max_position_embeddings"):
        if settings.get(name) == 0:
            raise ConfigError(f"{path}: {name} = 0 of its rope settings must be more than 0.")
    if kind in ("longrope", "yarn") and "factor" not in settings:  # derived from the two lengths
        settings["factor"] = length / settings["original_max_position_embeddings"]
    if kind == "yarn":
        _mscale(settings)
    ours = {theirs: name for name, theirs in _FIELDS.items()}
    if unknown := [name for name in settings if ours.get(name) not in fields]:
        raise ConfigError(f"{path}: its rope settings have {', '.join(unknown)}, which {kind} scaling does not take.")
    renamed = {ours[name]: value for name, value in settings.items()}
    return from_dict(_TYPES[kind], renamed, f"{path}: rope settings"), own


def _mscale(settings: dict[str, Any]) -> None:
    """Replaces DeepSeek's pair of scales by YaRN's attention factor, their quotient."""
    scale, scale_all = settings.pop("mscale", None), settings.pop("mscale_all_dim", None)
    if scale and scale_all and "attention_factor" not in settings:
        growth = 0.1 * math.log(settings["factor"]) if settings["factor"] > 1 else 0.0
        settings["attention_factor"] = (scale * growth + 1.0) / (scale_all * growth + 1.0)


# ── Writing ───────────────────────────────────────────────────────────────────────────────────────────


def plain(rotary: Rotating, rotated_dim: int) -> Rotating:
    """The same rotation as one that transformers has: static NTK is plain RoPE with another base."""
    if isinstance(rotary, NtkRope):
        return Rope(theta=rotary.theta * rotary.factor ** (rotated_dim / (rotated_dim - 2)))
    return rotary


def rope_table(rotary: Rotating) -> dict[str, Any]:
    """`rope_parameters` of a rotation, but for dynamic NTK's length, which is that of the model."""
    names = {kind: name for name, kind in _TYPES.items()}
    fields = {_FIELDS[f.name]: getattr(rotary, f.name) for f in dataclasses.fields(rotary) if f.name != "kind"}
    fields = {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items() if v is not None}
    if isinstance(rotary, DynamicNtkRope):
        del fields["original_max_position_embeddings"]
    return {"rope_type": names[type(rotary)], **fields}


def write_rope(table: Mapping[str, Any]) -> dict[str, Any]:
    """A rotation in the forms of transformers 5 and 4."""
    return {"rope_parameters": dict(table), **_former(table)}


def write_rope_by_type(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Rotations by layer type in the forms of transformers 5 and 4; the latter has scaling under full attention alone."""
    return {"rope_parameters": {kind: dict(table) for kind, table in tables.items()}, **_former(tables[FULL])}


def _former(table: Mapping[str, Any]) -> dict[str, Any]:
    scaling = {name: value for name, value in table.items() if name != "rope_theta"}
    return {"rope_theta": table["rope_theta"], "rope_scaling": None if scaling == {"rope_type": "default"} else scaling}
