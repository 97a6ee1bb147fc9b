"""The report's section on retrieval from the context, from `farsight needle`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import Element

from farsight.reports.page import Part, figure, folded, note, section, table, tag
from farsight.reports.results import Result, line_numbers, names
from farsight.reports.svg_axes import length_axis, linear_axis, short_tokens
from farsight.reports.svg_charts import Mark, Series, heat_map, heat_map_scale, legend, line_chart
from farsight.reports.tool_section import ToolSection


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


def needle_section(results: Sequence[Result], absent: Sequence[Part]) -> Element:
    """A heat map of each reading for tasks with depths; lines over length for tasks without."""
    if not results:
        return section("Needles", *absent)
    parts: list[Part] = [
        note(
            "The answer is hidden in a long text at some depth: 0 % is its start, 100 % its end, where the question is asked. "
            "Figures are percentages of correct trials. ", tag("code", "evals.needle"), " describes the tasks."
        )
    ]  # fmt: skip
    for task in dict.fromkeys(_task_of(result) for result in results):
        readings = _readings([result for result in results if _task_of(result) == task])
        parts.append(tag("h3", task))
        if any(depth is None for reading in readings for _, depth in reading.cells):
            parts += _over_length(readings)
        else:
            parts += [heat_map_scale(), tag("div", *map(_needle_panel, readings), class_="panels")]
            parts.append(folded("The same in numbers", *map(_needle_table, readings)))
    return section("Needles", *parts, *absent)


def _task_of(result: Result) -> str:
    return result.values.get("task", "needle")


def _readings(results: Sequence[Result]) -> list[Needles]:
    readings = []
    for result, name, number in zip(results, names(results), line_numbers(results), strict=True):
        values = result.values
        for grown in (False, True):
            end = "_scope_length" * grown
            if f"cells{end}" in values:
                cells = {(cell["length"], cell["depth"]): cell for cell in values[f"cells{end}"]}
                length = values.get("trained_length", result.model.config.trained_length)
                said = name + ", scopes grown" * grown
                readings.append(Needles(said, number, grown, cells, values[f"mean{end}"], length))
    return readings


def _needle_panel(needles: Needles) -> Element:
    lengths = needles.lengths
    depths = sorted({depth for _, depth in needles.cells if depth is not None})
    places = [_depth(depth) for depth in depths]
    shares = {
        (column, row): needles.cells[length, depth]["accuracy"]
        for column, length in enumerate(lengths)
        for row, depth in enumerate(depths)
        if (length, depth) in needles.cells
    }

    def hover(column: int, row: int) -> str:
        where = f"{needles.name}\n{lengths[column]:,} tokens, depth {places[row]}"
        return f"{where}: {_found(needles.cells.get((lengths[column], depths[row])))}"

    picture = heat_map(
        [short_tokens(length) for length in lengths],
        places,
        shares,
        hover,
        ("context length in tokens", "depth"),
        sum(length <= needles.trained_length for length in lengths),
    )
    trials = sorted({cell["trials"] for cell in needles.cells.values()})
    each = f"{trials[0]:,}" if len(trials) == 1 else f"{trials[0]:,} to {trials[-1]:,}"
    caption = f"Mean {_percent(needles.mean)}, {each} trials a cell. Trained on {needles.trained_length:,} tokens."
    return tag("div", tag("h4", needles.name), figure(picture, caption))


def _needle_table(needles: Needles) -> Element:
    depths = sorted({depth for _, depth in needles.cells if depth is not None})
    rows: list[list[Part]] = [
        [_depth(depth), *(_percent_of(needles.cells.get((length, depth))) for length in needles.lengths)]
        for depth in depths
    ]
    header = ["depth", *(f"{length:,}" for length in needles.lengths)]
    return table(header, rows, f"{needles.name}: accuracy in percent by depth and context length in tokens.")


def _over_length(readings: Sequence[Needles]) -> list[Part]:
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
    lengths = sorted({length for n in readings for length in n.lengths})
    trained = sorted({n.trained_length for n in readings})
    says = {
        (line.name, length): _found(n.cells[length, None])
        for line, n in zip(lines, readings, strict=True)
        for length in n.lengths
    }
    chart = line_chart(
        lines,
        length_axis([*lengths, *trained]),
        linear_axis([0.0, 100.0], "accuracy in percent"),
        lambda s, x, y: f"{s.name}\n{x:,.0f} tokens: {says[s.name, int(x)]}",
        [Mark(length, "trained") for length in trained],
    )
    rows: list[list[Part]] = [
        [f"{length:,}", *(_percent_of(n.cells.get((length, None))) for n in readings)] for length in lengths
    ]
    rows.append(["mean", *(f"{100 * n.mean:.1f}" for n in readings)])
    header = ["tokens", *(line.name for line in lines)]
    return [
        legend(lines),
        figure(chart, "Dotted: the trained length.", table(header, rows, "Accuracy in percent by context length.")),
    ]


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


NEEDLE = ToolSection(
    command="needle",
    is_result=_is_needle,
    arguments=lambda _, lengths: ["--lengths", *lengths, "--depths", "10"],
    render=needle_section,
    measured=True,
)
