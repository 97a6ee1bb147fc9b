"""Positional bias and plasticity over the checkpoints of a run, or of all stages of a recipe (plasticity thesis, Table 6.2)."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from farsight.analysis.capture.from_options import capture_from_options
from farsight.analysis.capture.options import is_capture
from farsight.analysis.capture.samples import Samples
from farsight.analysis.geometry.rotation import planar_rotation
from farsight.checkpoints.model_dir.api import is_foreign
from farsight.checkpoints.steps import complete_steps
from farsight.configs.load import read_toml
from farsight.errors import ConfigError
from farsight.progress import progress
from farsight.training.metrics_file import read_metrics
from farsight.training.runs import Run, find_models


@dataclass(frozen=True)
class Checkpoint:
    """Weights that a run saved."""

    stage: str
    step: int
    tokens: float
    """Tokens trained on so far, earlier stages included."""
    length: int
    """Tokens per sequence in its stage."""
    path: Path


def find_checkpoints(path: Path) -> list[Checkpoint]:
    """The checkpoints of a run folder, or of a recipe's stages in order; none if `path` is a model or a capture.

    A run's model/ stands for its last step if that step's checkpoint is gone.

    Raises:
        ConfigError: nothing readable at `path`, a fine-tuning run, or runs without any weights.
    """
    if is_capture(path) or is_foreign(path):
        return []
    runs = find_models([path])[0].runs
    found: list[Checkpoint] = []
    before = 0.0
    for run in runs:
        if "base_model" in read_toml(run.folder / "config.toml"):
            raise ConfigError(
                f"{path} is a fine-tuning run, whose checkpoints don't contain the base model: name {run.folder / 'adapter'}."
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
            f"{path} has no complete checkpoint and no model yet: wait for the first checkpoint, or set checkpoint.interval."
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
    """Measures each checkpoint: one row of figures per checkpoint.

    Args:
        options: for `capture_from_options`; without a length, each checkpoint is measured at its stage's.
        plasticity: computes the plasticity figures of samples.
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
    """Means over all heads of bias strength (per token, and times the context), |α_K| and |r_k| on axis a (section 4.3)."""
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
