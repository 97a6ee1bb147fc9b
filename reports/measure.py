"""How the figures of a report are measured: the commands of our tools, to be read or to be run."""

import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from farsight.commands import run
from farsight.reports.results import FOLDER, Kind, Result, of_kind
from farsight.training.runs import ReportedModel

K = TypeVar("K", bound=str)

MEASURED: tuple[Kind, ...] = ("perplexity", "needle")
"""What `--measure` runs."""


def tool_arguments(kind: Kind, model: ReportedModel, data: Sequence[Path], lengths: Sequence[int]) -> list[str]:
    """What a tool is given to measure a model, and to write its JSON file where the report finds it.

    Args:
        data: text for perplexity; without any, a recipe's held-out documents.
        lengths: none stands for 1, 2 and 4 times the trained length.
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
    """The same for a terminal."""
    assert model.weights is not None
    arguments = tool_arguments(kind, model, data, lengths)
    return f"mkdir -p {shlex.quote(str(model.weights / FOLDER))} && farsight {kind} {shlex.join(arguments)}"


def measure(
    models: Sequence[ReportedModel], results: Sequence[Result], data: Sequence[Path], lengths: Sequence[int]
) -> None:
    """Runs the tools for what has no result yet, model by model; each writes its file into the model's folder; what
    fails is said and left out."""
    for model in models:
        kinds = [kind for kind in MEASURED if model.weights is not None]
        run_missing(FOLDER, model, kinds, results, partial(tool_arguments, model=model, data=data, lengths=lengths))


def run_missing(
    folder: str,
    model: ReportedModel,
    kinds: Sequence[K],
    results: Sequence[Result],
    arguments: Callable[[K], list[str]],
) -> None:
    """Runs the tools of these kinds where the model has no result of them; what fails is said and left out.

    Args:
        folder: of the model, for their results.
        arguments: what a kind's tool is given.
    """
    for kind in kinds:
        if any(result.model is model for result in of_kind(results, kind)):
            continue
        assert model.weights is not None
        try:
            (model.weights / folder).mkdir(exist_ok=True)
            # A tool brings what it needs alone: imported when it runs.
            run(kind.replace("_", "-"), arguments(kind))
        # The page is made all the same, and says what it lacks.
        except SystemExit:  # the tool has printed why
            print(f"{model.name}: {kind} was not measured, for the reason above.", file=sys.stderr)
        except (OSError, ValueError) as error:
            print(f"{model.name}: {kind} was not measured: {error}", file=sys.stderr)
