"""The figures of farsight graft-sweep as text."""

from typing import Any


def table(figures: dict[str, Any]) -> str:
    """A line per model and graft, a column per length."""
    columns = [(key, length) for key in ("perplexity", "passkey") for length in figures["plain"]["base"].get(key, ())]
    lines = [f"{'':>8}{'depth':>6}" + "".join(f"{_heading(key, length):>16}" for key, length in columns)]
    rows = [("base", "", figures["plain"]["base"]), ("long", "", figures["plain"]["long"])]
    rows += [(mode, row["depth"], row) for mode, found in figures["modes"].items() for row in found]
    for name, depth, row in rows:
        cells = [_cell(row[key][length]) for key, length in columns]
        lines.append(f"{name:>8}{depth:>6}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def _heading(key: str, length: str) -> str:
    return f"{'ppl' if key == 'perplexity' else key} {int(length):,}"


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
