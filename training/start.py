"""Warnings for runs that start from weights trained with another RoPE base."""

import logging
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from farsight import process
from farsight.checkpoints.load import read_model_config
from farsight.configs.load import read_arguments
from farsight.configs.schema import JobConfig, NoRotary
from farsight.errors import ConfigError

logger = logging.getLogger("farsight")


def report_theta(config: JobConfig, arguments: Sequence[str]) -> None:
    """Reports that a run's RoPE base differs from that of the weights it starts from; warns if no setting named it."""
    start = config.checkpoint.initial_load_path
    if not start or not config.checkpoint.enable:
        return
    theirs = theta_of(Path(start))
    ours = config.position.rotary
    if theirs is None or isinstance(ours, NoRotary) or theirs == ours.theta:
        return
    if names_theta(arguments):
        logger.info(f"position.rotary.theta = {ours.theta:g}; the weights of {start} were trained with {theirs:g}")
    elif process.ranks().rank == 0:
        logger.warning(other_theta(start, theirs, ours.theta))


def other_theta(start: str, theirs: float, ours: float) -> str:
    """The warning about a RoPE base that no setting named."""
    return (
        f"position.rotary.theta = {ours:g} by default, but the weights of {start} were trained with {theirs:g}: set "
        f"position.rotary.theta = {theirs:g} to keep theirs."
    )


def theta_of(start: Path) -> float | None:
    """The RoPE base of a model directory or checkpoint; None without RoPE, or if it can't be read, which loading reports."""
    try:
        rotary = read_model_config(start).position.rotary
    except (ConfigError, OSError):
        return None
    return None if isinstance(rotary, NoRotary) else rotary.theta


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
