"""Evaluates model directories with commands that write JSON files; a finished evaluation is not repeated."""

import json
import logging
import re
import shlex
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from farsight.checkpoints.cards.model import CARD
from farsight.configs.load import read_toml
from farsight.configs.shipped import find_config
from farsight.configs.typed import from_dict
from farsight.errors import ConfigError
from farsight.json_files import read_object
from farsight.launch.ablation.tables import MEAN
from farsight.launch.children import ended, run_child
from farsight.outputs import write_json

logger = logging.getLogger("farsight")


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of a model directory that gives one figure."""

    name: str = ""
    command: str = ""
    """Runs in the working directory; {model} and {json} are replaced, `farsight` and `python` are those running now."""
    value: str = ""
    """Keys that lead to the figure in the JSON file, joined by dots."""
    better: Literal["higher", "lower"] = "higher"
    percent: bool = False
    """The figure is a share of 1: show it in percent, and include it in the mean."""


HELD_OUT = Evaluation(name="held-out loss", better="lower")
"""The evaluation that training runs make themselves."""


def read_evaluations(path: Path | None) -> list[Evaluation]:
    """Reads the evaluations; the held-out loss comes first.

    Raises:
        ConfigError: an evaluation is incomplete, or two names give the same file.
    """
    values = read_toml(find_config(path)) if path else {}
    entries = values.pop("evaluations", [])
    if values or not isinstance(entries, list):
        raise ConfigError(f"{path} must hold [[evaluations]] and nothing else, not {', '.join(values) or 'one table'}.")
    evaluations = [HELD_OUT]
    for number, entry in enumerate(entries):
        evaluation = from_dict(Evaluation, entry, f"evaluations.{number}")
        if not (
            evaluation.name and evaluation.value and "{model}" in evaluation.command and "{json}" in evaluation.command
        ):
            raise ConfigError(
                f"{path}: evaluations.{number} needs a name, a value, and a command with {{model}} and {{json}} in it."
            )
        try:
            shlex.split(evaluation.command)
        except ValueError as error:
            raise ConfigError(f"{path}: evaluations.{number}.command can't be read: {error}.") from None
        if evaluation.name == MEAN:
            raise ConfigError(f"{path}: {MEAN!r} is the column of the evaluations' mean; rename evaluations.{number}.")
        for other in evaluations:
            if result_file(evaluation, Path()) == result_file(other, Path()):
                raise ConfigError(
                    f"{path}: {other.name!r} and {evaluation.name!r} would write the same file; rename evaluations.{number}."
                )
        evaluations.append(evaluation)
    return evaluations


def evaluate(label: str, model: Path, folder: Path, evaluation: Evaluation) -> float:
    """Evaluates a model directory and returns the figure; skips the command if it has already run on the same files.

    Args:
        label: the experiment, for messages.
        folder: folder for the command's JSON file.

    Raises:
        ConfigError: the command failed, or its file lacks the figure.
        Stopped: a signal asked to stop.
    """
    out = result_file(evaluation, folder)
    command = evaluation_command(evaluation, model, out)
    known = folder / ".evaluated.json"
    done: dict[str, Any] = {}
    with suppress(ConfigError):  # missing or damaged: then everything is measured again
        done = read_object(known)
    asked = {"command": command, "model": model_files(model)}
    if done.get(evaluation.name) != asked or not written(out):
        logger.info(f"{label}: {evaluation.name}")
        for old in written(out):
            old.unlink()
        done.pop(evaluation.name, None)  # a command that fails may still leave a file
        write_json(known, done)
        try:
            status = run_child(command)
        except OSError as error:
            raise ConfigError(f"{evaluation.name} of {label} did not start: {error}. {shlex.join(command)}") from None
        if status:
            raise ConfigError(f"{evaluation.name} of {label} {ended(status)}: {shlex.join(command)}")
        done[evaluation.name] = asked
        write_json(known, done)
    return figure(out, evaluation.value) * (100 if evaluation.percent else 1)


def model_files(model: Path) -> dict[str, list[int]]:
    """Size and modification time of a model directory's files, to detect that it was rewritten; without its card."""
    files = sorted(path for path in model.glob("*") if path.is_file() and path.name != CARD)
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}


def result_file(evaluation: Evaluation, folder: Path) -> Path:
    """The JSON file of an evaluation, which replaces {json} in its command."""
    return folder / f"{re.sub(r'[^a-z0-9]+', '-', evaluation.name.lower()).strip('-')}.json"


def evaluation_command(evaluation: Evaluation, model: Path, out: Path) -> list[str]:
    """The evaluation's command, with the model directory and the JSON file filled in."""
    parts = [
        part.replace("{model}", str(model)).replace("{json}", str(out)) for part in shlex.split(evaluation.command)
    ]
    own = {"python": [sys.executable], "farsight": [sys.executable, "-m", "farsight"]}
    return [*own.get(parts[0], parts[:1]), *parts[1:]]


def written(out: Path) -> list[Path]:
    """The result files that exist: the file itself, and those that lm-eval writes instead, with a time in their name."""
    return [out] * out.is_file() + sorted(out.parent.glob(f"{out.stem}_*.json"))


def figure(out: Path, keys: str) -> float:
    """Reads the number that dotted keys lead to in a result file.

    Raises:
        ConfigError: there is no file, it is not JSON, or the value is not a number.
    """
    files = written(out)
    if not files:
        raise ConfigError(f"The command succeeded but did not write {out}.")
    again = "Correct the evaluation's value, or remove the file to measure again."
    try:
        value = json.loads(files[-1].read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{files[-1]} is not valid JSON ({error}). Remove it to measure again.") from None
    for key in keys.split("."):
        if not isinstance(value, dict) or key not in value:
            known = ", ".join(value) if isinstance(value, dict) else repr(value)
            raise ConfigError(f"{files[-1]} has no {keys!r}: where {key!r} should be there is {known}. {again}")
        value = value[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{files[-1]}: {keys!r} is {value!r}, not a number. {again}")
    return float(value)
