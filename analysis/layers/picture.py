"""The picture of farsight layers: both profiles, each on its own axis, after GARFA's figure 2."""

from pathlib import Path
from typing import Any

_MOST_RATIO = 50
"""Largest delta over smallest beyond which the axis is logarithmic."""
_DELTA, _RHO = "#D55E00", "#0072B2"


def draw(figures: dict[str, Any], path: Path) -> None:
    """Writes the picture (PNG, SVG or PDF); the top layers by delta and by |rho| are filled."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    delta, rho, top = figures["delta"], figures["rho"], figures["top"]
    figure, left = plt.subplots(figsize=(max(6.4, 0.22 * len(delta) + 2), 4.4), layout="constrained")
    right = left.twinx()
    _profile(left, delta, top["delta"], _DELTA, "o", "-")
    _profile(right, rho, top["absolute_rho"], _RHO, "s", "--")
    still = [layer for layer, rotates in enumerate(figures["rotates"]) if not rotates]
    right.plot(still, [0] * len(still), "x", color="grey", label="no rotation")
    if min(delta) > 0 and max(delta) > _MOST_RATIO * min(delta):
        left.set_yscale("log")
    right.axhline(0, color=_RHO, linewidth=0.6, alpha=0.5)
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.set_xlabel(f"layer (filled: the {len(top['delta'])} largest)")
    left.set_ylabel("delta: cosine distance, correct and wrong text", color=_DELTA)
    right.set_ylabel("rho: change in loss", color=_RHO)
    left.tick_params(axis="y", colors=_DELTA)
    right.tick_params(axis="y", colors=_RHO)
    left.grid(axis="x", alpha=0.3)
    if still:
        right.legend(fontsize="small", frameon=False)
    correlations = figures["spearman_signed"], figures["spearman_absolute"]
    if None not in correlations:
        left.set_title(
            "Spearman of delta with rho {:+.3f}, with |rho| {:+.3f}".format(*correlations), fontsize="medium"
        )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _profile(axes: Any, values: list[float], leading: list[int], colour: str, marker: str, line: str) -> None:
    axes.plot(values, color=colour, linestyle=line, marker=marker, markersize=6, markerfacecolor="white")
    axes.plot(leading, [values[layer] for layer in leading], marker, color=colour, markersize=6)
