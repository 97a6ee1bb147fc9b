"""The commands whose results a page shows, a section each, and how a page runs them for what is missing."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from farsight.commands import run
from farsight.reports.page import missing, section
from farsight.reports.results import Result, Source, collect_from, of_kind
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

    @property
    def kind(self) -> str:
        """Kind of its results, and name of its file in a model."""
        return self.command.replace("-", "_")


@dataclass(frozen=True)
class Tools:
    """The commands of one page, in the page's order."""

    folder: str
    """Folder in a run or model with their results."""
    all: tuple[Tool, ...]

    def collect(self, models: Sequence[NamedModel], named: Sequence[Path]) -> list[Result]:
        """The results in the models' folders for them, and in the named files.

        Raises:
            ConfigError: a file that cannot be read, or a named file without a result of these models.
        """
        names = [f"farsight {tool.command}" for tool in self.all]
        source = Source(self.folder, self._kind_of, f"{', '.join(names[:-1])} or {names[-1]}")
        return collect_from(source, models, named)

    def _kind_of(self, values: Mapping[str, Any]) -> str | None:
        return next((tool.kind for tool in self.all if tool.is_result(values)), None)

    def sections(
        self,
        models: Sequence[NamedModel],
        results: Sequence[Result],
        data: Sequence[Path],
        lengths: Sequence[int] = (),
        before: Mapping[str, Sequence[Markup]] | None = None,
    ) -> list[Markup]:
        """The section of each command, with the commands that measure what is missing.

        Args:
            data, lengths: used in the commands.
            before: parts to show before a command's results, by command.
        """
        sections = []
        for tool in self.all:
            found = of_kind(results, tool.kind)
            measured = {result.model.number for result in found}
            without = [
                model
                for model in models
                if model.number not in measured and model.weights and tool.arguments and tool.fits(model)
            ]
            parts = [*(before or {}).get(tool.command, ()), *(tool.show(found) if found else ())]
            if without:
                commands = [self.command_line(tool, model, data, lengths) for model in without]
                parts.append(missing(f"Not measured: {', '.join(model.name for model in without)}.", commands))
            if parts:
                sections.append(section(tool.heading, *parts))
        return sections

    def arguments(
        self, tool: Tool, model: NamedModel, data: Sequence[Path], lengths: Sequence[int] = (), more: Sequence[str] = ()
    ) -> list[str]:
        """A command's arguments for measuring a model and writing its JSON file where the page finds it.

        Args:
            data: texts to measure on; if empty, a recipe's held-out documents.
            lengths: context lengths; if empty, 1, 2 and 4 times the trained length.
            more: further options.
        """
        assert model.weights is not None
        assert tool.arguments is not None
        wanted = lengths or [multiple * model.config.trained_length for multiple in (1, 2, 4)]
        held_out = model.path / "held_out.txt"
        texts = data or [held_out if held_out.is_file() else Path("FILE")]
        out = model.weights / self.folder / f"{tool.kind}.json"
        own = tool.arguments([str(file) for file in texts], [str(length) for length in wanted])
        return [str(model.weights), *own, *more, "--json", str(out)]

    def command_line(self, tool: Tool, model: NamedModel, data: Sequence[Path], lengths: Sequence[int] = ()) -> str:
        """The command that measures a model, to be typed into a terminal."""
        assert model.weights is not None
        arguments = shlex.join(self.arguments(tool, model, data, lengths))
        return f"mkdir -p {shlex.quote(str(model.weights / self.folder))} && farsight {tool.command} {arguments}"

    def measure(
        self,
        models: Sequence[NamedModel],
        results: Sequence[Result],
        data: Sequence[Path],
        lengths: Sequence[int] = (),
        more: Sequence[str] = (),
    ) -> None:
        """Runs the commands for missing results, model by model; each writes its file into the model's folder.

        A command that fails prints why. The page is made anyway and names what it lacks.
        """
        for model in models:
            known = {result.kind for result in results if result.model is model}
            for tool in self.all:
                if not tool.measured or tool.kind in known or model.weights is None or not tool.fits(model):
                    continue
                try:
                    (model.weights / self.folder).mkdir(exist_ok=True)
                    run(tool.command, self.arguments(tool, model, data, lengths, more))
                except SystemExit:  # the tool has printed why
                    print(f"{model.name}: {tool.kind} was not measured, for the reason above.", file=sys.stderr)
                except (OSError, ValueError) as error:
                    print(f"{model.name}: {tool.kind} was not measured: {error}", file=sys.stderr)


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number; true and false are not."""
    return type(value) in (int, float)
