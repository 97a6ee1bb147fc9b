"""The report's section on retrieval from the context, from `farsight needle`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from farsight.reports.charts import Axis, Mark, Series, heat_map, length_axis, short_tokens
from farsight.reports.page import folded, heading, line_figure, note, panels, table
from farsight.reports.results import Result, labelled
from farsight.reports.tools import Tool


@dataclass(frozen=True)
class Needles:
    """One reading of a result: with scopes as trained, or with grown scopes."""

    name: str
    number: int
    grown: bool
    cells: dict[tuple[int, float | None], dict[str, Any]]
    """By length and depth."""
    mean: float
    trained_length: int

    @property
    def lengths(self) -> list[int]:
        return sorted({length for length, _ in self.cells})


def show(results: Sequence[Result]) -> list[Markup]:
    """A heat map of each reading for tasks with depths; lines over length for tasks without."""
    parts = [
        note(
            "The answer is hidden in a long text at some depth: 0 % is its start, 100 % its end, where the question is asked. "
            "Figures are percentages of correct trials. `evals.needle` describes the tasks."
        )
    ]
    for task in dict.fromkeys(_task_of(result) for result in results):
        readings = _readings([result for result in results if _task_of(result) == task])
        parts.append(heading(task))
        if any(depth is None for reading in readings for _, depth in reading.cells):
            parts.append(_over_length(readings))
        else:
            parts.append(panels(map(_needle_map, readings)))
            parts.append(folded("The same in numbers", *map(_needle_table, readings)))
    return parts


def _task_of(result: Result) -> str:
    return result.values.get("task", "needle")


def _readings(results: Sequence[Result]) -> list[Needles]:
    readings = []
    for result, name, number in labelled(results):
        values = result.values
        for grown in (False, True):
            end = "_scope_length" * grown
            if f"cells{end}" in values:
                cells = {(cell["length"], cell["depth"]): cell for cell in values[f"cells{end}"]}
                length = values.get("trained_length", result.model.config.trained_length)
                said = name + ", scopes grown" * grown
                readings.append(Needles(said, number, grown, cells, values[f"mean{end}"], length))
    return readings


def _needle_map(needles: Needles) -> tuple[str, Markup, str]:
    """Name, heat map and caption."""
    lengths = needles.lengths
    depths = sorted({depth for _, depth in needles.cells if depth is not None})
    shares = {
        (lengths.index(length), depths.index(depth)): cell["accuracy"]
        for (length, depth), cell in needles.cells.items()
        if depth is not None
    }

    def hover(column: int, row: int) -> str:
        where = f"{needles.name}\n{lengths[column]:,} tokens, depth {_depth(depths[row])}"
        return f"{where}: {_found(needles.cells.get((lengths[column], depths[row])))}"

    picture = heat_map(
        [short_tokens(length) for length in lengths],
        [_depth(depth) for depth in depths],
        shares,
        hover,
        ("context length in tokens", "depth"),
        sum(length <= needles.trained_length for length in lengths),
    )
    trials = sorted({cell["trials"] for cell in needles.cells.values()})
    each = f"{trials[0]:,}" if len(trials) == 1 else f"{trials[0]:,} to {trials[-1]:,}"
    caption = f"Mean {_percent(needles.mean)}, {each} trials a cell. Trained on {needles.trained_length:,} tokens."
    return needles.name, picture, caption


def _needle_table(needles: Needles) -> Markup:
    depths = sorted({depth for _, depth in needles.cells if depth is not None})
    rows = [
        [_depth(depth), *(_percent_of(needles.cells.get((length, depth))) for length in needles.lengths)]
        for depth in depths
    ]
    header = ["depth", *(f"{length:,}" for length in needles.lengths)]
    return table(header, rows, f"{needles.name}: accuracy in percent by depth and context length in tokens.")


def _over_length(readings: Sequence[Needles]) -> Markup:
    """Accuracy over length, with a line for each reading."""
    lines = [
        Series(
            n.name,
            [(length, 100 * n.cells[length, None]["accuracy"]) for length in n.lengths],
            n.number,
            dashed=n.grown,
        )
        for n in readings
    ]
    trained = sorted({n.trained_length for n in readings})
    trials = {(n.name, length): n.cells[length, None]["trials"] for n in readings for length in n.lengths}
    return line_figure(
        lines,
        length_axis([*(length for n in readings for length in n.lengths), *trained]),
        Axis("accuracy in percent", say="{:.1f}".format, ends=(0, 100)),
        ("Dotted: the trained length.", "Accuracy in percent by context length."),
        [Mark(length, "trained") for length in trained],
        lambda line, length: f" of {trials[line.name, int(length)]:,} trials",
        [["mean", *(f"{100 * n.mean:.1f}" for n in readings)]],
    )


def _depth(depth: float) -> str:
    return f"{100 * depth:.3g} %"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _percent_of(cell: dict[str, Any] | None) -> str:
    return "–" if cell is None else f"{100 * cell['accuracy']:.1f}"


def _found(cell: dict[str, Any] | None) -> str:
    return "not measured" if cell is None else f"{_percent(cell['accuracy'])} of {cell['trials']:,} trials"


def _is_needle(values: Mapping[str, Any]) -> bool:
    match values:
        case {"cells": list(cells), "mean": float() | int()} if cells:
            return all(map(_is_cell, cells))
    return False


def _is_cell(value: Any) -> bool:
    match value:
        case {"length": int(), "depth": None | int() | float(), "accuracy": int() | float()}:
            return True
    return False


NEEDLE = Tool(
    command="needle",
    heading="Needles",
    is_result=_is_needle,
    show=show,
    arguments=lambda _, lengths: ["--lengths", *lengths, "--depths", "10"],
    measured=True,
)
