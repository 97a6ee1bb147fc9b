"""The tools whose results `farsight inside` shows, and the commands that run them."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farsight.configs.schema import NoRotary
from farsight.reports.results import Result, Source
from farsight.reports.run_tools import run_missing
from farsight.training.runs import NamedModel

FOLDER = "analysis"
"""Folder in a run or model with its results."""

MEASURED: Mapping[str, Sequence[str]] = {
    "plasticity": (),
    "geometry": (),
    "layers": (),
    "layer_probes": ("--probe", "mask"),
    "probes": (),
    "order_awareness": (),
}
"""Tools that --measure runs, with their options beside --data."""
OTHERS = ("graft_sweep",)
"""Tools whose results are only shown, as they take more than one model."""


def _kind(values: Mapping[str, Any]) -> str | None:
    tool = values.get("tool")
    name = tool.removeprefix("analysis.") if isinstance(tool, str) else ""
    return name if name in (*MEASURED, *OTHERS) else None


ANALYSIS = Source(FOLDER, _kind, ", ".join(f"farsight {name.replace('_', '-')}" for name in (*MEASURED, *OTHERS)))


def can_be_measured(kind: str, model: NamedModel) -> bool:
    """Whether the tool has something to measure; layer probes mask a layer's RoPE, so they need a layer that has one."""
    if model.weights is None:
        return False
    return kind != "layer_probes" or any(not isinstance(p.rotary, NoRotary) for p in model.config.layers())


def tool_arguments(kind: str, model: NamedModel, data: Path | None, more: Sequence[str] = ()) -> list[str]:
    """A tool's arguments for measuring a model and writing its JSON file where the report finds it.

    Args:
        data: text to measure on; None takes a recipe's held-out documents.
        more: further options, which all tools have.
    """
    assert model.weights is not None
    held_out = model.path / "held_out.txt"
    text = data or (held_out if held_out.is_file() else Path("FILE"))
    out = model.weights / FOLDER / f"{kind}.json"
    return [str(model.weights), "--data", str(text), *MEASURED[kind], *more, "--json", str(out)]


def command_line(kind: str, model: NamedModel, data: Path | None) -> str:
    """The command that measures a model, to be typed into a terminal."""
    assert model.weights is not None
    arguments = shlex.join(tool_arguments(kind, model, data))
    return f"mkdir -p {shlex.quote(str(model.weights / FOLDER))} && farsight {kind.replace('_', '-')} {arguments}"


def measure(models: Sequence[NamedModel], results: Sequence[Result], data: Path, more: Sequence[str] = ()) -> None:
    """Runs the tools for missing results, model by model; a tool that fails prints why and its result stays missing."""
    for model in models:
        kinds = [kind for kind in MEASURED if can_be_measured(kind, model)]
        run_missing(FOLDER, model, {kind: tool_arguments(kind, model, data, more) for kind in kinds}, results)
