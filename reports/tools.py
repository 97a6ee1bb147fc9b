"""The commands whose results a page shows, a section each, and how a page runs them for what is missing."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from farsight.commands import run
from farsight.launch.recipe.held_out import held_out_file
from farsight.remote import shown, url_of
from farsight.reports.page import missing, section
from farsight.reports.results import Result, of_kind
from farsight.training.runs import NamedModel


@dataclass(frozen=True)
class Tool:
    """A command, and the section with its results."""

    command: str
    heading: str
    is_result: Callable[[Mapping[str, Any]], bool]
    """Whether a JSON object is a result of the command."""
    show: Callable[[Sequence[Result]], Sequence[Markup]]
    """The section's parts, from one or more results."""
    arguments: Callable[[list[str], list[str]], list[str]] | None = None
    """From text files and context lengths, the command's arguments between the model and --json. None: the command takes several
    models, so pages show only what is there."""
    measured: bool = False
    """Whether `--measure` runs the command for models without a result."""
    fits: Callable[[NamedModel], bool] = lambda _: True
    """Whether a model with weights has something to measure."""
    folder: str = "evals"
    """Folder in a run or model with its results."""

    @property
    def kind(self) -> str:
        """Kind of its results, and name of its file in a model."""
        return self.command.replace("-", "_")

    def section(
        self,
        models: Sequence[NamedModel],
        results: Sequence[Result],
        data: Sequence[Path],
        lengths: Sequence[int] = (),
        before: Sequence[Markup] = (),
    ) -> list[Markup]:
        """The section with the command's results, if there are any, and the command for models without one.

        Args:
            models: those that the command should be shown for.
            data, lengths: used in the command.
            before: parts to show before the results.
        """
        found = of_kind(results, self.kind)
        measured = {result.model.number for result in found}
        without = [
            model
            for model in models
            if model.number not in measured and model.weights and self.arguments and self.fits(model)
        ]
        parts = [*before, *(self.show(found) if found else ())]
        if without:
            commands = [self.command_line(model, data, lengths) for model in without]
            parts.append(missing(f"Not measured: {', '.join(model.name for model in without)}.", commands))
        return [section(self.heading, *parts)] if parts else []

    def arguments_for(
        self, model: NamedModel, data: Sequence[Path], lengths: Sequence[int] = (), more: Sequence[str] = ()
    ) -> list[str]:
        """The command's arguments for measuring a model and writing its JSON file where pages find it.

        Args:
            data: texts to measure on; if empty, a recipe's held-out documents.
            lengths: context lengths; if empty, 1, 2 and 4 times the trained length.
            more: further options.
        """
        assert model.weights is not None
        assert self.arguments is not None
        wanted = lengths or [multiple * model.config.trained_length for multiple in (1, 2, 4)]
        texts = data or [next(filter(None, map(held_out_file, model.places)), Path("FILE"))]
        # Beside a place's local copy, a result would lie in a cache.
        folder = Path() if url_of(shown(model.weights)) else model.weights / self.folder
        out = folder / f"{self.kind}.json"
        own = self.arguments([str(file) for file in texts], [str(length) for length in wanted])
        return [shown(model.weights), *own, *more, "--json", str(out)]

    def command_line(self, model: NamedModel, data: Sequence[Path], lengths: Sequence[int] = ()) -> str:
        """The command that measures a model, to be typed into a terminal."""
        assert model.weights is not None
        arguments = shlex.join(self.arguments_for(model, data, lengths))
        return f"mkdir -p {shlex.quote(str(model.weights / self.folder))} && farsight {self.command} {arguments}"

    def measure(
        self, model: NamedModel, data: Sequence[Path], lengths: Sequence[int] = (), more: Sequence[str] = ()
    ) -> None:
        """Runs the command, which writes its file into the model's folder.

        A command that fails prints why. The page is made anyway and names what it lacks.
        """
        assert model.weights is not None
        if place := url_of(shown(model.weights)):
            print(
                f"{model.name}: {self.kind} was not measured: results lie beside models, so pull {place} first.",
                file=sys.stderr,
            )
            return
        try:
            (model.weights / self.folder).mkdir(exist_ok=True)
            run(self.command, self.arguments_for(model, data, lengths, more))
        except SystemExit:  # the tool has printed why
            print(f"{model.name}: {self.kind} was not measured, for the reason above.", file=sys.stderr)
        except (OSError, ValueError) as error:
            print(f"{model.name}: {self.kind} was not measured: {error}", file=sys.stderr)


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number; true and false are not."""
    return type(value) in (int, float)
