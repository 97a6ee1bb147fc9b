"""The figures of farsight order-awareness as text."""

from typing import Any


def table(figures: dict[str, Any]) -> str:
    """A line per span, and the horizon of each layer."""
    columns = {
        "last tokens": ("tokens", "{:,}"),
        "change": ("change", "{:.3g}"),
        "oldest two exchanged": ("exchange", "{:.3g}"),
        "told apart": ("distinguished", "{:.0%}"),
        "last moved too": ("change_all", "{:.3g}"),
        "told apart ": ("distinguished_all", "{:.0%}"),
    }
    lines = ["  ".join(f"{title:>11}" for title in columns)]
    for row in figures["spans"]:
        cells = ("–" if row[key] is None else form.format(row[key]) for key, form in columns.values())
        lines.append("  ".join(f"{cell:>{max(11, len(title))}}" for title, cell in zip(columns, cells, strict=True)))
    by_layer = ", ".join(f"{layer}: {values['horizon']:,}" for layer, values in figures["layers"].items())
    lines.append(f"horizon in tokens, after each layer: {by_layer}")
    return "\n".join(lines)
