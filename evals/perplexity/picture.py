"""Draws perplexity over context length and, where it was measured, over position."""

import itertools
import math
from pathlib import Path
from typing import Any

from farsight.outputs import short_names
from farsight.plots import GREY, legend_below, length_ticks, line_style, log_if_wide, picture

_MOST_RATIO = 20
"""Largest ratio of highest to lowest perplexity on a linear scale; beyond it, the scale is logarithmic."""


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Writes the picture (PNG, SVG or PDF): one line for each model, and a dashed, hollow one for its grown scopes."""
    by_position = any("log_buckets" in figures for figures in results.values())
    columns = 1 + by_position
    lengths = sorted({int(length) for figures in results.values() for length in figures["lengths"]})
    with picture(path, 6 * columns, 4.4 + 0.24 * math.ceil(2 * len(results) / columns)) as figure:
        left, *others = figure.subplots(1, columns, squeeze=False)[0]
        for number, (name, figures) in enumerate(zip(short_names(results), results.values(), strict=True)):
            for reading, note in (("", ""), ("_scope_length", ", scopes grown")):
                if f"lengths{reading}" not in figures:
                    continue
                style = line_style(number, hollow=bool(reading))
                measured = figures[f"lengths{reading}"]
                left.plot([int(length) for length in measured], list(measured.values()), **style, label=name + note)
                if f"log_buckets{reading}" in figures:
                    _, parts = max(figures[f"log_buckets{reading}"].items(), key=lambda item: int(item[0]))
                    middles = [math.sqrt(a * (b - 1)) for a, b in itertools.pairwise(parts["edges"])]
                    others[0].plot(middles, parts["perplexity"], **style, markersize=3)
        length_ticks(left, lengths)
        stride = next(iter(results.values())).get("stride")
        counted = f"all tokens, windows {stride:,} apart" if stride else "last 256 tokens of a window"
        left.set(xlabel="context length in tokens (dotted: trained)", ylabel="perplexity", title=counted)
        for right in others:
            right.set_xscale("log", base=2)
            right.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
            xlabel = "tokens before the predicted one (dotted: trained length)"
            right.set(xlabel=xlabel, ylabel="perplexity", title=f"all tokens of a window of {lengths[-1]:,}")
        trained = [figures["trained_length"] for figures in results.values()]
        for panel in (left, *others):
            log_if_wide(panel, [value for line in panel.get_lines() for value in line.get_ydata()], _MOST_RATIO)
            for number, length in enumerate(trained):
                colour = line_style(number)["color"] if len(set(trained)) > 1 else GREY
                panel.axvline(length, color=colour, linestyle=":", linewidth=1.2)
        legend_below(figure, columns, left)
