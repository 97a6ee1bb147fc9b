"""Checkpoints of a training in pictures and tables: their names, and the axis that they are drawn along."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from farsight.json_files import or_nan
from farsight.plots import borders, line_style, token_unit

Row = Mapping[str, Any]
"""A checkpoint's figures, with "stage", "step", "tokens" and "length" as measure_checkpoints gives them."""


def checkpoint_name(row: Row) -> str:
    """Stage and step, or the name of a listed model directory."""
    return row["stage"] if row["step"] is None else f"{row['stage']}, step {row['step']:,}"


def training_name(name: str, rows: Sequence[Row]) -> str:
    """The title of a training: the run's name, or the number of checkpoints if they were listed one by one."""
    return f"{len(rows)} checkpoints" if all(row["step"] is None for row in rows) and len(rows) > 1 else name


class Timeline:
    """The axis of a training's checkpoints: tokens trained on, or one place for each where these are unknown."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.known = all(row["tokens"] is not None for row in rows)
        unit, self.size = token_unit(rows[-1]["tokens"]) if self.known else ("", 1.0)
        self.label = f"{unit} tokens (dotted: end of a stage)" if self.known else "checkpoint"
        places = [row["tokens"] / self.size for row in rows] if self.known else list(range(len(rows)))
        stages = itertools.groupby(
            zip(places, rows, strict=True), key=lambda pair: pair[1]["stage" if self.known else "length"]
        )
        self.stages = [list(stage) for _, stage in stages]
        """Pairs of place and row, by stage; figures at different lengths can't be compared, so no line joins stages."""

    def line(self, axes: Any, key: str, label: str, colour: int) -> None:
        """Draws a figure over the checkpoints, in a line for each stage."""
        for number, stage in enumerate(self.stages):
            points = [place for place, _ in stage], [or_nan(row[key]) for _, row in stage]
            axes.plot(*points, **line_style(colour), label=None if number else label)

    def finish(self, panels: Sequence[Any]) -> None:
        """Marks the ends of stages in panels above each other, names stages at the top and the axis below the last panel."""
        middles = [(stage[0][0] + stage[-1][0]) / 2 for stage in self.stages]
        for panel in panels:
            ends = [before[-1][0] for before in self.stages[:-1]]
            borders(panel, ends if self.known else [end + 0.5 for end in ends])
        for middle, stage in zip(middles, self.stages, strict=True):
            row = stage[0][1]
            panels[0].annotate(
                f"{row['stage']} ({row['length']:,})" if self.known else f"{row['length']:,} tokens",
                (middle, 1.02),
                xycoords=("data", "axes fraction"),
                ha="center",
                fontsize="x-small",
            )
        if not self.known:
            names = [checkpoint_name(row) for row in self.rows]
            panels[-1].set_xticks(range(len(names)), names, rotation=45, ha="right")
        panels[-1].set_xlabel(self.label)
