"""The checkpoints of a run, of a recipe's stages, or of a list of model directories, and tools that measure each of them."""

import argparse
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farsight.analysis.capture.from_options import captured_or_capture, settings_of
from farsight.analysis.capture.options import is_capture
from farsight.analysis.capture.samples import Samples
from farsight.checkpoints.model_dir.api import is_foreign
from farsight.checkpoints.steps import complete_steps
from farsight.configs.load import read_toml
from farsight.errors import ConfigError
from farsight.inference.model_options import READING
from farsight.outputs import short_names
from farsight.progress import progress
from farsight.remote import shown
from farsight.training.metrics_file import read_metrics
from farsight.training.run_store import checkpoints_of
from farsight.training.runs import Run, find_models

Figures = dict[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """Weights that a training saved."""

    stage: str
    """The stage's name; of a listed model directory, its own."""
    step: int | None
    tokens: float | None
    """Tokens trained on so far, earlier stages included; None, as the step, of a listed model directory."""
    length: int | None
    """Tokens per sequence in its stage; None for the model's own trained length."""
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
    checkpoints = checkpoints_of(run.folder)
    steps = complete_steps(checkpoints)
    for step in steps:
        yield step, checkpoints / f"step-{step}"
    if run.steps not in steps and (run.folder / "model" / "config.json").is_file():
        yield run.steps, run.folder / "model"


def measure_each(
    options: argparse.Namespace,
    of_model: Callable[[argparse.Namespace], Figures],
    of_checkpoints: Callable[[Sequence[Checkpoint], argparse.Namespace], Figures],
) -> dict[str, Figures]:
    """The figures of each model or run on the command line, by its path; with --checkpoints, of all of them as one training.

    Args:
        options: with those of add_models_argument. `of_model` and `of_checkpoints` get a copy that has the path as "model".

    Raises:
        ConfigError: models beside run folders, or a path that is named twice.
    """
    paths: list[Path] = options.models
    for number, path in enumerate(paths):
        if path.resolve() in [other.resolve() for other in paths[:number]]:
            raise ConfigError(f"{path} is named twice; name each once.")
    runs = {path: find_checkpoints(path) for path in paths}
    run = next((path for path in paths if runs[path]), None)
    model = next((path for path in paths if not runs[path]), None)
    if run is not None and options.checkpoints:
        raise ConfigError(f"--checkpoints: {run} is a run folder, whose checkpoints are found without this option.")
    if run is not None and model is not None:
        raise ConfigError(
            f"{run} is a run folder, of which each checkpoint is measured, and {model} is one model: name only models, such as "
            f"{run / 'model'}, or only run folders."
        )
    if options.checkpoints:
        names = short_names([shown(path) for path in paths])
        listed = [Checkpoint(name, None, None, None, path) for name, path in zip(names, paths, strict=True)]
        return {shown(paths[-1]): of_checkpoints(listed, _with(options, model=paths[-1]))}
    return {
        shown(path): of_checkpoints(found, _with(options, model=path))
        if found
        else of_model(_with(options, model=path))
        for path, found in runs.items()
    }


def measure_checkpoints(
    checkpoints: Sequence[Checkpoint],
    options: argparse.Namespace,
    measure: Callable[[Samples], Figures],
    own: Collection[str] = (),
) -> Figures:
    """The figures of each checkpoint of a training, in order, and what they have in common.

    Args:
        options: for captured_or_capture; without a length, each checkpoint is measured at its stage's.
        measure: computes the figures of a checkpoint's samples.
        own: passed to captured_or_capture.
    """
    rows: list[Figures] = []
    shared: Figures = {}
    for checkpoint in progress(checkpoints, unit="checkpoint", desc="checkpoints"):
        chosen = _with(options, length=options.length or checkpoint.length)
        samples = captured_or_capture(checkpoint.path, chosen, own)
        settings = settings_of(checkpoint.path, chosen, samples)
        row = {name: getattr(checkpoint, name) for name in ("stage", "step", "tokens")}
        rows.append(row | {"length": samples.length, "path": shown(checkpoint.path), **measure(samples)})
        names = ("data", "buckets", "per_bucket", "seed", "bos", "document_starts", *READING, "dtype")
        shared = {name: settings[name] for name in names}
    return {"model": shown(options.model), **shared, "length": options.length, "checkpoints": rows}


def _with(options: argparse.Namespace, **changed: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(options), **changed})
