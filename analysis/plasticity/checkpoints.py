"""Positional bias and plasticity over the checkpoints of a run, or of all stages of a recipe (plasticity thesis, Table 6.2)."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from farsight.analysis.capture.capture import MANIFEST, Samples, capture_from_options
from farsight.analysis.geometry.rotation import planar_rotation
from farsight.checkpoints.steps import complete_steps
from farsight.configs.load import ConfigError, read_toml
from farsight.progress import progress
from farsight.training.metrics_file import read_metrics
from farsight.training.runs import Run, find_models


@dataclass(frozen=True)
class Checkpoint:
    """Weights that a run has left on its way."""

    stage: str
    step: int
    tokens: float
    """Trained on so far, earlier stages included."""
    length: int
    """Of the stage's sequences."""
    path: Path


def find_checkpoints(path: Path) -> list[Checkpoint]:
    """Those of a run folder, or of a recipe's stages in their order; none where `path` is a model or a capture.

    A run's model/ counts as its last step where no checkpoint of that step is left.

    Raises:
        ConfigError: nothing that could be read there, or runs without any weights.
    """
    if (path / MANIFEST).is_file():
        return []
    runs = find_models([path])[0].runs
    found: list[Checkpoint] = []
    before = 0.0
    for run in runs:
        if "base_model" in read_toml(run.folder / "config.toml"):
            raise ConfigError(
                f"{path} is a fine-tuning run, whose checkpoints do not hold the base: name {run.folder / 'adapter'}."
            )
        logged = [row for row in read_metrics(run.folder) if "loss" in row]
        per_step = max(row["tokens"] / row["step"] for row in logged)
        found += [
            Checkpoint(run.name, step, before + step * per_step, run.seq_len, weights)
            for step, weights in _weights(run)
        ]
        before += logged[-1]["tokens"]
    if runs and not found:
        raise ConfigError(
            f"{path} has no complete checkpoint and no model: wait for the first, or set checkpoint.interval."
        )
    return found


def _weights(run: Run) -> Iterator[tuple[int, Path]]:
    steps = complete_steps(run.folder / "checkpoint")
    for step in steps:
        yield step, run.folder / "checkpoint" / f"step-{step}"
    if run.steps not in steps and (run.folder / "model" / "config.json").is_file():
        yield run.steps, run.folder / "model"


def measure_checkpoints(
    checkpoints: Sequence[Checkpoint], options: argparse.Namespace, plasticity: Callable[[Samples], dict[str, Any]]
) -> list[dict[str, Any]]:
    """The rows of the table, one a checkpoint.

    Args:
        options: as `capture_from_options` takes them; without a length each is measured at its stage's.
        plasticity: figures of samples, as farsight plasticity measures them.
    """
    rows = []
    for checkpoint in progress(checkpoints, unit="checkpoint", desc="checkpoints"):
        length = options.length or checkpoint.length
        samples = capture_from_options(checkpoint.path, argparse.Namespace(**{**vars(options), "length": length}))
        figures = plasticity(samples)
        rows.append(
            {
                "stage": checkpoint.stage,
                "step": checkpoint.step,
                "tokens": checkpoint.tokens,
                "length": length,
                "path": str(checkpoint.path),
                **bias_figures(samples),
                **{key: figures[key] for key in ("overall", "first", "last", "drop")},
                **{key: figures[key] for key in ("sequences", "not_measurable")},
            }
        )
    return rows


def bias_figures(samples: Samples) -> dict[str, float]:
    """Means over all heads: bias strength, per token and times the context, |α_K| and |r_k| on axis a (section 4.3)."""
    found = [
        planar_rotation(samples.queries(n), samples.keys(n), samples.positions_T) for n in range(len(samples.heads))
    ]
    bias = fmean(rotation.bias_strength for rotation in found)
    return {
        "bias_strength": bias,
        "bias_context": bias * samples.length,
        "key_slope": fmean(abs(rotation.key_slope) for rotation in found),
        "key_correlation": fmean(abs(rotation.key_correlation) for rotation in found),
    }


def training_table(rows: Sequence[dict[str, Any]]) -> str:
    """Table 6.2's columns, with bias × context beside it."""
    width = max(5, *(len(row["stage"]) for row in rows))
    lines = [
        f"{'stage':<{width}} {'step':>8} {'length':>8} {'bias':>10} {'× context':>10} {'|α_K|':>10} {'|r_k|':>6} "
        f"{'overall':>8} {'first 20%':>10} {'last 20%':>9} {'drop':>7}"
    ]
    for row in rows:
        overall, first, last, drop = (
            "–" if row[key] is None else f"{row[key]:.3f}" for key in ("overall", "first", "last", "drop")
        )
        lines.append(
            f"{row['stage']:<{width}} {row['step']:>8,} {row['length']:>8,} {row['bias_strength']:>10.3e} "
            f"{row['bias_context']:>10.3f} {row['key_slope']:>10.3e} {row['key_correlation']:>6.3f} "
            f"{overall:>8} {first:>10} {last:>9} {drop:>7}"
        )
    most = max(len(row["not_measurable"]) for row in rows)
    if most:
        lines.append(f"Up to {most} heads have scopes too short for their buckets; they are in no mean of plasticity.")
    return "\n".join(lines)
