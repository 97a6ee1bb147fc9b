"""Losses of runs over their training tokens."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from farsight.errors import ConfigError
from farsight.training.metrics_file import loss_points
from farsight.training.runs import NamedModel


def read_losses(model: NamedModel) -> dict[str, Any]:
    """{"name", "training", "held_out", "stages"}: (tokens, loss) points, and the tokens at which stages end.

    Raises:
        ConfigError: no run with a logged step.
    """
    if not model.runs:
        raise ConfigError(f"{model.path} is not a run folder: it has no metrics.jsonl with a logged step.")
    training: list[tuple[float, float]] = []
    held_out: list[tuple[float, float]] = []
    ends: list[float] = []
    for run in model.runs:
        points, validations = loss_points(run.folder, ends[-1] if ends else 0.0)
        training, held_out = training + points, held_out + validations
        ends.append(points[-1][0])
    return {"name": model.name, "training": training, "held_out": held_out, "stages": ends}


def table(curves: Sequence[dict[str, Any]]) -> str:
    """The losses at the end of each run."""
    width = max(len(curve["name"]) for curve in curves)
    lines = [f"{'run':<{width}} {'tokens':>14} {'training':>10} {'held out':>10}"]
    for curve in curves:
        last = fmean(loss for _, loss in curve["training"][-max(1, len(curve["training"]) // 5) :])
        held_out = f"{curve['held_out'][-1][1]:.4f}" if curve["held_out"] else "–"
        lines.append(f"{curve['name']:<{width}} {curve['training'][-1][0]:>14,.0f} {last:>10.4f} {held_out:>10}")
    lines.append("training: mean of the last fifth of the logged steps")
    return "\n".join(lines)
