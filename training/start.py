"""Checks of a run against the weights that it starts from: their trained length, their RoPE base, and what LASP makes of it."""

import logging
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from farsight import process
from farsight.checkpoints.load import read_model_config
from farsight.configs.load import read_arguments
from farsight.configs.schema import JobConfig, NoRotary, Position
from farsight.errors import ConfigError
from farsight.model.build import ModelConfig
from farsight.remote import local

logger = logging.getLogger("farsight")


def report_theta(config: JobConfig, arguments: Sequence[str]) -> None:
    """Reports that a run's RoPE base differs from that of the weights it starts from; warns if no setting named it.

    Raises:
        ConfigError: LASP where no layer rotates.
    """
    start = config.checkpoint.initial_load_path if config.checkpoint.enable else None
    warning = lasp_warning(config, model_at(local(start, weights=False)) if start else None, start or "")
    if warning and process.ranks().rank == 0:
        logger.warning(warning)
    if not start or sets_theta(config.position):
        return
    theirs = theta_of(local(start, weights=False))
    ours = config.position.rotary
    if theirs is None or isinstance(ours, NoRotary) or theirs == ours.theta:
        return
    if names_theta(arguments):
        logger.info(f"position.rotary.theta = {ours.theta:g}; the weights of {start} were trained with {theirs:g}")
    elif process.ranks().rank == 0:
        logger.warning(other_theta(start, theirs, ours.theta))


def report_length(config: JobConfig) -> None:
    """Warns that the model will be one of shorter sequences than that whose weights the run starts from."""
    start = config.checkpoint.initial_load_path if config.checkpoint.enable else None
    theirs, ours = model_at(local(start, weights=False)) if start else None, config.training.seq_len
    if theirs is not None and ours < theirs.trained_length and process.ranks().rank == 0:
        logger.warning(
            f"training.seq_len = {ours:,}, but the weights of {start} are for up to {theirs.trained_length:,} tokens: this run's model "
            f"will be one for {ours:,} (max_position_embeddings). Set training.seq_len = {theirs.trained_length} to keep their length."
        )


def other_theta(start: str, theirs: float, ours: float) -> str:
    """The warning about a RoPE base that no setting named."""
    return (
        f"position.rotary.theta = {ours:g} by default, but the weights of {start} were trained with {theirs:g}: set "
        f"position.rotary.theta = {theirs:g} to keep theirs."
    )


def sets_theta(position: Position) -> bool:
    """True if LASP sets the RoPE base of each layer, in place of position.rotary.theta."""
    return position.lasp is not None and position.lasp.schedule != "scale"


def lasp_warning(config: JobConfig, start: ModelConfig | None, name: str) -> str | None:
    """The warning that LASP changes the RoPE base of the first layer that rotates; its schedule is meant to begin from the host's.

    Args:
        start: the model that the run starts from; None compares with position.rotary.theta.
        name: the start's, for the message.

    Raises:
        ConfigError: no layer rotates, so that LASP would do nothing; or positions that do not fit the model.
    """
    lasp, model = config.position.lasp, ModelConfig.from_job(config)
    if lasp is None:
        return None
    ours = _thetas(model)
    if not ours:
        raise ConfigError(
            f'[position.lasp] (schedule = "{lasp.schedule}", s_max = {lasp.s_max:.8g}, b_max = {lasp.b_max:.8g}) does nothing here, since '
            f'no layer rotates: position.rotary.kind = "{config.position.rotary.kind}". Leave it out, or set a kind such as "rope".'
        )
    layer = min(ours)
    own = _thetas(replace(model, position=replace(model.position, lasp=None)))[layer]
    theirs = own if start is None else _thetas(start).get(layer, own)
    if not sets_theta(config.position) or ours[layer] == theirs:
        return None
    host = (
        f"position.rotary.theta = {own:.8g}"
        if start is None
        else f"{theirs:.8g}, with which the weights of {name} were trained"
    )
    return (
        f"position.lasp.b_min = {lasp.b_min:.8g} gives layer {layer} the RoPE base {ours[layer]:.8g} instead of {host}: set "
        f"position.lasp.b_min = {theirs:.8g} and position.lasp.b_max above it to begin from that base."
    )


def _thetas(model: ModelConfig) -> dict[int, float]:
    """The RoPE base of each layer that rotates."""
    layers = enumerate(layer.rotary for layer in model.layers())
    return {number: rotary.theta for number, rotary in layers if not isinstance(rotary, NoRotary)}


def theta_of(start: Path) -> float | None:
    """The RoPE base of a model directory or checkpoint; None without RoPE, or if it can't be read, which loading reports."""
    model = model_at(start)
    return None if model is None or isinstance(model.position.rotary, NoRotary) else model.position.rotary.theta


def model_at(start: Path) -> ModelConfig | None:
    """The config of a model directory or checkpoint; None if it can't be read, which loading reports."""
    try:
        return read_model_config(start)
    except (ConfigError, OSError):
        return None


def names_theta(arguments: Sequence[str]) -> bool:
    """Whether a config file or options name the RoPE base."""
    return "theta" in rotary_of(read_arguments(arguments))


def rotary_of(values: dict[str, Any]) -> dict[str, Any]:
    """`position.rotary` of unchecked settings, or an empty table; an option may give it as inline TOML."""
    position = values.get("position")
    rotary = position.get("rotary") if isinstance(position, dict) else None
    if isinstance(rotary, str):
        with suppress(tomllib.TOMLDecodeError):  # refused later, when the settings are checked
            rotary = tomllib.loads(f"value = {rotary}")["value"]
    return rotary if isinstance(rotary, dict) else {}
