"""The figures of farsight layer-probes as text."""

from typing import Any


def table(figures: dict[str, Any]) -> str:
    """Perplexity, and accuracy in per cent: a line per layer, a column per factor."""
    baseline, probe, entries = figures["baseline"], figures["probe"], figures["layers"]
    factors = list(dict.fromkeys(entry.get("factor") for entry in entries))
    shown = [probe if factor is None else f"{probe} {factor:g}" for factor in factors]
    lines = []
    for name, title, scale in (("perplexity", "perplexity", 1), ("passkey", "passkeys found, in %", 100)):
        if name not in baseline:
            continue
        lines.append(f"{title}: {_number(baseline[name], scale)} without a probe")
        lines.append(f"{'layer':>5}" + "".join(f"{column:>14}" for column in shown))
        for layer in dict.fromkeys(entry["layer"] for entry in entries):
            own = [entry for entry in entries if entry["layer"] == layer]
            still = probe != "noise" and not own[0]["rotates"]
            cells = "".join(f"{_number(entry[name], scale):>14}" for entry in own)
            lines.append(f"{layer:>5}{cells}" + ("  (no rotation)" if still else ""))
    return "\n".join(lines)


def _number(value: float, scale: int) -> str:
    return f"{scale * value:.1f}" if scale > 1 else f"{value:,.3f}" if value < 1e6 else f"{value:.3g}"
