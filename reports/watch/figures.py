"""A run's newest figures as text, for every view."""

import math

from farsight.reports.watch.run import Run, number
from farsight.units import duration


def about(run: Run) -> str:
    """The run's kind, length and devices, from the row of its last start."""
    start, ranks, length = run.start, number(run.start, "ranks"), number(run.start, "seq_len")
    device = str(start.get("device", ""))
    parts = [
        str(start.get("kind", "")),
        f"{length:,.0f} tokens" if length is not None else "",
        f"{ranks:,.0f} × {device}" if ranks is not None and ranks > 1 else device,
    ]
    return ", ".join(part for part in parts if part)


def figures(run: Run, now: float) -> dict[str, str]:
    """The figures by their labels; those that are not known are left out.

    Args:
        now: Unix seconds.
    """
    found = {}
    if run.start or run.step:
        of = f"/{run.steps:,.0f} ({math.floor(100 * min(1.0, run.reached / run.steps))}%)" if run.steps else ""
        found["step"] = f"{run.reached:,.0f}{of}"
    if run.state(now)[0] == "running" and (left := run.seconds_left()) is not None:
        found["left"] = duration(left)
    if run.losses:
        found["loss"] = f"{run.losses[-1][1]:.4f}"
    if run.validations:
        step, loss = run.validations[-1]
        found["validation"] = f"{loss:.4f} (step {step:,.0f})"
    for label, key, text in (
        ("tokens/s", "tokens_per_second", "{:,.0f}"),
        ("MFU", "mfu", "{:.1%}"),
        ("memory", "memory_gib", "{:.2f} GiB"),
    ):
        if (value := number(run.step, key)) is not None:
            found[label] = text.format(value)
    if run.checkpoint:
        age = duration(max(0.0, now - (number(run.checkpoint, "time") or run.written)))
        found["checkpoint"] = f"{run.checkpoint['checkpoint']}, {age} ago"
    for measured in run.evaluations.values():
        step, values = measured[-1]
        found |= {figure: f"{value:.4g} (step {step:,.0f})" for figure, value in values.items()}
    if slow := slow_ranks(run):
        found["slow"] = slow
    return found


def slow_ranks(run: Run) -> str:
    """The ranks that the run last found slow, each with its host, its device, and its step time over the median's."""
    ranks = run.slow.get("slow")
    said = [
        f"rank {rank.get('rank')} on {rank.get('host')}, {rank.get('device')}: {number(rank, 'ratio') or math.nan:.2f} × the median"
        for rank in (ranks if isinstance(ranks, list) else ())
        if isinstance(rank, dict)
    ]
    return f"{'; '.join(said)} (step {number(run.slow, 'step'):,.0f})" if said else ""
