"""Reading `metrics.jsonl`, the figures that a training run logs."""

import json
import statistics
from pathlib import Path
from typing import Any


def run_summary(name: str, folder: Path, seq_len: int, steps: int) -> dict[str, Any]:
    """A run's figures from its `metrics.jsonl`."""
    rows = read_metrics(folder)
    train = [row for row in rows if "loss" in row]
    validation = [row for row in rows if "val_loss" in row]
    fifth = max(1, len(train) // 5)
    ends = [statistics.fmean(row["loss"] for row in rows) for rows in (train[:1], train[-fifth:])]
    return {
        "name": name,
        "seq_len": seq_len,
        "steps": steps,
        # A batch is small: the last loss is the mean over the last fifth of the logged steps.
        "train_loss": ends,
        "val_loss": [validation[0]["val_loss"], validation[-1]["val_loss"]] if validation else [],
        # The first step also warms up the machine.
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in train[1:] or train),
        "perplexity": {},
    }


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's `metrics.jsonl`, of one that is being written too."""
    lines = (folder / "metrics.jsonl").read_bytes().split(b"\n")[:-1]  # what follows the last newline was cut off
    return [row for row in map(row_of, lines) if row]


def loss_points(folder: Path, before: float = 0.0) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Training loss of a run's logged steps and held-out loss of its validations, each beside the tokens trained on.

    Args:
        before: tokens of the stages before it.
    """
    rows = read_metrics(folder)
    train = [row for row in rows if "loss" in row]
    tokens_per_step = max((row["tokens"] / row["step"] for row in train), default=0.0)
    validations = [row for row in rows if "val_loss" in row]
    return (
        [(before + row["tokens"], row["loss"]) for row in train],
        [(before + row["step"] * tokens_per_step, row["val_loss"]) for row in validations],
    )


def row_of(line: str | bytes) -> dict[str, Any]:
    """A line of `metrics.jsonl`; an empty row where it is none, as a full disk may leave it."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}
