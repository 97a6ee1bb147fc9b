"""The config section on evaluations of a model that trains: `[[evaluations]]`, one class per kind, and its conditions.

A kind's own options have the names and meanings of the command's (`farsight perplexity`, `needle`, `harness`).
"""

import dataclasses
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from farsight.configs.checkpointing import Checkpoint
from farsight.configs.training import Validation
from farsight.errors import ConfigError, nearest
from farsight.ranges import Count, Size


@dataclass(frozen=True, kw_only=True)
class EvaluationShare:
    """Options common to all kinds of evaluations."""

    every: Size = 500
    """Steps between evaluations; one more comes after the last step."""
    name: str = ""
    """Name of its figures ("NAME.mean"), of letters, digits, '_' and '-', unique in the run; empty takes the kind."""
    where: Literal["inside", "beside"] = "inside"
    """inside: rank 0 evaluates the model, gathered from all ranks, and the run waits. beside: a process on the machine of rank 0
    evaluates a checkpoint of the step while the run goes on; its figures arrive later."""
    device: str = ""
    """Device that evaluates, as the command's --device ("cpu", "cuda:7"); empty takes the first GPU that the process may use."""
    stop_if: str = ""
    """Stop the run, after saving, if this is true of the figures: one of them, <, <=, > or >=, and a number
    ("needle.mean < 0.5"). The exit status is 6."""
    warn_if: str = ""
    """Log a warning if this is true of the figures, likewise."""


@dataclass(frozen=True, kw_only=True)
class PerplexityEvaluation(EvaluationShare):
    """Perplexity by context length; its figures are NAME.LENGTH ("perplexity.4096")."""

    kind: Literal["perplexity"] = "perplexity"
    data: tuple[str, ...] = ()
    """Texts to measure on: UTF-8, .jsonl or .parquet; .gz or .zst too."""
    field: str = ""
    """Key of the text in .jsonl, column in .parquet; empty takes "text"."""
    lengths: tuple[Size, ...] = ()
    """Window lengths in tokens."""
    windows: Count = 0
    """Most windows of each length; 0 takes all."""
    documents: bool = False
    """Measure the same final 256 tokens of every long document, from contexts of each length."""


@dataclass(frozen=True, kw_only=True)
class NeedleEvaluation(EvaluationShare):
    """Needle in a haystack; its figures are NAME.mean and NAME.LENGTH, accuracies from 0 to 1."""

    kind: Literal["needle"] = "needle"
    lengths: tuple[Size, ...] = ()
    """Lengths of prompt and answer together, in tokens."""
    depths: Size = 10
    """Depths of the needle, evenly spaced."""
    task: str = "passkey"
    """TASK[:KEY=N,…], as in docs/evaluation/needle.md."""
    trials: Size = 10
    """Prompts at each length and depth."""
    seed: Count = 0
    """Seed of the generated prompts."""
    haystack: str = ""
    """UTF-8 text or .jsonl to hide needles in; empty generates it."""
    rows: Size = 8
    """Prompts read together."""


@dataclass(frozen=True, kw_only=True)
class HarnessEvaluation(EvaluationShare):
    """Tasks of lm-evaluation-harness; its figures are NAME.mean, NAME.GROUP and NAME.TASK."""

    kind: Literal["harness"] = "harness"
    tasks: tuple[str, ...] = ()
    """Groups and tasks, as in docs/evaluation/evaluate.md."""
    limit: Count = 0
    """Most questions of each task and length; 0 asks all."""
    shots: Count | None = None
    """Examples before each question, for tasks outside the named groups; none takes the task's own number."""
    data_dir: str = ""
    """Folder with TASK.jsonl and TASK.fewshot.jsonl, for tasks whose data sets can't be downloaded."""
    lengths: tuple[Size, ...] = ()
    """Lengths of RULER's prompts; empty takes 4096."""
    max_length: Count = 0
    """Most tokens in a text; 0 takes the trained length."""
    batch_size: Size = 8
    """Texts read together."""


VALIDATION_LOSS = "val_loss"
"""The figure of `checkpoint.keep_best` that comes from validation."""

Evaluation = PerplexityEvaluation | NeedleEvaluation | HarnessEvaluation

_SHARED = {field.name for field in dataclasses.fields(EvaluationShare)} - {"device"} | {"kind"}
_REQUIRED = {"perplexity": ("data", "lengths"), "needle": ("lengths",), "harness": ("tasks",)}


