"""The commands that measure what `farsight report` shows."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from farsight.reports.report.collect import FOLDER
from farsight.reports.report.sections import SECTIONS
from farsight.reports.results import Result
from farsight.reports.run_tools import run_missing
from farsight.reports.tool_section import ToolSection
from farsight.training.runs import NamedModel


def tool_arguments(tool: ToolSection, model: NamedModel, data: Sequence[Path], lengths: Sequence[int]) -> list[str]:
    """A tool's arguments for measuring a model and writing its JSON file where the report finds it.

    Args:
        data: text to measure on; if empty, a recipe's held-out documents.
        lengths: context lengths; if empty, 1, 2 and 4 times the trained length.
    """
    assert model.weights is not None
    wanted = [str(length) for length in lengths or [multiple * model.config.trained_length for multiple in (1, 2, 4)]]
    held_out = model.path / "held_out.txt"
    texts = [str(file) for file in data or [held_out if held_out.is_file() else Path("FILE")]]
    out = model.weights / FOLDER / f"{tool.command}.json"
    return [str(model.weights), *tool.arguments(texts, wanted), "--json", str(out)]


def command_line(tool: ToolSection, model: NamedModel, data: Sequence[Path], lengths: Sequence[int]) -> str:
    """The command that measures a model, to be typed into a terminal."""
    assert model.weights is not None
    arguments = shlex.join(tool_arguments(tool, model, data, lengths))
    return f"mkdir -p {shlex.quote(str(model.weights / FOLDER))} && farsight {tool.command} {arguments}"


def measure(
    models: Sequence[NamedModel], results: Sequence[Result], data: Sequence[Path], lengths: Sequence[int]
) -> None:
    """Runs the tools for missing results, model by model; each writes its file into the model's folder. A tool that fails prints
    why, and its result stays missing."""
    for model in models:
        tools = [tool for tool in SECTIONS if tool.measured and model.weights is not None]
        arguments = {tool.command: tool_arguments(tool, model, data, lengths) for tool in tools}
        run_missing(FOLDER, model, arguments, results)
