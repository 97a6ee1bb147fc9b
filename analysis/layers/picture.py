"""The picture of farsight layers: both profiles, each on its own axis, after GARFA's figure 2."""

from pathlib import Path
from typing import Any

from farsight.plots import GREY, PALETTE, log_if_wide, picture, whole_numbers

_MOST_RATIO = 50
"""Largest delta over smallest beyond which the axis is logarithmic."""
_RHO, _DELTA = PALETTE[:2]


def draw(figures: dict[str, Any], path: Path) -> None:
    """Writes the picture (PNG, SVG or PDF); the top layers by delta and by |rho| are filled."""
    delta, rho, top = figures["delta"], figures["rho"], figures["top"]
    with picture(path, max(6.4, 0.22 * len(delta) + 2), 4.4) as figure:
        left = figure.subplots()
        right = left.twinx()
        _profile(left, delta, top["delta"], _DELTA, "o", "-")
        _profile(right, rho, top["absolute_rho"], _RHO, "s", "--")
        still = [layer for layer, rotates in enumerate(figures["rotates"]) if not rotates]
        if still:
            right.plot(still, [0] * len(still), "x", color=GREY, label="no rotation")
            right.legend()
        log_if_wide(left, delta, _MOST_RATIO)
        right.axhline(0, color=_RHO, linewidth=0.6, alpha=0.5)
        whole_numbers(left.xaxis)
        filled = len(top["delta"])
        left.set_xlabel(f"layer (filled: the {filled} largest)" if filled > 1 else "layer (filled: the largest)")
        for axes, label, colour in (
            (left, "delta: cosine distance, correct and wrong text", _DELTA),
            (right, "rho: change in loss", _RHO),
        ):
            axes.set_ylabel(label, color=colour)
            axes.tick_params(axis="y", colors=colour)
            axes.grid(False, axis="y")  # the scales differ
        correlations = figures["spearman_signed"], figures["spearman_absolute"]
        if None not in correlations:
            left.set_title("Spearman of delta with rho {:+.3f}, with |rho| {:+.3f}".format(*correlations))


def _profile(axes: Any, values: list[float], leading: list[int], colour: str, marker: str, line: str) -> None:
    axes.plot(values, color=colour, linestyle=line, marker=marker, markersize=6, markerfacecolor="white")
    axes.plot(leading, [values[layer] for layer in leading], marker, color=colour, markersize=6)
