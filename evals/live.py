"""Evaluations of a model that trains (`[[evaluations]]`), with the code of `farsight perplexity`, `needle` and `harness`.

`train.py` passes `LiveEvaluations` to the trainer, which must not import this folder.
"""

import contextlib
import dataclasses
import io
import random
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farsight.configs.evaluations import (
    VALIDATION_LOSS,
    Evaluation,
    HarnessEvaluation,
    NeedleEvaluation,
    PerplexityEvaluation,
    command_arguments,
    conditions,
    name_of,
)
from farsight.configs.schema import JobConfig
from farsight.data.tokenizers.tokenizer import Tokenizer
from farsight.errors import ConfigError, nearest
from farsight.evals.harness.__main__ import read_options as of_harness
from farsight.evals.harness.run import Tasks, read_tasks
from farsight.evals.harness.run import measure as measure_tasks
from farsight.evals.harness.tasks import RULER_LENGTHS, benchmarks
from farsight.evals.needle.__main__ import read_options as of_needle
from farsight.evals.needle.measure import about, read_grid
from farsight.evals.needle.measure import measure as find_needles
from farsight.evals.perplexity.__main__ import read_options as of_perplexity
from farsight.evals.perplexity.measure import check_lengths, read_documents
from farsight.evals.perplexity.measure import measure as measure_perplexity
from farsight.evals.windows import Windows
from farsight.inference.loading import load
from farsight.inference.scope_growth import with_growing_scopes
from farsight.model.build import ModelConfig

GROWN = ".grown"
"""Ends the names of figures that are measured with scopes that grow with the length, past the trained length."""


class LiveEvaluations:
    """A run's evaluations: checks them, measures on one process, and names the figures.

    Raises:
        ConfigError: options that the command refuses, or a condition or `checkpoint.keep_best` on a figure that none of the
            evaluations has.
    """

    def __init__(self, config: JobConfig) -> None:
        self.config, best = config, config.checkpoint.keep_best
        self.higher_is_better = False
        """Whether the best value of `checkpoint.keep_best` is the highest."""
        self.tasks: dict[str, Tasks] = {}
        """lm-eval's tasks by the evaluation's name, read once: its index takes seconds."""
        for evaluation in config.evaluations:
            name = name_of(evaluation)
            with _named(name):
                read_options(dataclasses.replace(evaluation, device=""))
                known = known_figures(evaluation, config)
            for key, condition in conditions(evaluation).items():
                if condition.figure not in known:
                    raise ConfigError(
                        f"{key} of the evaluation {name}: it has no figure {condition.figure!r}.{nearest(condition.figure, known)}"
                    )
            if best == VALIDATION_LOSS or best.partition(".")[0] != name:
                continue
            if best not in known:
                raise ConfigError(f"checkpoint.keep_best = {best!r}: {name} has no such figure.{nearest(best, known)}")
            if (higher := known[best]) is None:
                raise ConfigError(
                    f"checkpoint.keep_best = {best!r}: whether more of it is better depends on the task's metric; take '{name}.mean'."
                )
            self.higher_is_better = higher

    def check(self, tokenizer: Tokenizer) -> None:
        """Opens what evaluations read, before anything is trained.

        Raises:
            ConfigError, DataError: texts or tasks that can't be used, or lengths that do not fit them.
        """
        own = Path(self.config.job.dump_folder) / "tokenizer"  # written before the first evaluation
        for evaluation in self.config.evaluations:
            with _named(name_of(evaluation)):
                options = read_options(evaluation)
                if isinstance(evaluation, HarnessEvaluation):
                    self.tasks[name_of(evaluation)] = read_tasks(own, options)
                elif isinstance(evaluation, NeedleEvaluation):
                    grid = read_grid(options)
                    for length in grid.lengths:
                        grid.sample(grid.questions(length)[0], tokenizer)
                else:
                    check_lengths(read_documents(options, tokenizer), options.lengths, Windows())

    def measure(
        self, evaluation: Evaluation, path: Path, training: tuple[ModelConfig, Iterator[tuple[str, Tensor]]] | None
    ) -> dict[str, Any]:
        """Evaluates a model in this process; returns what the command writes as JSON.

        The state of all random number generators stays as it was.

        Args:
            path: the model's, as commands take it.
            training: config and parameters of a model that trains, whose checkpoint `path` may be still to come.
        """
        options = read_options(evaluation)
        with same_randomness():
            loaded = load(path, options, training=training)
            if isinstance(evaluation, HarnessEvaluation):
                return measure_tasks(loaded, options, self.tasks[name_of(evaluation)])
            if isinstance(evaluation, PerplexityEvaluation):
                return measure_perplexity(loaded, options)
            grid = read_grid(options)
            return {**about(loaded, grid, options), **find_needles(loaded, grid, options.rows, options.new_tokens)}

    def command(self, evaluation: Evaluation, path: Path, out: Path) -> list[str]:
        """The command that evaluates a saved model in a process of its own, and writes its JSON to `out`."""
        return [
            sys.executable, "-m", "farsight", evaluation.kind, str(path), *command_arguments(evaluation), "--json", str(out),
        ]  # fmt: skip

    def figures(self, evaluation: Evaluation, results: dict[str, Any]) -> dict[str, float]:
        """Figures by "NAME.figure" from what `measure` returned, or the command wrote."""
        name = name_of(evaluation)
        return {f"{name}.{key}": float(value) for key, value in _figures(evaluation, results) if value is not None}


