"""Plasticity beside what a model finds, or predicts, at contexts of several lengths (plasticity thesis, Table 6.4)."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from farsight.analysis.plasticity.summary import Profile
from farsight.configs.load import ConfigError

Figure = tuple[str, dict[int, float]]
"""What was measured, and its value at each length."""


def read_lengths(file: Path, model: Path) -> Figure:
    """A model's figures in a file of farsight needle (accuracy, over all depths) or farsight perplexity, read as it was trained.

    Raises:
        ConfigError: no such file, or nothing of this model in it.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"--needle {file}: there is no such file.") from None
    except ValueError as error:
        raise ConfigError(f"--needle {file} is no JSON ({error}).") from None
    content = content if isinstance(content, dict) else {}
    several = content.get("models", {content.get("model"): content})
    found = [values for path, values in several.items() if path and _same(Path(path), model)]
    if not found:
        names = ", ".join(map(str, several)) or "no model"
        raise ConfigError(f"--needle {file} has figures of {names}, and none of {model}: name a file of this model.")
    match found[0]:
        case {"cells": list(cells)}:
            return "accuracy", _accuracies(cells)
        case {"lengths": dict(lengths)}:
            return "perplexity", {
                int(length): value for length, value in sorted(lengths.items(), key=lambda i: int(i[0]))
            }
    raise ConfigError(f"--needle {file} was not written by farsight needle or farsight perplexity.")


def _same(named: Path, model: Path) -> bool:
    """Whether a path that may have been written from another folder is this one."""
    if named.resolve() == model.resolve():
        return True
    # One part alone, such as "model", would fit too many.
    return len(named.parts) > 1 and named.parts == model.resolve().parts[-len(named.parts) :]


def _accuracies(cells: list[dict[str, Any]]) -> dict[int, float]:
    right: dict[int, float] = defaultdict(float)
    trials: dict[int, int] = defaultdict(int)
    for cell in cells:
        right[cell["length"]] += cell["accuracy"] * cell["trials"]
        trials[cell["length"]] += cell["trials"]
    return {length: right[length] / trials[length] for length in sorted(trials)}


def by_length(profile: Profile, length: int, measured: Figure) -> list[dict[str, Any]]:
    """Each measured length with the plasticity of the bucket that its last token is in, as a query.

    Args:
        length: of the sequences that the profile was made of. Measured lengths beyond it have no plasticity.
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
