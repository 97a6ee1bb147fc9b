"""Figures of our tools for the models on a page."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farsight.training.runs import NamedModel

VARIANTS = {
    "task": "{}",
    "extend": "{}",
    "scope_max": "scope_max {}",
    "quantization": "{}",
    "stride": "sliding by {:,}",
}
"""Keys that tell how a model was read, with the format for showing them where they differ between files."""


@dataclass(frozen=True)
class Result:
    """One tool's figures for one model."""

    model: NamedModel
    kind: str
    """The command that wrote it."""
    file: Path
    values: Mapping[str, Any]


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
