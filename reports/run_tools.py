"""Runs the commands that measure what a report lacks."""

import sys
from collections.abc import Mapping, Sequence

from farsight.commands import run
from farsight.reports.results import Result, of_kind
from farsight.training.runs import NamedModel


def run_missing(folder: str, model: NamedModel, arguments: Mapping[str, list[str]], results: Sequence[Result]) -> None:
    """Runs the tools whose results a model lacks. A tool that fails prints why, and its result stays missing.

    Args:
        folder: the model's folder for results.
        arguments: command line of each tool to run, by the kind of its results.
    """
    for kind, given in arguments.items():
        if any(result.model is model for result in of_kind(results, kind)):
            continue
        assert model.weights is not None
        try:
            (model.weights / folder).mkdir(exist_ok=True)
            run(kind.replace("_", "-"), given)
        # The page is made anyway and names what it lacks.
        except SystemExit:  # the tool has printed why
            print(f"{model.name}: {kind} was not measured, for the reason above.", file=sys.stderr)
        except (OSError, ValueError) as error:
            print(f"{model.name}: {kind} was not measured: {error}", file=sys.stderr)
