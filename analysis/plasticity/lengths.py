"""Plasticity beside a model's accuracy or perplexity at several context lengths (plasticity thesis, Table 6.4)."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from farsight.analysis.plasticity.summary import Profile
from farsight.errors import ConfigError

Figure = tuple[str, dict[int, float]]
"""The name of a figure, and its value at each length."""


def read_lengths(file: Path, model: Path) -> Figure:
    """Reads a model's accuracy (over all depths) from farsight needle's JSON, or its perplexity from farsight perplexity's.

    Perplexity is that of reading with the scopes the model was trained with.

    Raises:
        ConfigError: no such file, or no figures of this model in it.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"--needle {file}: there is no such file.") from None
    except ValueError as error:
        raise ConfigError(f"--needle {file} is not valid JSON ({error}).") from None
    content = content if isinstance(content, dict) else {}
    several = content.get("models", {content.get("model"): content})
    found = [values for path, values in several.items() if path and _same(Path(path), model)]
    if not found:
        names = ", ".join(map(str, several)) or "no model"
        raise ConfigError(f"--needle {file} has figures of {names}, but none of {model}: name a file of this model.")
    match found[0]:
        case {"cells": list(cells)}:
            return "accuracy", accuracies(cells)
        case {"lengths": dict(lengths)}:
            return "perplexity", {
                int(length): value for length, value in sorted(lengths.items(), key=lambda i: int(i[0]))
            }
    raise ConfigError(f"--needle {file} was not written by farsight needle or farsight perplexity.")


def _same(named: Path, model: Path) -> bool:
    """Whether `named`, which may be relative to another folder, is `model`."""
    if named.resolve() == model.resolve():
        return True
    # A single part, such as "model", would match too many paths.
    return len(named.parts) > 1 and named.parts == model.resolve().parts[-len(named.parts) :]


def accuracies(cells: list[dict[str, Any]]) -> dict[int, float]:
    """Accuracy at each length, over all trials at all depths, from the cells of farsight needle."""
    right: dict[int, float] = defaultdict(float)
    trials: dict[int, int] = defaultdict(int)
    for cell in cells:
        right[cell["length"]] += cell["accuracy"] * cell["trials"]
        trials[cell["length"]] += cell["trials"]
    return {length: right[length] / trials[length] for length in sorted(trials)}


def by_length(profile: Profile, length: int, measured: Figure) -> list[dict[str, Any]]:
    """A row per measured length, with the plasticity of queries at its end: that of the bucket of its last token.

    Args:
        length: tokens per sequence in the profile. Longer measured lengths have no plasticity.
    """
    name, values = measured
    return [
        {
            "length": context,
            name: value,
            "plasticity": profile[(context - 1) * len(profile) // length] if context <= length else None,
        }
        for context, value in values.items()
    ]
