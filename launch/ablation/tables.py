"""An ablation's figures in the form of the GARFA paper's Tables 4 and 5 and Figure 3."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Literal

from farsight.plots import GREY, PALETTE, picture

BASE = "base"
"""The row of the untuned model."""
MEAN = "mean"
"""The column with the mean of the evaluations in percent."""

Results = dict[str, dict[str, float]]
"""Figures by row and evaluation; failed ones are missing."""
Columns = Mapping[str, tuple[Literal["higher", "lower"], bool]]
"""By evaluation: whether higher or lower is better, and whether it is in percent."""


def with_means(results: Results, columns: Columns) -> Results:
    """Adds the mean of the evaluations in percent, if there are several, to rows that have all of them."""
    percent = [name for name, (_, in_percent) in columns.items() if in_percent]
    return {
        label: row
        | ({MEAN: fmean(row[name] for name in percent)} if len(percent) > 1 and {*percent} <= row.keys() else {})
        for label, row in results.items()
    }


def differences(results: Results, columns: Columns) -> dict[str, dict[str, float]]:
    """By evaluation: the first experiment minus each other one, in reverse order, and minus the base."""
    rows = with_means(results, columns)
    first, *others = sorted(label for label in rows if label != BASE)
    found: dict[str, dict[str, float]] = {}
    for name in [*columns, MEAN]:
        compared = {
            f"{first} − {label}": rows[first][name] - rows[label][name]
            for label in [*reversed(others), BASE]
            if name in rows[first] and name in rows[label]
        }
        if compared:
            found[name] = compared
    return found


def text(results: Results, columns: Columns, note: str = "") -> str:
    """Both tables as text for a terminal, with the note below."""
    return "\n\n".join(_aligned(table) for table in _tables(results, columns)) + f"\n{_legend(columns, note)}"


def markdown(results: Results, columns: Columns, note: str = "") -> str:
    """Both tables as Markdown, with the note below."""
    parts = []
    for header, *rows in _tables(results, columns):
        lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
        parts.append("\n".join("| " + " | ".join(cells) + " |" for cells in lines))
    return "\n\n".join([*parts, _legend(columns, note)]) + "\n"


def _tables(results: Results, columns: Columns) -> list[list[list[str]]]:
    """Cells of Table 4, with a row for the base and each experiment, and of Table 5, with a row for each evaluation."""
    rows, compared = with_means(results, columns), differences(results, columns)
    names = [*columns] + [MEAN] * any(MEAN in row for row in rows.values())
    labels = [BASE, *sorted((label for label in rows if label != BASE), reverse=True)]
    scores = [["", *names]]
    for label in labels:
        shown = "untuned base" if label == BASE else f"experiment {label}"
        scores.append([shown, *(_number(rows[label].get(name), columns, name) for name in names)])
    pairs = list(dict.fromkeys(pair for row in compared.values() for pair in row))
    less = [["", *pairs]]
    for name, row in compared.items():
        less.append([name, *(_number(row.get(pair), columns, name, "+") for pair in pairs)])
    return [scores, less]


def _number(value: float | None, columns: Columns, name: str, sign: str = "") -> str:
    if value is None:
        return "-"
    return format(value, f"{sign}.2f" if name == MEAN or columns[name][1] else f"{sign}.4g")


def _aligned(table: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = []
    for row in table:
        cells = [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([f"{row[0]:<{widths[0]}}", *cells]))
    return "\n".join(lines)


def _legend(columns: Columns, note: str) -> str:
    lower = [name for name, (better, _) in columns.items() if better == "lower"]
    percent = [name for name, (_, in_percent) in columns.items() if in_percent]
    parts = [f"lower is better: {', '.join(lower)}"] * bool(lower)
    parts += [f"in percent: {', '.join(percent)}"] * bool(percent)
    return "; ".join([*parts, "-: not measured", *[note] * bool(note)])


def draw(results: Results, columns: Columns, path: Path) -> None:
    """Draws grouped bars: a panel for the evaluations in percent, and one for each of the others (the paper's Figure 3)."""
    labels = [BASE, *sorted((label for label in results if label != BASE), reverse=True)]
    percent = [name for name, (_, in_percent) in columns.items() if in_percent]
    panels = [percent] * bool(percent) + [[name] for name in columns if name not in percent]
    ratios = [len(names) for names in panels]
    width = 0.8 / len(labels)
    with picture(path, 3 + 1.6 * sum(ratios), 4) as figure:
        axes = figure.subplots(1, len(panels), width_ratios=ratios, squeeze=False)[0]
        for panel, names in zip(axes, panels, strict=True):
            for number, label in enumerate(labels):
                places = [i + (number - (len(labels) - 1) / 2) * width for i in range(len(names))]
                heights = [results[label].get(name, 0.0) for name in names]
                colour = GREY if label == BASE else PALETTE[(number - 1) % len(PALETTE)]
                panel.bar(places, heights, width, label=label, color=colour)
            panel.set_xticks(range(len(names)), names)
            better = columns[names[0]][0]
            panel.set_ylabel("percent" if names == percent else f"{better} is better")
            panel.grid(False, axis="x")
        axes[0].legend()
