"""Collects a report's figures: JSON files of our tools, recognised by their keys and matched to models."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farsight.errors import ConfigError
from farsight.training.runs import NamedModel

VARIANTS = {"task": "{}", "extend": "{}", "stride": "sliding by {:,}"}
"""Keys that tell how a model was read, with the format for showing them where they differ between files."""


@dataclass(frozen=True)
class Result:
    """One tool's figures for one model."""

    model: NamedModel
    kind: str
    """The command that wrote it."""
    file: Path
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Source:
    """The tools whose results a page shows."""

    folder: str
    """Folder in a run or model with its results."""
    kind_of: Callable[[Mapping[str, Any]], str | None]
    """Returns the kind of a result by its keys, None for other files."""
    tools: str
    """Names of the tools, for messages."""


def collect_from(source: Source, models: Sequence[NamedModel], named: Sequence[Path]) -> list[Result]:
    """The results in the models' folders for them, and in the named files.

    Raises:
        ConfigError: a file that cannot be read, or a named file without a result of these models.
    """
    results = []
    for model in models:
        for place in model.places:
            for file in sorted((place / source.folder).glob("*.json")):
                results += _of(file, source, models, model)
    for file in named:
        found = _of(file, source, models, None)
        if not found:
            entries = list(_entries(file, source))
            if not any(kind for _, kind, _ in entries):
                raise ConfigError(f"--results {file} is not a result of {source.tools}.")
            paths = ", ".join(str(path) for path, _, _ in entries if path) or "no path"
            given = ", ".join(str(model.path) for model in models)
            raise ConfigError(
                f"--results {file} has no result for any model on this page. It names {paths}; the page has {given}. "
                f"A file without a path belongs in the {source.folder}/ of its model."
            )
        results += found
    unique = {(result.model.number, result.kind, result.file.resolve()): result for result in results}
    return list(unique.values())


def of_kind(results: Sequence[Result], kind: str) -> list[Result]:
    """The results of one kind, ordered by model."""
    return sorted((result for result in results if result.kind == kind), key=lambda result: result.model.number)


def names(results: Sequence[Result]) -> list[str]:
    """A name for each result of one kind: the model's, with what distinguishes the result from others of the model.

    That is how the model was read, where results differ in this, and the file's name where names are still equal.
    """
    varied = [key for key in VARIANTS if len({str(result.values.get(key)) for result in results}) > 1]
    found = []
    for result in results:
        notes = [VARIANTS[key].format(result.values[key]) for key in varied if result.values.get(key)]
        found.append(", ".join([result.model.name, *notes]))
    for files in ([result.file.stem for result in results], [str(result.file) for result in results]):
        counts = Counter(found)
        found = [f"{name}, {file}" if counts[name] > 1 else name for name, file in zip(found, files, strict=True)]
    return found


def line_numbers(results: Sequence[Result]) -> list[int]:
    """A colour number for each result: the model's own for its first result, unused ones for the others."""
    seen: set[int] = set()
    free = max(result.model.number for result in results) + 1
    numbers = []
    for result in results:
        if result.model.number in seen:
            numbers.append(free)
            free += 1
        else:
            numbers.append(result.model.number)
            seen.add(result.model.number)
    return numbers


def labelled(results: Sequence[Result]) -> list[tuple[Result, str, int]]:
    """Each result of one kind with its name and its colour number."""
    return list(zip(results, names(results), line_numbers(results), strict=True))


def _of(file: Path, source: Source, models: Sequence[NamedModel], owner: NamedModel | None) -> list[Result]:
    """Results in a file for the models that it names, or for its owner if it names no other model.

    A relative path may have been written from another folder. It means the owner if it matches the end of the owner's path, and
    without an owner the only model whose path ends so.

    Args:
        owner: the model in whose folder the file is; None for a file named by --results.

    Raises:
        ConfigError: a relative path that matches the ends of several models' paths.
    """
    found = []
    entries = [(path, kind, values) for path, kind, values in _entries(file, source) if kind is not None]
    for path, kind, values in entries:
        exact = [model for model in models if path is not None and path.resolve() in _resolved(model)]
        alike = [model for model in models if path is not None and _ends_in(path, model)]
        if exact:
            matches = exact
        elif owner is not None:
            its = path is None or owner in alike or (len(entries) == 1 and not path.exists())
            matches = [owner] if its else []
        elif len(alike) > 1:
            ends = ", ".join(str(model.path) for model in alike)
            raise ConfigError(
                f"--results {file} names {path}, which fits several models ({ends}): name the model by its absolute path."
            )
        else:
            matches = alike
        found += [Result(model, kind, file, values) for model in matches]
    return found


def _entries(file: Path, source: Source) -> Iterator[tuple[Path | None, str | None, Mapping[str, Any]]]:
    """Yields each model's path, kind of result and figures."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"There is no file {file}.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON ({error}).") from None
    several = content.get("models") if isinstance(content, dict) else None
    for path, values in (several if isinstance(several, dict) else {"": content}).items():
        if isinstance(values, dict):
            named = path or values.get("model")
            yield Path(named) if named and isinstance(named, str) else None, source.kind_of(values), values


def _resolved(model: NamedModel) -> list[Path]:
    return [place.resolve() for place in model.places]


def _ends_in(path: Path, model: NamedModel) -> bool:
    """Whether a relative path of at least two parts is the end of one of the model's paths."""
    parts = () if path.is_absolute() else path.parts
    return len(parts) > 1 and any(place.parts[-len(parts) :] == parts for place in _resolved(model))
