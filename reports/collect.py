"""Collects a page's figures: JSON files of our tools, recognised by their keys and matched to models."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from farsight.analysis.plasticity.options import with_ap_names
from farsight.errors import ConfigError
from farsight.remote import shown
from farsight.reports.results import Result
from farsight.reports.tools import Tool
from farsight.training.runs import NamedModel


def collect_results(tools: Sequence[Tool], models: Sequence[NamedModel], named: Sequence[Path]) -> list[Result]:
    """The tools' results in the models' folders for them, and in the named files.

    Raises:
        ConfigError: a file that cannot be read, or a named file without a result of these models.
    """
    folders = list(dict.fromkeys(tool.folder for tool in tools))
    results = []
    for model in models:
        for place in model.places:
            for file in (file for folder in folders for file in sorted((place / folder).glob("*.json"))):
                results += _of(file, tools, models, model)
    for file in named:
        found = _of(file, tools, models, None)
        if not found:
            entries = list(_entries(file, tools))
            if not any(kind for _, kind, _ in entries):
                names = [f"farsight {tool.command}" for tool in tools]
                raise ConfigError(f"--results {file} is not a result of {', '.join(names[:-1])} or {names[-1]}.")
            paths = ", ".join(str(path) for path, _, _ in entries if path) or "no path"
            given = ", ".join(shown(model.path) for model in models)
            raise ConfigError(
                f"--results {file} has no result for any model on this page. It names {paths}; the page has {given}. "
                f"A file without a path belongs in the {'/ or '.join(folders)}/ of its model."
            )
        results += found
    unique = {(result.model.number, result.kind, result.file.resolve()): result for result in results}
    return list(unique.values())


def _of(file: Path, tools: Sequence[Tool], models: Sequence[NamedModel], owner: NamedModel | None) -> list[Result]:
    """Results in a file for the models that it names, or for its owner if it names no other model.

    A relative path may have been written from another folder. It means the owner if it matches the end of the owner's path, and
    without an owner the only model whose path ends so.

    Args:
        owner: the model in whose folder the file is; None for a file named by --results.

    Raises:
        ConfigError: a relative path that matches the ends of several models' paths.
    """
    found = []
    entries = [(path, kind, values) for path, kind, values in _entries(file, tools) if kind is not None]
    for path, kind, values in entries:
        exact = [model for model in models if path is not None and path.resolve() in _resolved(model)]
        alike = [model for model in models if path is not None and _ends_in(path, model)]
        if exact:
            matches = exact
        elif owner is not None:
            its = path is None or owner in alike or (len(entries) == 1 and not path.exists())
            matches = [owner] if its else []
        elif len(alike) > 1:
            ends = ", ".join(shown(model.path) for model in alike)
            raise ConfigError(
                f"--results {file} names {path}, which fits several models ({ends}): name the model by its absolute path."
            )
        else:
            matches = alike
        found += [Result(model, kind, file, values) for model in matches]
    return found


def _entries(file: Path, tools: Sequence[Tool]) -> Iterator[tuple[Path | None, str | None, Mapping[str, Any]]]:
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
            kind = next((tool.kind for tool in tools if tool.is_result(values)), None)
            if kind == "plasticity":
                values = with_ap_names(values)
            yield Path(named) if named and isinstance(named, str) else None, kind, values


def _resolved(model: NamedModel) -> list[Path]:
    return [Path(shown(place)).resolve() for place in model.places]


def _ends_in(path: Path, model: NamedModel) -> bool:
    """Whether a relative path of at least two parts is the end of one of the model's paths."""
    parts = () if path.is_absolute() else path.parts
    return len(parts) > 1 and any(place.parts[-len(parts) :] == parts for place in _resolved(model))
