"""The errors of position probes as text."""

from typing import Any

from farsight.outputs import short_names


def table(results: dict[str, dict[str, Any]]) -> str:
    """A line per layer, a column per model."""
    names = short_names(results)
    width = max(10, *map(len, names))
    depth = max(len(figures["layers"]) for figures in results.values())
    lines = [" ".join(["layer".rjust(9), *(name.rjust(width) for name in names)])]
    for row in range(depth):
        cells = [f["layers"][row]["error"] if row < len(f["layers"]) else None for f in results.values()]
        shown = ["" if cell is None else f"{cell:.1f}" for cell in cells]
        lines.append(" ".join([("embedding" if row == 0 else str(row - 1)).rjust(9), *(s.rjust(width) for s in shown)]))
    guesses = [f"{figures['guess']:.1f}".rjust(width) for figures in results.values()]
    return "\n".join([*lines, " ".join(["guess".rjust(9), *guesses])])
