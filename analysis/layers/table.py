"""The figures of farsight layers as text."""

from typing import Any

from farsight.analysis.layers.rankings import RANKINGS


def table(figures: dict[str, Any]) -> str:
    """The profiles, a line per layer, and how they compare."""
    top, lines = figures["top"], _measured(figures)
    lines.append(f"{'layer':>5}{'delta':>12}{'rho':>12}   in top by")
    for layer, (delta, rho) in enumerate(zip(figures["delta"], figures["rho"], strict=True)):
        note = ", ".join(RANKINGS[name] for name in RANKINGS if layer in top[name])
        note += "" if figures["rotates"][layer] else " (no rotation)"
        lines.append(f"{layer:>5}{delta:>12.3e}{rho:>+12.5f}   {note}".rstrip())
    if not any(figures["rotates"]):
        lines.append(f"top {len(top['delta'])} by delta: {' '.join(map(str, top['delta']))}")
        return "\n".join([*lines, "No layer rotates, so there is no rho to compare delta with."])
    lines.append(f"Spearman of delta with rho: {in_words(figures, 'signed')}, {in_words(figures, 'absolute')}")
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


def _measured(figures: dict[str, Any]) -> list[str]:
    """The rows that rho was measured on; nothing for a profile read from a file."""
    if "targets" not in figures:
        return []
    length, trained, number = figures["length"], figures["trained_length"], figures["sequences"]
    if figures["rows"] == "instructions":
        said = f"{number} rows of instructions, of up to {length:,} tokens; their {figures['targets']:,} trained tokens count"
    else:
        said = f"{number} windows of {length:,} tokens"
    return [f"rho: {said}" + (f" (the model was trained at {trained:,})" if length != trained else "")]


def in_words(figures: dict[str, Any], kind: str) -> str:
    """A rank correlation with its p-value: "-0.758 (signed, p = 4.9e-07)"."""
    value, p = figures[f"spearman_{kind}"], figures[f"p_{kind}"]
    if value is None:
        return f"undefined, as all layers are equal ({kind})"
    return f"{value:+.3f} ({kind}{'' if p is None else f', p = {p:.2g}'})"
