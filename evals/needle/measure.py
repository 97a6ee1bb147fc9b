"""A model's accuracy in finding what is hidden in its context, by the context's length and the needle's depth."""

import argparse
import dataclasses
from collections.abc import Collection, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from farsight.data.order import hash64
from farsight.data.retrieval.needles import Haystack, Sample, answer_tokens
from farsight.data.retrieval.tasks import Task, parse_task
from farsight.data.texts import read_texts
from farsight.data.tokenizers.tokenizer import Tokenizer, find_tokenizer_dir, load_tokenizer_dir
from farsight.errors import ConfigError
from farsight.inference.decoder import Decoder
from farsight.inference.generate.completions import encode_prompt, generate
from farsight.inference.loading import LoadedModel
from farsight.inference.model_options import reading_options
from farsight.inference.scope_growth import with_growing_scopes
from farsight.model.build import set_length
from farsight.progress import progress
from farsight.remote import shown

WRONG_KEPT = 20
"""Answers scoring below 1 that are written to the JSON file, for each model and reading."""

READINGS = {"": "as trained", "_scope_length": "scopes grown"}
"""Readings past the trained length: the suffix of their keys in the figures, and their description."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """The questions: `trials` at each length and depth."""

    task: Task
    lengths: tuple[int, ...]
    """In tokens, ascending."""
    depths: tuple[float | None, ...]
    """A single None for tasks without depth."""
    trials: int
    seed: int = 0
    haystack: str | None = None
    """The user's text; None generates one."""

    def questions(self, length: int) -> list["Question"]:
        return [Question(length, depth, trial) for depth in self.depths for trial in range(self.trials)]

    def sample(self, question: "Question", tokenizer: Tokenizer) -> Sample:
        """The prompt and its answers.

        Raises:
            ConfigError: the length is too short for the task; the message names the shortest possible.
        """
        depth = -1 if question.depth is None else round(question.depth * 10**9)
        haystack = Haystack(hash64(self.seed, question.length, depth, question.trial), self.haystack)
        try:
            return self.task.sample(haystack, tokenizer, question.length, question.depth)
        except ValueError as error:
            raise ConfigError(f"--lengths {question.length}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Question:
    length: int
    depth: float | None
    trial: int


@dataclasses.dataclass(frozen=True)
class Answer:
    """A model's answer and its score."""

    question: Question
    score: float
    expected: tuple[str, ...]
    found: str


def measure(
    loaded: LoadedModel,
    grid: Grid,
    rows_at_once: int = 8,
    new_tokens: int | None = None,
    rank: int = 0,
    world: int = 1,
) -> dict[str, Any]:
    """The model's accuracy in each cell.

    Args:
        rows_at_once: prompts read together.
        new_tokens: length of each answer; None for as many tokens as the right one takes.
        rank, world: this process's number, and how many share the questions; every process returns all figures.

    Returns:
        {"cells": [{"length", "depth", "accuracy", "trials"}], "mean", "wrong": […]}; for scopes that can grow, unless
        one reading was asked for, at lengths beyond the trained one, also "cells_scope_length", "mean_scope_length" and "wrong_scope_length".

    Raises:
        ConfigError: a length that is too short for the task.
    """
    decoder, config = loaded.decoder, loaded.config
    readings = {"": decoder}
    grown = with_growing_scopes(config) if loaded.scope_max is None else None
    if grown is not None and max(grid.lengths) > loaded.trained_length:
        readings["_scope_length"] = Decoder(decoder.model, grown, decoder.extension, decoder.chunk, decoder.name)
    # Up to the trained length, grown scopes are the same as trained ones.
    measured = {
        length: [reading for reading in readings if not reading or length > loaded.trained_length]
        for length in grid.lengths
    }
    shares = {length: grid.questions(length)[rank::world] for length in grid.lengths}
    answers: dict[str, list[Answer]] = {reading: [] for reading in readings}
    total = sum(length * len(shares[length]) * len(measured[length]) for length in grid.lengths)
    done = 0
    with progress(total=total, unit="token", unit_scale=True, desc=f"needles, {loaded.path.name}") as bar:
        for length in grid.lengths:
            questions = progress(shares[length], unit="prompt", desc=f"prompts of {length:,} tokens")
            samples = [grid.sample(question, loaded.tokenizer) for question in questions]
            for reading in measured[length]:
                texts = complete(
                    readings[reading], loaded.tokenizer, samples, rows_at_once, new_tokens, bar, loaded.end_tokens
                )
                done += length * len(samples)
                bar.update(done - bar.n)  # the bar counts whole lengths, prompts are shorter by their answers
                answers[reading] += [
                    Answer(question, grid.task.score(text, sample.answers), sample.answers, text)
                    for question, sample, text in zip(shares[length], samples, texts, strict=True)
                ]
    set_length(decoder.model, config, config.trained_length)
    figures: dict[str, Any] = {}
    for reading, own in answers.items():
        if reading:
            own = [answer for answer in answers[""] if answer.question.length <= loaded.trained_length] + own
        everyone = [own]
        if world > 1:
            everyone = [[] for _ in range(world)]
            dist.all_gather_object(everyone, own)
        figures |= {f"{key}{reading}": value for key, value in _figures(grid, [*chain(*everyone)]).items()}
    return figures


def complete(
    decoder: Decoder,
    tokenizer: Tokenizer,
    samples: Sequence[Sample],
    rows_at_once: int = 8,
    new_tokens: int | None = None,
    bar: tqdm | None = None,
    end_tokens: Collection[int | None] | None = None,
) -> list[str]:
    """The model's greedy continuation of each prompt.

    Args:
        new_tokens: length of each; None for as many tokens as the right answer takes.
        bar: advanced by the prompt tokens read.
        end_tokens: used in place of the tokenizer's.
    """
    budgets = [new_tokens or answer_tokens(sample, tokenizer) for sample in samples]
    texts = [""] * len(samples)
    for budget in sorted(set(budgets)):
        numbers = [n for n in range(len(samples)) if budgets[n] == budget]
        for batch in (numbers[i : i + rows_at_once] for i in range(0, len(numbers), rows_at_once)):
            prompts = [encode_prompt(tokenizer, samples[n].prompt) for n in batch]
            completions = generate(
                decoder, tokenizer, prompts, budget, rows_at_once=rows_at_once, bar=bar, end_tokens=end_tokens
            )
            for n, completion in zip(batch, completions, strict=True):
                texts[n] = completion.text
    return texts


def _figures(grid: Grid, answers: Sequence[Answer]) -> dict[str, Any]:
    cells: list[dict[str, Any]] = []
    for length in grid.lengths:
        for depth in grid.depths:
            scores = [a.score for a in answers if (a.question.length, a.question.depth) == (length, depth)]
            cells.append({"length": length, "depth": depth, "accuracy": fmean(scores), "trials": len(scores)})
    wrong = [
        {**dataclasses.asdict(answer.question), "expected": list(answer.expected), "found": answer.found}
        for answer in sorted(answers, key=lambda a: (a.question.length, a.question.depth or 0, a.question.trial))
        if answer.score < 1
    ]
    mean = fmean(float(cell["accuracy"]) for cell in cells)
    return {"cells": cells, "mean": mean, "wrong": wrong[:WRONG_KEPT]}


def table(figures: dict[str, Any]) -> str:
    """Accuracy in percent, with a column for each length and a line for each depth."""
    trained = figures["trained_length"]
    lines = [f"{figures['task']}: accuracy in %, {figures['trials']} trials a cell; trained at {trained:,} tokens"]
    for reading, meaning in READINGS.items():
        cells = figures.get(f"cells{reading}")
        if not cells:
            continue
        note = f" ({meaning})" if "cells_scope_length" in figures else ""
        lines.append(f"mean {100 * figures[f'mean{reading}']:.1f}{note}")
        lengths = list(dict.fromkeys(cell["length"] for cell in cells))
        lines.append(f"{'depth':>9}" + "".join(f"{length:>10,}" for length in lengths))
        for depth in dict.fromkeys(cell["depth"] for cell in cells):
            row = [f"{100 * cell['accuracy']:>10.1f}" for cell in cells if cell["depth"] == depth]
            lines.append(f"{'' if depth is None else f'{100 * depth:.1f}':>9}" + "".join(row))
    return "\n".join(lines)


def parse_depths(values: Sequence[str]) -> tuple[float, ...]:
    """Depths from --depths: one whole number spaces that many evenly from 0 to 1 (a single one at 0.5); anything else lists them.

    Raises:
        ConfigError: no depths, or a depth that is not a number from 0 to 1.
    """
    if len(values) == 1 and values[0].isdecimal():
        number = int(values[0])
        if not number:
            raise ConfigError("--depths 0: set how many depths, 1 or more; the one depth 0 is --depths 0.0.")
        return tuple(i / (number - 1) for i in range(number)) if number > 1 else (0.5,)
    depths = []
    for value in values:
        try:
            depths.append(float(value))
        except ValueError:
            raise ConfigError(f"--depths {value}: write a number of depths, or depths from 0 to 1.") from None
        if not 0 <= depths[-1] <= 1:
            raise ConfigError(f"--depths {value}: 0 is the start of the haystack and 1 its end.")
    return tuple(sorted(set(depths)))


def read_grid(options: argparse.Namespace) -> Grid:
    """The questions that the command's options ask for.

    Raises:
        ConfigError: an unknown task, invalid depths, or a haystack that cannot be read.
    """
    task = parse_task(options.task)
    depths = parse_depths(options.depths)
    text = None if options.haystack is None else "\n".join(read_texts(options.haystack))
    lengths = tuple(sorted(set(options.lengths)))
    return Grid(task, lengths, depths if task.by_depth else (None,), options.trials, options.seed, text)


def about(loaded: LoadedModel, grid: Grid, options: argparse.Namespace) -> dict[str, Any]:
    """The model, task and settings that the JSON file records beside the figures."""
    return {
        "model": shown(loaded.path),
        "task": options.task,
        "seed": grid.seed,
        "trials": grid.trials,
        "haystack": None if options.haystack is None else str(options.haystack),
        "trained_length": loaded.trained_length,
        **reading_options(options),
    }


def show(grid: Grid, folder: Path) -> None:
    """Prints the first prompt and its answer."""
    tokenizer = load_tokenizer_dir(find_tokenizer_dir(folder) or folder)
    sample = grid.sample(grid.questions(grid.lengths[0])[0], tokenizer)
    print(f"{sample.prompt}\n\n→ {', '.join(sample.answers)}")
