"""Draws perplexity over context length and, where it was measured, over position."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farsight.outputs import model_style, short_names

_MOST_RATIO = 20
"""Largest ratio of highest to lowest perplexity on a linear scale; beyond it, the scale is logarithmic."""


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Writes the picture (PNG, SVG or PDF): one line for each model, and a dashed, hollow one for its grown scopes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    by_position = any("log_buckets" in figures for figures in results.values())
    size = 6 + 6 * by_position, 4.4 + 0.24 * math.ceil(2 * len(results) / (1 + by_position))
    figure, panels = plt.subplots(1, 1 + by_position, figsize=size, layout="constrained", squeeze=False)
    left, right = panels[0, 0], panels[0, -1]
    for number, (name, figures) in enumerate(zip(short_names(results), results.values(), strict=True)):
        for reading, note in (("", ""), ("_scope_length", ", scopes grown")):
            if f"lengths{reading}" not in figures:
                continue
            style = model_style(number, grown=bool(reading))
            measured = figures[f"lengths{reading}"]
            left.plot([int(length) for length in measured], list(measured.values()), **style, label=name + note)
            if f"log_buckets{reading}" in figures:
                _, parts = max(figures[f"log_buckets{reading}"].items(), key=lambda item: int(item[0]))
                middles = [math.sqrt(a * (b - 1)) for a, b in itertools.pairwise(parts["edges"])]
                right.plot(middles, parts["perplexity"], **{**style, "markersize": 3})
    lengths = sorted({int(length) for figures in results.values() for length in figures["lengths"]})
    _mark_trained(panels[0], list(results.values()))
    for panel in panels[0]:
        panel.set_xscale("log", base=2)
        panel.grid(alpha=0.3)
        values = [value for line in panel.get_lines() for value in line.get_ydata() if line.get_marker() != "None"]
        if max(values) > _MOST_RATIO * min(values):
            panel.set_yscale("log")
    left.set_xticks(lengths, [f"{length:,}" for length in lengths])
    left.minorticks_off()
    stride = next(iter(results.values())).get("stride")
    counted = f"all tokens, windows {stride:,} apart" if stride else "last 256 tokens of a window"
    left.set(xlabel="context length in tokens (dotted: trained)", ylabel="perplexity", title=counted)
    if by_position:
        right.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        right.set(
            xlabel="tokens before the predicted one (dotted: trained length)",
            ylabel="perplexity",
            title=f"all tokens of a window of {lengths[-1]:,}",
        )
    figure.legend(loc="outside lower center", ncols=1 + by_position, fontsize="small", frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _mark_trained(panels: Sequence[Any], results: Sequence[dict[str, Any]]) -> None:
    """Draws a dotted line at each trained length, in the model's colour if the lengths differ."""
    trained = [figures["trained_length"] for figures in results]
    for number, length in enumerate(trained):
        colour = model_style(number)["color"] if len(set(trained)) > 1 else "grey"
        for panel in panels:
            panel.axvline(length, color=colour, linestyle=":", linewidth=1.2)
