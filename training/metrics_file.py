"""Reads `metrics.jsonl`, the figures that a training run logs."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def run_summary(name: str, folder: Path, seq_len: int, steps: int) -> dict[str, Any]:
    """Summarises a run from its `metrics.jsonl`.

    Args:
        seq_len, steps: the run's settings, copied into the summary.

    Returns:
        `train_loss` and `val_loss` (each [first, last], in nats; `val_loss` may be empty), `tokens_per_second` (median),
        `evaluations` (each figure's last value), an empty `perplexity` for the caller to fill, and the arguments.
    """
    rows = read_metrics(folder)
    train = [row for row in rows if "loss" in row]
    validation = [row for row in rows if "val_loss" in row]
    fifth = max(1, len(train) // 5)
    ends = [statistics.fmean(row["loss"] for row in rows) for rows in (train[:1], train[-fifth:])]
    return {
        "name": name,
        "seq_len": seq_len,
        "steps": steps,
        # Single batches are noisy: the last loss is the mean over the last fifth of the logged steps.
        "train_loss": ends,
        "val_loss": [validation[0]["val_loss"], validation[-1]["val_loss"]] if validation else [],
        # Without the first step, which includes start-up.
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in train[1:] or train),
        "evaluations": {figure: points[-1][1] for figure, points in evaluation_points(folder).items()},
        "perplexity": {},
    }


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's `metrics.jsonl`, which may still be being written."""
    lines = (folder / "metrics.jsonl").read_bytes().split(b"\n")[:-1]  # text after the last newline is incomplete
    return [row for row in map(row_of, lines) if row]


def loss_points(folder: Path, before: float = 0.0) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Loss curves of a run as (tokens, loss in nats): training loss per logged step, and held-out loss per validation.

    Args:
        before: tokens of earlier stages, added to this run's.
    """
    rows = read_metrics(folder)
    train = [row for row in rows if "loss" in row]
    tokens_per_step = _tokens_per_step(rows)
    validations = [row for row in rows if "val_loss" in row]
    return (
        [(before + row["tokens"], row["loss"]) for row in train],
        [(before + row["step"] * tokens_per_step, row["val_loss"]) for row in validations],
    )


def evaluation_points(folder: Path, before: float = 0.0) -> dict[str, list[tuple[float, float]]]:
    """Curves of a run's evaluations by "NAME.figure", as (tokens, value), in the order of steps.

    Args:
        before: tokens of earlier stages, added to this run's.
    """
    rows = read_metrics(folder)
    tokens_per_step, curves = _tokens_per_step(rows), dict[str, list[tuple[float, float]]]()
    # Those beside the run are written after rows of later steps.
    for row in sorted((row for row in rows if "evaluation" in row), key=lambda row: row["step"]):
        for figure, value in row.items():
            if figure.startswith(f"{row['evaluation']}."):
                curves.setdefault(figure, []).append((before + row["step"] * tokens_per_step, value))
    return curves


def _tokens_per_step(rows: list[dict[str, Any]]) -> float:
    return max((row["tokens"] / row["step"] for row in rows if "loss" in row), default=0.0)


def smoothed(points: Sequence[tuple[float, float]], together: int) -> list[tuple[float, float]]:
    """Means of `together` successive points each; the last may have fewer."""
    groups = [points[start : start + together] for start in range(0, len(points), together)]
    return [(statistics.fmean(x for x, _ in group), statistics.fmean(y for _, y in group)) for group in groups]


def row_of(line: str | bytes) -> dict[str, Any]:
    """Parses a line of `metrics.jsonl`; a damaged one, as a full disk may leave it, gives an empty row."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}
