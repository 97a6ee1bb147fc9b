"""The figures of farsight layers as text."""

from typing import Any

from farsight.analysis.layers.rankings import RANKINGS


def table(figures: dict[str, Any]) -> str:
    """The profiles, a line per layer, and how they compare."""
    top, lines = figures["top"], [f"{'layer':>5}{'delta':>12}{'rho':>12}   in top by"]
    for layer, (delta, rho) in enumerate(zip(figures["delta"], figures["rho"], strict=True)):
        note = ", ".join(RANKINGS[name] for name in RANKINGS if layer in top[name])
        note += "" if figures["rotates"][layer] else " (no rotation)"
        lines.append(f"{layer:>5}{delta:>12.3e}{rho:>+12.5f}   {note}".rstrip())
    if not any(figures["rotates"]):
        lines.append(f"top {len(top['delta'])} by delta: {' '.join(map(str, top['delta']))}")
        return "\n".join([*lines, "No layer rotates, so there is no rho to compare delta with."])
    signed, absolute = (_signed(figures[f"spearman_{kind}"]) for kind in ("signed", "absolute"))
    lines.append(f"Spearman of delta with rho: {signed} (signed), {absolute} (absolute)")
    for name, meaning in RANKINGS.items():
        lines.append(f"top {len(top[name])} by {meaning}: {' '.join(map(str, top[name]))}")
        if name == "rho" and figures["signed_is_smallest"]:
            lines[-1] += "  (the smallest |rho|)"
        if name in figures["shared"]:
            o = figures["shared"][name]
            lines.append(
                f"  {len(o['layers'])} shared with delta, {o['expected']:.1f} expected of random sets (P of at most "
                f"{len(o['layers'])}: {o['at_most']:.2g}, of at least {len(o['layers'])}: {o['at_least']:.2g})"
            )
    return "\n".join(lines)


def _signed(value: float | None) -> str:
    return "undefined, as all layers are equal" if value is None else f"{value:+.3f}"
