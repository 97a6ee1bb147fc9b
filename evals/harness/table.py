"""The figures of `farsight harness` and `farsight external` as text."""

from collections.abc import Mapping
from typing import Any


def table(figures: Mapping[str, Any]) -> str:
    """The figures as text, one line for each task."""
    results = figures["results"]
    width = max(len(name) for name in [*results, *figures["means"], "task"])
    lines = [f"{'task':<{width}}  {'shots':>5}  {'value':>8}  {'± error':>8}  {'n':>6}  metric"]
    for name, row in results.items():
        shots, value, error, n = (
            "" if row[key] is None else shape.format(row[key])
            for key, shape in (("shots", "{}"), ("value", "{:.4f}"), ("stderr", "{:.4f}"), ("n", "{}"))
        )
        lines.append(f"{name:<{width}}  {shots:>5}  {value:>8}  {error:>8}  {n:>6}  {row['metric']}")
    lines += [f"{name:<{width}}  {'':>5}  {mean:>8.4f}  mean" for name, mean in figures["means"].items()]
    return "\n".join(lines)