def read_options(evaluation: Evaluation) -> Namespace:
    """The command's options for an evaluation, without the model.

    Raises:
        ConfigError: the command refuses them.
    """
    read = {"perplexity": of_perplexity, "needle": of_needle, "harness": of_harness}[evaluation.kind]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return read([".", *command_arguments(evaluation)])
    except SystemExit:
        raise ConfigError(said.getvalue().strip().rpartition("error: ")[2]) from None


def known_figures(evaluation: Evaluation, config: JobConfig) -> dict[str, bool | None]:
    """The names of an evaluation's figures, each with whether higher is better; None if that depends on a task's metric."""
    name = name_of(evaluation)
    if isinstance(evaluation, HarnessEvaluation):
        chosen = benchmarks(evaluation.tasks, evaluation.shots, evaluation.lengths or RULER_LENGTHS)
        tasks: dict[str, bool | None] = {f"{name}.{benchmark.label}": None for benchmark in chosen}
        groups = {f"{name}.{benchmark.group}": True for benchmark in chosen if benchmark.group}
        return {f"{name}.mean": True, **groups, **tasks}
    model = ModelConfig.from_job(config)
    higher, keys = isinstance(evaluation, NeedleEvaluation), [str(length) for length in evaluation.lengths]
    longer = [length for length in evaluation.lengths if length > model.trained_length]
    grown = [str(length) for length in longer if with_growing_scopes(model) is not None]
    if higher:
        keys, grown = ["mean", *keys], ["mean", *grown] if grown else []
    return {f"{name}.{key}": higher for key in [*keys, *(key + GROWN for key in grown)]}


def _figures(evaluation: Evaluation, results: dict[str, Any]) -> Iterator[tuple[str, float | None]]:
    if isinstance(evaluation, HarnessEvaluation):
        yield "mean", results["mean"]
        yield from results["means"].items()
        for label, entry in results["results"].items():
            yield label, entry["value"]
        return
    trained = results["trained_length"]
    for reading, ending in (("", ""), ("_scope_length", GROWN)):
        if isinstance(evaluation, NeedleEvaluation):
            if f"mean{reading}" not in results:
                continue
            yield f"mean{ending}", results[f"mean{reading}"]
            cells = results[f"cells{reading}"]
            by_length = {
                length: fmean(cell["accuracy"] for cell in cells if cell["length"] == length)
                for length in sorted({cell["length"] for cell in cells})
            }
        else:
            by_length = {int(length): value for length, value in results.get(f"lengths{reading}", {}).items()}
        for length, value in by_length.items():
            if not ending or length > trained:
                yield f"{length}{ending}", value


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Puts the evaluation's name before a message about its options."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"evaluation {name}: {error}") from error


@contextlib.contextmanager
def same_randomness() -> Iterator[None]:
    """Leaves the state of all random number generators as it was: sampling and lm-eval seed and draw."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
