"""Evaluations of model directories by commands that write JSON files; a command does not run again where it has."""

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
from farsight.configs.check import ConfigError
from farsight.configs.json_files import read_object
from farsight.configs.load import find_config, from_dict, read_toml
from farsight.files import write_text
from farsight.launch.ablation.tables import MEAN
from farsight.launch.children import ended, run_child

logger = logging.getLogger("farsight")


@dataclass(frozen=True)
class Evaluation:
    """A figure of a model directory."""

    name: str = ""
    command: str = ""
    """Run from here; {model} and {json} are replaced, and `farsight` and `python` are this one's."""
    value: str = ""
    """Keys of the JSON file that lead to the figure, with dots between them."""
    better: Literal["higher", "lower"] = "higher"
    percent: bool = False
    """A share of 1: shown in percent, and counted in the mean."""


HELD_OUT = Evaluation(name="held-out loss", better="lower")
"""What runs measure themselves."""


def read_evaluations(path: Path | None) -> list[Evaluation]:
    """What to measure, the held-out loss first.

    Raises:
        ConfigError: an evaluation that lacks something, or names that can't be told apart.
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
            raise ConfigError(
                f"{path}: {MEAN!r} is the column of the evaluations' mean; name evaluations.{number} otherwise."
            )
        for other in evaluations:
            if result_file(evaluation, Path()) == result_file(other, Path()):
                raise ConfigError(
                    f"{path}: {other.name!r} and {evaluation.name!r} would write one file; rename evaluations.{number}."
                )
        evaluations.append(evaluation)
    return evaluations


def evaluate(label: str, model: Path, folder: Path, evaluation: Evaluation) -> float:
    """The figure of a model directory; the command does not run again where it has, on the same files.

    Args:
        folder: where the command's JSON file goes.

    Raises:
        ConfigError: the command failed, or its file lacks the figure.
    """
    out = result_file(evaluation, folder)
    command = evaluation_command(evaluation, model, out)
    known = folder / ".evaluated.json"
    done: dict[str, Any] = {}
    with suppress(ConfigError):  # there is none, or it is damaged: then all is measured again
        done = read_object(known)
    asked = {"command": command, "model": model_files(model)}
    if done.get(evaluation.name) != asked or not written(out):
        logger.info(f"{label}: {evaluation.name}")
        for old in written(out):
            old.unlink()
        done.pop(evaluation.name, None)  # a command that fails may leave a file all the same
        write_text(known, json.dumps(done, indent=2) + "\n")
        try:
            status = run_child(command)
        except OSError as error:
            raise ConfigError(f"{evaluation.name} of {label} did not start: {error}. {shlex.join(command)}") from None
        if status:
            raise ConfigError(f"{evaluation.name} of {label} {ended(status)}: {shlex.join(command)}")
        done[evaluation.name] = asked
        write_text(known, json.dumps(done, indent=2) + "\n")
    return figure(out, evaluation.value) * (100 if evaluation.percent else 1)


def model_files(model: Path) -> dict[str, list[int]]:
    """Size and time of change of a model directory's files, which tell whether it has been written anew; its card aside."""
    files = sorted(path for path in model.glob("*") if path.is_file() and path.name != CARD)
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}


def result_file(evaluation: Evaluation, folder: Path) -> Path:
    """What takes {json}'s place."""
    return folder / f"{re.sub(r'[^a-z0-9]+', '-', evaluation.name.lower()).strip('-')}.json"


def evaluation_command(evaluation: Evaluation, model: Path, out: Path) -> list[str]:
    """With the model directory and the JSON file in place."""
    parts = [
        part.replace("{model}", str(model)).replace("{json}", str(out)) for part in shlex.split(evaluation.command)
    ]
    own = {"python": [sys.executable], "farsight": [sys.executable, "-m", "farsight"]}
    return [*own.get(parts[0], parts[:1]), *parts[1:]]


def written(out: Path) -> list[Path]:
    """The file, or what lm-eval writes in its place: the same name with the time at its end."""
    return [out] * out.is_file() + sorted(out.parent.glob(f"{out.stem}_*.json"))


def figure(out: Path, keys: str) -> float:
    """The number to which keys with dots between them lead.

    Raises:
        ConfigError: no file, no JSON, or no number there.
    """
    files = written(out)
    if not files:
        raise ConfigError(f"{out} was not written, though the command ended well.")
    again = "Correct the evaluation's value, or remove the file to measure again."
    try:
        value = json.loads(files[-1].read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{files[-1]} is no JSON ({error}). Remove it to measure again.") from None
    for key in keys.split("."):
        if not isinstance(value, dict) or key not in value:
            known = ", ".join(value) if isinstance(value, dict) else repr(value)
            raise ConfigError(f"{files[-1]} has no {keys!r}: where {key!r} should be there is {known}. {again}")
        value = value[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{files[-1]}: {keys!r} is no number but {value!r}. {again}")
    return float(value)
