"""The picture of farsight layers: delta against rho and both profiles, after GARFA's figures 1 and 2."""

from pathlib import Path
from typing import Any

import numpy as np

from farsight.analysis.layers.table import in_words
from farsight.plots import GREY, PALETTE, log_if_wide, picture, whole_numbers

_MOST_RATIO = 50
"""Largest delta over smallest beyond which the axis is logarithmic."""
_RHO, _DELTA, _BOTH = PALETTE[:3]
_PANEL = np.array([350.0, 280.0])
"""About the size of the left panel's data, in points."""
_OFFSETS = np.array([(10, 0), (-10, 0), (0, 9), (0, -9), (9, 7), (-9, 7), (9, -7), (-9, -7)])
"""Offsets that a layer's number may have from its point, in points (1/72 inch)."""


def draw(figures: dict[str, Any], path: Path) -> None:
    """Writes the picture (PNG, SVG or PDF): layers by rho and delta, and both by layer, with the top layers filled."""
    width = max(6.4, 0.22 * len(figures["delta"]) + 2)
    with picture(path, 6.4 + width, 5.4) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(6.4, width))
        _scatter(left, figures)
        _profiles(right, figures)
        if figures["spearman_signed"] is not None:
            figure.suptitle(
                "Spearman of delta with rho " + ", ".join(in_words(figures, k) for k in ("signed", "absolute"))
            )


def _scatter(axes: Any, figures: dict[str, Any]) -> None:
    """Each rotating layer by its number, in the colour of the rankings at whose top it is, and a linear fit."""
    delta, rho, top = figures["delta"], figures["rho"], figures["top"]
    axes.set(xlabel="rho: change in loss", ylabel="delta: cosine distance, correct and wrong text")
    rotating = [layer for layer, rotates in enumerate(figures["rotates"]) if rotates]
    if not rotating:
        axes.set_title("no layer rotates")
        return
    sensitive, influential = {*top["delta"]}, {*top["absolute_rho"]}
    groups = {
        "top by delta and |rho|": (_BOTH, sensitive & influential),
        "top by delta": (_DELTA, sensitive - influential),
        "top by |rho|": (_RHO, influential - sensitive),
        "other": (GREY, {*rotating} - sensitive - influential),
    }
    for name, (colour, layers) in groups.items():
        if shown := sorted(layers & {*rotating}):
            axes.plot([rho[n] for n in shown], [delta[n] for n in shown], "o", color=colour, label=name)
    wide = log_if_wide(axes, [delta[layer] for layer in rotating], _MOST_RATIO)
    x, y = (np.array([values[layer] for layer in rotating]) for values in (rho, delta))
    places = np.stack([values / max(np.ptp(values), 1e-30) for values in (x, np.log(y) if wide else y)], axis=1)
    taken = list(places * _PANEL)
    for number, layer in enumerate(rotating):
        # A number stands where points and the numbers before it leave most room; it is wider than it is high.
        middles = [(offset, taken[number] + offset) for offset in _OFFSETS]
        room = [min(np.hypot(*((middle - other) * (0.6, 1.0))) for other in taken) for _, middle in middles]
        offset, middle = middles[int(np.argmax(room))]
        taken.append(middle)
        options: Any = {"textcoords": "offset points", "fontsize": "x-small", "ha": "center", "va": "center"}
        axes.annotate(str(layer), (rho[layer], delta[layer]), offset, **options)
    if len({*x}) > 1:
        ends = np.array([x.min(), x.max()])
        fitted = np.polyval(np.polyfit(x, np.log(y) if wide else y, 1), ends)
        name = "linear fit of log delta" if wide else "linear fit"
        axes.plot(ends, np.exp(fitted) if wide else fitted, "--", color=GREY, linewidth=1, label=name)
    axes.legend()


def _profiles(left: Any, figures: dict[str, Any]) -> None:
    """delta on the left axis and rho on the right, by layer; the top layers by delta and by |rho| are filled."""
    delta, rho, top = figures["delta"], figures["rho"], figures["top"]
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
        (left, "delta", _DELTA),
        (right, "rho: change in loss", _RHO),
    ):
        axes.set_ylabel(label, color=colour)
        axes.tick_params(axis="y", colors=colour)
        axes.grid(False, axis="y")  # the scales differ


def _profile(axes: Any, values: list[float], leading: list[int], colour: str, marker: str, line: str) -> None:
    axes.plot(values, color=colour, linestyle=line, marker=marker, markersize=6, markerfacecolor="white")
    axes.plot(leading, [values[layer] for layer in leading], marker, color=colour, markersize=6)