def name_of(evaluation: Evaluation) -> str:
    """An evaluation's name: the kind unless it has one of its own."""
    return evaluation.name or evaluation.kind


def command_arguments(evaluation: Evaluation) -> list[str]:
    """The options of `farsight KIND` that an evaluation asks for; those that are empty are left to the command's defaults."""
    arguments: list[str] = []
    for field in dataclasses.fields(evaluation):
        value = getattr(evaluation, field.name)
        if field.name in _SHARED or value is None or (value == field.default and not value):
            continue
        values = value if isinstance(value, tuple) else () if value is True else (value,)
        arguments += [f"--{field.name.replace('_', '-')}", *map(str, values)]
    return arguments


def files_of(evaluation: Evaluation) -> list[str]:
    """The files and folders that an evaluation reads."""
    named = (*getattr(evaluation, "data", ()), getattr(evaluation, "haystack", ""), getattr(evaluation, "data_dir", ""))
    return [path for path in named if path]


# ── Conditions ────────────────────────────────────────────────────────────────────────────────────────

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt,
}  # fmt: skip


@dataclass(frozen=True)
class Condition:
    """A comparison of a figure with a number."""

    figure: str
    comparison: str
    bound: float

    def holds(self, figures: dict[str, float]) -> bool:
        """Whether it is true of the figures; false if the figure was not measured."""
        value = figures.get(self.figure)
        return value is not None and _COMPARISONS[self.comparison](value, self.bound)


def parse_condition(text: str, where: str) -> Condition:
    """Reads a condition.

    Args:
        where: the option's name, for messages.

    Raises:
        ConfigError: not one comparison of a figure with a number.
    """
    match = re.fullmatch(r"\s*([^\s<>=]+)\s*(<=|>=|<|>)\s*(\S+)\s*", text)
    try:
        bound = float(match[3]) if match else math.nan
    except ValueError:
        bound = math.nan
    if match is None or not math.isfinite(bound):
        raise ConfigError(
            f"{where} = {text!r} must compare one figure with a number, by <, <=, > or >=: 'needle.mean < 0.5'."
        )
    return Condition(match[1], match[2], bound)


def conditions(evaluation: Evaluation) -> dict[str, Condition]:
    """An evaluation's conditions by the option's name, "stop_if" and "warn_if", as far as they are set.

    Raises:
        ConfigError: as `parse_condition`.
    """
    given = {"stop_if": evaluation.stop_if, "warn_if": evaluation.warn_if}
    return {
        key: parse_condition(text, f"{key} of the evaluation {name_of(evaluation)}")
        for key, text in given.items()
        if text
    }


# ── Checks ────────────────────────────────────────────────────────────────────────────────────────────


def check_evaluations(evaluations: Sequence[Evaluation], checkpoint: Checkpoint, validation: Validation) -> None:
    """Refuses evaluations that lack options or share a name, conditions that can't be read, and a best figure of none of them.

    `evals.live` checks the names of figures, which depend on the kind's options.

    Raises:
        ConfigError: naming the evaluation and the option.
    """
    names: list[str] = []
    saves = checkpoint.enable and not checkpoint.load_only
    for number, evaluation in enumerate(evaluations):
        where, name = f"evaluations.{number}", name_of(evaluation)
        if not re.fullmatch(r"[\w-]+", name):
            raise ConfigError(f"{where}.name = {name!r} must be of letters, digits, '_' and '-'.")
        if name in names:
            raise ConfigError(f"{where}: there is another evaluation {name!r}; give each a name of its own.")
        names.append(name)
        for key in _REQUIRED[evaluation.kind]:
            if not getattr(evaluation, key):
                raise ConfigError(f"{where} ({name}) needs {key}: see --help evaluations.")
        if evaluation.where == "beside" and not saves:
            raise ConfigError(
                f'{where}.where = "beside" needs checkpoints: set checkpoint.enable = true and load_only = false, or "inside".'
            )
        conditions(evaluation)
    best = checkpoint.keep_best
    if not best:
        return
    if not saves:
        raise ConfigError(
            f"checkpoint.keep_best = {best!r} needs checkpoints: set enable = true and load_only = false."
        )
    if best == VALIDATION_LOSS:
        if not validation.enable:
            raise ConfigError(f"checkpoint.keep_best = {best!r} needs validation: set validation.enable = true.")
    elif best.partition(".")[0] not in names:
        raise ConfigError(
            f"checkpoint.keep_best = {best!r}: there is no such evaluation.{nearest(best, [*names, VALIDATION_LOSS])}"
        )
