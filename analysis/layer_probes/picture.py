"""The picture of farsight layer-probes, after LASP's figures 1, 2 and 6."""

from pathlib import Path
from typing import Any

from farsight.plots import GREY, PALETTE, log_if_wide, picture, shades, whole_numbers

_MOST_RATIO = 10
"""Highest perplexity over lowest beyond which the axis is logarithmic."""


def draw(figures: dict[str, Any], path: Path) -> None:
    """Writes the picture (PNG, SVG or PDF): a line per factor, dashed for the unprobed model; passkeys in a second panel."""
    measured = [name for name in ("perplexity", "passkey") if name in figures["baseline"]]
    layers = 1 + max(entry["layer"] for entry in figures["layers"])
    with picture(path, max(6.4, 0.2 * layers + 2) * len(measured), 4.4) as figure:
        panels = figure.subplots(1, len(measured), squeeze=False)[0]
        for axes, name in zip(panels, measured, strict=True):
            _lines(axes, figures, name)
            whole_numbers(axes.xaxis)
            axes.set(xlabel="layer with the probe", ylabel={"passkey": "share of passkeys found"}.get(name, name))
        panels[0].legend()
        meaning = {"mask": "RoPE masked", "coarsen": "positions coarsened", "noise": "noise on the hidden states"}
        figure.suptitle(f"{meaning[figures['probe']]} in one layer")


def _lines(axes: Any, figures: dict[str, Any], name: str) -> None:
    entries, baseline = figures["layers"], figures["baseline"][name]
    factors = list(dict.fromkeys(entry.get("factor") for entry in entries))
    for factor, colour in zip(factors, shades(len(factors)), strict=True):
        own = [entry for entry in entries if entry.get("factor") == factor]
        label = {"coarsen": f"k = {factor}", "noise": f"noise {factor}"}.get(figures["probe"], "masked")
        axes.plot([e["layer"] for e in own], [e[name] for e in own], "o-", color=colour, markersize=4, label=label)
    still = sorted({e["layer"] for e in entries if not e["rotates"]}) if figures["probe"] != "noise" else []
    if still:
        axes.plot(still, [baseline] * len(still), "x", color=PALETTE[4], label="no rotation", zorder=3)
    axes.axhline(baseline, color=GREY, linestyle="--", linewidth=1.2, label="without a probe")
    if name == "passkey":
        axes.set_ylim(-0.03, 1.03)
    else:
        log_if_wide(axes, [*(entry[name] for entry in entries), baseline], _MOST_RATIO)
