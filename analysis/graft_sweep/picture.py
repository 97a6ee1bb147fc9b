"""The picture of farsight graft-sweep: figures of grafts by the depth of the cut (LASP paper, Figure 4)."""

import math
from pathlib import Path
from typing import Any

from farsight.outputs import model_style

_MOST_RATIO = 10
"""Highest perplexity over lowest beyond which the axis is logarithmic."""

_FRONT = {"B-Front": "base", "L-Front": "long"}
"""The model that gives each mode its colour: the one of the front layers."""


def draw(figures: dict[str, Any], path: Path) -> None:
    """Writes the picture (PNG, SVG or PDF): a column per length, with perplexity above and passkeys below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [key for key in ("perplexity", "passkey") if key in figures["plain"]["base"]]
    columns = max(len(figures["plain"]["base"][key]) for key in rows)
    size = 1.6 + 3.4 * columns, 0.8 + 3.2 * len(rows)
    figure, panels = plt.subplots(len(rows), columns, figsize=size, layout="constrained", squeeze=False, sharex=True)
    for row, key in enumerate(rows):
        lengths = list(figures["plain"]["base"][key])
        for column in range(columns):
            panel = panels[row, column]
            if column >= len(lengths):
                panel.set_axis_off()
                continue
            _panel(panel, figures, key, lengths[column])
            trained = [name for name, length in figures["trained_length"].items() if str(length) == lengths[column]]
            note = f" ({' and '.join(trained)} trained)" if trained else ""
            panel.set_title(f"{int(lengths[column]):,} tokens{note}", fontsize="medium")
        panels[row, 0].set_ylabel(key if key == "perplexity" else "passkeys found, %")
    for panel in panels[-1]:
        panel.set_xlabel("front layers, l")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _panel(panel: Any, figures: dict[str, Any], key: str, length: str) -> None:
    drawn: list[float] = []

    def value(of: dict[str, Any]) -> float:
        found = of[key][length]
        drawn.append(math.nan if found is None else found * (100 if key == "passkey" else 1))
        return drawn[-1]

    names = ("base", "long")
    for mode, first in _FRONT.items():
        points = figures["modes"][mode]
        other = names[1 - names.index(first)]
        label = f"{mode}: first l layers {first}, others {other}"
        style = model_style(names.index(first))
        panel.plot([point["depth"] for point in points], [value(point) for point in points], **style, label=label)
    for number, name in enumerate(names):
        colour = model_style(number)["color"]
        panel.axhline(value(figures["plain"][name]), color=colour, linestyle="--", linewidth=1.2, label=f"{name} model")
    panel.grid(alpha=0.3)
    panel.set_xticks(_ticks(figures["depths"]))
    if key == "passkey":
        panel.set_ylim(-4, 104)
    elif max(known := [x for x in drawn if math.isfinite(x)], default=0) > _MOST_RATIO * min(known, default=1):
        panel.set_yscale("log")


def _ticks(depths: list[int]) -> list[int]:
    """At most nine of the depths, for which there is room."""
    return depths[:: math.ceil(len(depths) / 9)]
