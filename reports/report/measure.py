"""The commands that measure what `farsight report` shows."""

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from farsight.reports.results import FOLDER, Kind, Result
from farsight.reports.run_tools import run_missing
from farsight.training.runs import ReportedModel

MEASURED: tuple[Kind, ...] = ("perplexity", "needle")
"""Tools that --measure runs."""


def tool_arguments(kind: Kind, model: ReportedModel, data: Sequence[Path], lengths: Sequence[int]) -> list[str]:
    """A tool's arguments for measuring a model and writing its JSON file where the report finds it.

    Args:
        data: text for perplexity; if empty, a recipe's held-out documents.
        lengths: context lengths; if empty, 1, 2 and 4 times the trained length.
    """
    assert model.weights is not None
    wanted = [str(length) for length in lengths or [multiple * model.config.trained_length for multiple in (1, 2, 4)]]
    held_out = model.path / "held_out.txt"
    texts = [str(file) for file in data or [held_out if held_out.is_file() else Path("FILE")]]
    options: dict[Kind, list[str]] = {
        "perplexity": ["--data", *texts, "--lengths", *wanted, "--buckets", "8"],
        "needle": ["--lengths", *wanted, "--depths", "10"],
        "harness": ["--tasks", "scope_nlu"],
        "generate": ["--prompt-file", texts[0]],
    }
    return [str(model.weights), *options[kind], "--json", str(model.weights / FOLDER / f"{kind}.json")]


def command_line(kind: Kind, model: ReportedModel, data: Sequence[Path], lengths: Sequence[int]) -> str:
    """The command that measures a model, to be typed into a terminal."""
    assert model.weights is not None
    arguments = tool_arguments(kind, model, data, lengths)
    return f"mkdir -p {shlex.quote(str(model.weights / FOLDER))} && farsight {kind} {shlex.join(arguments)}"


def measure(
    models: Sequence[ReportedModel], results: Sequence[Result], data: Sequence[Path], lengths: Sequence[int]
) -> None:
    """Runs the tools for missing results, model by model; each writes its file into the model's folder. A tool that fails prints
    why, and its result stays missing."""
    for model in models:
        kinds = [kind for kind in MEASURED if model.weights is not None]
        run_missing(FOLDER, model, kinds, results, partial(tool_arguments, model=model, data=data, lengths=lengths))
