"""The picture of farsight layer-probes, after LASP's figures 1, 2 and 6."""

import math
from pathlib import Path
from typing import Any

_MOST_RATIO = 10
"""Highest perplexity over lowest beyond which the axis is logarithmic."""


def draw(figures: dict[str, Any], path: Path) -> None:
    """Writes the picture (PNG, SVG or PDF): a line per factor, dashed for the unprobed model; passkeys in a second panel."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    measured = [name for name in ("perplexity", "passkey") if name in figures["baseline"]]
    layers = 1 + max(entry["layer"] for entry in figures["layers"])
    size = max(6.4, 0.2 * layers + 2) * len(measured), 4.4
    figure, panels = plt.subplots(1, len(measured), figsize=size, layout="constrained", squeeze=False)
    for axes, name in zip(panels[0], measured, strict=True):
        _lines(axes, figures, name)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        axes.set(xlabel="layer with the probe", ylabel={"passkey": "share of passkeys found"}.get(name, name))
    panels[0, 0].legend(fontsize="small", frameon=False)
    meaning = {"mask": "RoPE masked", "coarsen": "positions coarsened", "noise": "noise on the hidden states"}
    figure.suptitle(f"{meaning[figures['probe']]} in one layer", fontsize="medium")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _lines(axes: Any, figures: dict[str, Any], name: str) -> None:
    from matplotlib import colormaps

    entries, baseline = figures["layers"], figures["baseline"][name]
    factors = list(dict.fromkeys(entry.get("factor") for entry in entries))
    for number, factor in enumerate(factors):
        own = [entry for entry in entries if entry.get("factor") == factor]
        colour = colormaps["viridis"](0.9 * number / max(1, len(factors) - 1))
        label = {"coarsen": f"k = {factor}", "noise": f"noise {factor}"}.get(figures["probe"], "masked")
        axes.plot([e["layer"] for e in own], [e[name] for e in own], "o-", color=colour, markersize=4, label=label)
    still = sorted({e["layer"] for e in entries if not e["rotates"]}) if figures["probe"] != "noise" else []
    if still:
        axes.plot(still, [baseline] * len(still), "x", color="black", label="no rotation", zorder=3)
    axes.axhline(baseline, color="grey", linestyle="--", linewidth=1.2, label="without a probe")
    values = [entry[name] for entry in entries if math.isfinite(entry[name])] + [baseline]
    if name == "passkey":
        axes.set_ylim(-0.03, 1.03)
    elif max(values) > _MOST_RATIO * min(values):
        axes.set_yscale("log")
