"""The results of farsight order-simulation as text."""

from collections.abc import Mapping, Sequence
from typing import Any


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """The mean ratio after each layer, a line per configuration."""
    layers = len(results[0]["ratio"])
    lines = []
    for number, row in enumerate(results):
        if number == 0 or row["length"] != results[number - 1]["length"]:
            lines.append(f"\nT = {row['length']:,}, {row['heads']} heads; distinct coefficients / T after layer")
            lines.append(f"{'':<14}" + "".join(f"{layer:>7}" for layer in range(1, layers + 1)))
        lines.append(f"{row['windows']:<14}" + "".join(f"{ratio:>7.3f}" for ratio in row["ratio"]))
    return "\n".join(lines).lstrip()
