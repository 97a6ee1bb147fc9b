"""The report's section on benchmarks, from `farsight harness`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from farsight.reports.page import small, table
from farsight.reports.results import Result, names
from farsight.reports.tools import Tool


def show(results: Sequence[Result]) -> list[Markup]:
    """A table with a row for each task and a column for each result."""
    tasks = list(dict.fromkeys(task for result in results for task in result.values["results"]))
    rows = [
        [_task(task, results), *(_score(result.values["results"].get(task)) for result in results)] for task in tasks
    ]
    for group in dict.fromkeys(group for result in results for group in result.values.get("means", {})):
        rows.append([f"mean of {group}", *(_mean(result.values.get("means", {}).get(group)) for result in results)])
    if any(result.values.get("mean") is not None for result in results):
        rows.append(["mean of all", *(_mean(result.values.get("mean")) for result in results)])
    caption = "± is lm-evaluation-harness's standard error. In brackets: the metric, the number of examples in the prompt, and n questions."
    return [table(["task", *names(results)], rows, caption)]


def _task(task: str, results: Sequence[Result]) -> str:
    """A task's name with its metrics, shots and numbers of questions in all results."""
    entries = [result.values["results"][task] for result in results if task in result.values["results"]]
    metrics, shots, counts = (
        ", ".join(dict.fromkeys(form(entry[key]) for entry in entries if entry.get(key) is not None))
        for key, form in (("metric", str), ("shots", str), ("n", "{:,}".format))
    )
    said = [metrics, f"{shots} shots" if shots else "", f"n {counts}" if counts else ""]
    return small(task, f"({'; '.join(filter(None, said))})")


def _score(entry: dict[str, Any] | None) -> str:
    if entry is None or entry["value"] is None:
        return "–"
    error = entry.get("stderr")
    return f"{entry['value']:.4g}" + (f" ± {error:.2g}" if isinstance(error, float) and math.isfinite(error) else "")


def _mean(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _is_harness(values: Mapping[str, Any]) -> bool:
    match values:
        case {"results": dict(tasks)}:
            return all(map(_is_score, tasks.values()))
    return False


def _is_score(value: Any) -> bool:
    match value:
        case {"value": None | int() | float()}:
            return True
    return False


HARNESS = Tool(
    command="harness",
    heading="Benchmarks",
    is_result=_is_harness,
    show=show,
    arguments=lambda _texts, _lengths: ["--tasks", "scope_nlu"],
)
