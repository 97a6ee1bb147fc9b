"""The picture of farsight graft-sweep: figures of grafts by the depth of the cut (LASP paper, Figure 4)."""

import math
from pathlib import Path
from typing import Any

from farsight.json_files import or_nan
from farsight.plots import legend_below, line_style, log_if_wide, picture

_MOST_RATIO = 10
"""Highest perplexity over lowest beyond which the axis is logarithmic."""

_FRONT = {"B-Front": "base", "L-Front": "long"}
"""The model that gives each mode its colour: the one of the front layers."""


def draw(figures: dict[str, Any], path: Path) -> None:
    """Writes the picture (PNG, SVG or PDF): a column per length, with perplexity above and passkeys below."""
    plain = figures["plain"]["base"]
    rows = [key for key in ("perplexity", "passkey") if key in plain]
    columns = max(len(plain[key]) for key in rows)
    with picture(path, 1.6 + 3.4 * columns, 0.8 + 3.2 * len(rows)) as figure:
        panels = figure.subplots(len(rows), columns, squeeze=False, sharex=True)
        for line, key in zip(panels, rows, strict=True):
            for panel in line[len(plain[key]) :]:
                panel.set_axis_off()
            for panel, length in zip(line, plain[key], strict=False):
                _panel(panel, figures, key, length)
                trained = [name for name, own in figures["trained_length"].items() if str(own) == length]
                note = f" ({' and '.join(trained)} trained)" if trained else ""
                panel.set_title(f"{int(length):,} tokens{note}")
            line[0].set_ylabel(key if key == "perplexity" else "passkeys found, %")
        for column in zip(*panels, strict=True):
            lowest = [panel for panel in column if panel.axison][-1]
            lowest.set_xlabel("front layers, l")
            lowest.tick_params(labelbottom=True)  # a panel below that has no length hides them
        legend_below(figure, 2, panels[0, 0])


def _panel(panel: Any, figures: dict[str, Any], key: str, length: str) -> None:
    drawn: list[float] = []

    def value(of: dict[str, Any]) -> float:
        drawn.append(or_nan(of[key][length]) * (100 if key == "passkey" else 1))
        return drawn[-1]

    names = ("base", "long")
    for mode, first in _FRONT.items():
        points = figures["modes"][mode]
        other = names[1 - names.index(first)]
        label = f"{mode}: first l layers {first}, others {other}"
        style = line_style(names.index(first))
        panel.plot([point["depth"] for point in points], [value(point) for point in points], **style, label=label)
    for number, name in enumerate(names):
        colour = line_style(number)["color"]
        panel.axhline(value(figures["plain"][name]), color=colour, linestyle="--", linewidth=1.2, label=f"{name} model")
    depths = figures["depths"]
    panel.set_xticks(depths[:: math.ceil(len(depths) / 9)])  # there is room for nine
    if key == "passkey":
        panel.set_ylim(-4, 104)
    else:
        log_if_wide(panel, drawn, _MOST_RATIO)
