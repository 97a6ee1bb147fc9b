"""From config to model in one step: every layer's position and attention is decided here."""

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from farsight.configs.schema import Architecture, Attention, JobConfig, Loss, Position
from farsight.configs.typed import from_dict, to_dict
from farsight.errors import ConfigError
from farsight.json_files import fields_of, read_object
from farsight.model.llama import Llama
from farsight.model.position.layers import LayerPosition, resolve_layers, select_layers

FORMAT = 1
"""Version of `farsight.json`."""

_LARGEST = {
    "vocab_size": 2**26, "dim": 2**20, "n_layers": 4096, "n_heads": 2**14, "n_kv_heads": 2**14, "head_dim": 2**14, "ffn_dim": 2**24,
}  # fmt: skip
"""Larger than any model. A larger shape means a damaged file, and would exhaust memory before its tensors are even read."""


@dataclass(frozen=True)
class ModelConfig:
    """All that is needed to build a model; saved as `farsight.json` beside every checkpoint and exported model."""

    architecture: Architecture
    position: Position
    trained_length: int
    """Sequence length of the last training stage, which sets SCOPE's longest scope."""
    attention: Attention = field(default_factory=Attention)
    loss: Loss = field(default_factory=Loss)
    init_seed: int = 0
    family: str = ""
    """transformers' model type that the weights came from; exports keep it where it can express the model."""

    @classmethod
    def from_job(cls, job: JobConfig) -> "ModelConfig":
        """The model part of a training config."""
        return cls(job.architecture, job.position, job.model_length, job.attention, job.loss, job.debug.seed or 0)

    @classmethod
    def load(cls, path: Path) -> "ModelConfig":
        """Reads `farsight.json`.

        Raises:
            ConfigError: a damaged file, an unknown version, or unknown or malformed fields.
        """
        values = read_object(path)
        version = values.get("format")
        if version != FORMAT:
            raise ConfigError(f"{path} has format {version!r}; this version of Farsight reads {FORMAT}.")
        with fields_of(path):
            return from_dict(cls, values["model"], f"{path}: model").checked(path)

    def checked(self, place: Path) -> "ModelConfig":
        """Returns this config if a model of its sizes can exist.

        Args:
            place: the file it was read from, for the message.

        Raises:
            ConfigError: impossible sizes.
        """
        a = self.architecture
        for name, most in _LARGEST.items():
            if not 1 <= getattr(a, name) <= most:
                raise ConfigError(f"{place}: {name} = {getattr(a, name)} must be from 1 to {most:,}.")
        if a.n_heads % a.n_kv_heads:
            raise ConfigError(f"{place}: n_heads = {a.n_heads} is not a multiple of n_kv_heads = {a.n_kv_heads}.")
        if a.head_dim % 2:
            raise ConfigError(f"{place}: head_dim = {a.head_dim} must be even: RoPE rotates pairs.")
        if a.rotary_dim % 2 or a.rotary_dim > a.head_dim:
            raise ConfigError(f"{place}: rotary_dim = {a.rotary_dim} must be even and at most head_dim = {a.head_dim}.")
        if not 0 < a.norm_eps < 1:
            raise ConfigError(f"{place}: norm_eps = {a.norm_eps} must be more than 0 and less than 1.")
        if not 1 <= self.trained_length <= 2**40:
            raise ConfigError(f"{place}: trained_length = {self.trained_length} must be from 1 to {2**40:,}.")
        return self

    def save(self, path: Path, **more: Any) -> None:
        """Writes `farsight.json`; `more` (the training config, for example) is stored beside the model's own part."""
        values = {"format": FORMAT, "model": to_dict(self), **more}
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    def layers(self, length: int | None = None) -> tuple[LayerPosition, ...]:
        """Each layer's position for sequences of `length` tokens; None is the trained length.

        Raises:
            ConfigError: position settings that do not fit the architecture.
        """
        a = self.architecture
        try:
            return resolve_layers(
                self.position,
                n_layers=a.n_layers,
                n_heads=a.n_heads,
                n_kv_heads=a.n_kv_heads,
                rotated_dim=a.rotated_dim,
                trained_length=self.trained_length,
                length=length or self.trained_length,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error


def build_model(config: ModelConfig, length: int | None = None) -> Llama:
    """Builds the model on the current default device, weights uninitialised.

    Args:
        length: sequence length that positions are set for; None is the trained length. `set_length` changes it.

    Raises:
        ConfigError: position settings that do not fit the architecture.
    """
    return Llama(
        config.architecture,
        config.layers(length),
        sinusoidal=config.position.embedding == "sinusoidal",
        query_scaling=config.position.query_scaling,
        length=length or config.trained_length,
        backend=config.attention.backend,
        chunk_tokens=config.loss.chunk_tokens,
        init_seed=config.init_seed,
    )


def trained_layers(job: JobConfig) -> tuple[int, ...] | None:
    """The layers that `training.layers` names, or None to train all parameters.

    Raises:
        ConfigError: layers that the model does not have.
    """
    if not job.training.layers:
        return None
    try:
        return tuple(sorted(select_layers(job.training.layers, job.architecture.n_layers)))
    except ValueError as error:
        raise ConfigError(f"training.layers: {error}") from error


def freeze_all_but(model: Llama, layers: Collection[int] | None) -> None:
    """Leaves only these layers trainable (LASP 4.3), not the embedding, final norm and head; None freezes nothing."""
    if layers is None:
        return
    for name, parameter in model.named_parameters():
        kind, _, rest = name.partition(".")
        parameter.requires_grad_(kind == "layers" and int(rest.partition(".")[0]) in layers)


def set_length(model: Llama, config: ModelConfig, length: int) -> None:
    """Sets a model's scopes and length-dependent RoPE for sequences of `length` tokens.

    Scopes grow past the trained length only with `scope_max = "length"`.
    """
    model.set_position(config.layers(length), length)


def count_parameters(config: ModelConfig) -> int:
    """Number of parameters, counted on the meta device."""
    with torch.device("meta"):
        return sum(p.numel() for p in build_model(config).parameters())
