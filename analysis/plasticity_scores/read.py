"""Reads models' plasticity and their scores on benchmarks from the files of our tools, and scores from CSV files."""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farsight.analysis.plasticity.lengths import accuracies
from farsight.analysis.plasticity.options import AP, with_ap_names
from farsight.errors import ConfigError
from farsight.json_files import fields_of, read_object


@dataclass(frozen=True)
class Scored:
    """A model's scores in a file."""

    model: str
    """Its path, or the end of it."""
    source: str
    scores: dict[str, float] = field(default_factory=dict)
    """By task, group of tasks, "mean" or TASK@LENGTH; of a CSV file by column."""
    family: str | None = None


def read_plasticity(files: Sequence[Path]) -> dict[str, dict[str, float]]:
    """The aggregate figures of plasticity (AP) of each model, by its path.

    Raises:
        ConfigError: a file that has none, or a second one of a model.
    """
    found: dict[str, dict[str, float]] = {}
    for file in files:
        for model, values in _entries(file):
            if "checkpoints" in values:
                raise ConfigError(
                    f"{file} has the checkpoints of {model}: measure the models with farsight plasticity."
                )
            own = with_ap_names(values)
            if values.get("tool") != "analysis.plasticity" or model is None:
                raise ConfigError(f"{file} was not written by farsight plasticity.")
            if any(own.get(key) is None for key in AP):
                raise ConfigError(
                    f"{file}: {model} lacks plasticity in the first or last 20 %; measure more --sequences."
                )
            if model in found:
                raise ConfigError(f"{file} has figures of {model} again; name one file of each model.")
            found[model] = {key: own[key] for key in AP}
    return found


def read_scores(argument: str) -> list[Scored]:
    """The scores that a value of --scores names: FILE, or NAME=FILE for a file of one model.

    Raises:
        ConfigError: a file that can't be read, of unknown kind, or that names no model.
    """
    name, _, file = argument.rpartition("=") if not Path(argument).is_file() else ("", "", argument)
    path = Path(file)
    if path.suffix == ".csv":
        if name:
            raise ConfigError(f"--scores {argument}: a CSV file names its models itself; name the file alone.")
        return list(_csv_rows(path))
    found = []
    entries = list(_entries(path))
    if name and len(entries) > 1:
        raise ConfigError(f"--scores {argument}: the file has {len(entries)} models, and {name} is one.")
    for model, values in entries:
        if not (own := name or model):
            raise ConfigError(f"--scores {file} names no model: give it as NAME={file}.")
        with fields_of(path):
            found.append(Scored(own, file, _scores_of(path, values)))
    return found


def _entries(path: Path) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Each model's path in a JSON file of our tools, with its figures."""
    content = read_object(path)
    several = content.get("models")
    for model, values in (several if isinstance(several, dict) else {None: content}).items():
        if not isinstance(values, dict):
            raise ConfigError(f"{path} was not written by a tool of Farsight.")
        named = model or values.get("model")
        yield named if isinstance(named, str) else None, values


def _scores_of(path: Path, values: Mapping[str, Any]) -> dict[str, float]:
    match values:
        case {"cells": list(cells), "mean": mean}:
            task = values.get("task", "needle")
            return {task: mean} | {f"{task}@{length}": value for length, value in accuracies(cells).items()}
        case {"results": dict(results)}:
            named = {task: entry["value"] for task, entry in results.items()} | values.get("means", {})
            named["mean"] = values.get("mean")
            return {name: value for name, value in named.items() if value is not None and math.isfinite(value)}
    raise ConfigError(f"--scores {path} was not written by farsight needle, farsight harness or farsight external.")


def _csv_rows(path: Path) -> Iterator[Scored]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            if "model" not in (reader.fieldnames or ()):
                raise ConfigError(f'--scores {path} has no column "model" in its first line.')
            for row in reader:
                scores = {}
                for column, text in row.items():
                    if column in ("model", "family", None) or not (text or "").strip():
                        continue
                    if (value := _number(text)) is None:
                        raise ConfigError(
                            f"--scores {path}, line {reader.line_num}: {column} is {text!r}, not a number."
                        )
                    scores[column] = value
                yield Scored(row["model"], str(path), scores, row.get("family") or None)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--scores {path} can't be read: {error}.") from None


def _number(text: str) -> float | None:
    """A finite number; None for any other text."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def is_named(name: str, model: str) -> bool:
    """True if a path, or the end of one, names this model; a `model` folder goes by its run's name too."""
    named, own = _parts(Path(name)), _parts(Path(model).resolve())
    return _parts(Path(name).resolve()) == own or own[-len(named) :] == named


def _parts(path: Path) -> tuple[str, ...]:
    return path.parts[:-1] if path.name == "model" and len(path.parts) > 1 else path.parts
