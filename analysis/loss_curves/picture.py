"""The picture of farsight loss-curves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farsight.plots import borders, line_style, picture, token_unit
from farsight.training.metrics_file import smoothed


def draw(curves: Sequence[dict[str, Any]], smooth: int, path: Path) -> None:
    """Writes the picture (PNG, SVG or PDF): the whole training, and its second half enlarged."""
    with picture(path, 10, 4) as figure:
        whole, later = figure.subplots(1, 2)
        end = max(curve["training"][-1][0] for curve in curves)
        unit, size = token_unit(end)
        half = end / 2
        for number, curve in enumerate(curves):
            style = line_style(number)
            for axes, start in ((whole, 0.0), (later, half)):
                points, marks = (
                    [(tokens / size, loss) for tokens, loss in line if tokens >= start]
                    for line in (smoothed(curve["training"], smooth), curve["held_out"])
                )
                if points:
                    axes.plot(*zip(*points, strict=True), color=style["color"], linewidth=1.3, label=curve["name"])
                if marks:
                    axes.plot(*zip(*marks, strict=True), **{**style, "linestyle": ""})
        for axes, title in ((whole, "whole training"), (later, "second half")):
            axes.set(xlabel=f"{unit} tokens (markers: held out)", ylabel="loss, nats per token", title=title)
            borders(axes, {end / size for curve in curves for end in curve["stages"][:-1]})
        later.set_xlim(left=half / size)
        whole.legend()
