"""What a model finds in its context, by the context's length and by the depth at which it stands there.

    farsight needle MODEL_DIR [OTHER …] --lengths 1024 4096 --depths 10 --json F --picture F.png
    farsight needle MODEL_DIR --lengths 4096 --task variable_tracking:chains=2,hops=6 --trials 50
    torchrun --nproc_per_node 8 -m farsight needle MODEL_DIR --lengths 131072 --haystack BOOK.txt

Tasks: passkey and multikey, by length and depth; multi_passkey, multivalue, multiquery, variable_tracking, common_words and
frequent_words, by length. Prompts are made up from the seed, the length, the depth and the trial, so that all models
with a tokenizer are given the same ones, and adding a length changes none of the others. A prompt and its answer fill the
length; the model goes on greedily for as many tokens as the answer takes.
Past the trained length, a model with scopes is measured as it was trained ("trained") and with scopes that grow with the
length ("length"). docs/evaluation/needle.md describes tasks, scores and the JSON file.
"""

import argparse
import dataclasses
from collections.abc import Collection, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from farsight.cli import bounded, command, positive
from farsight.configs.check import ConfigError
from farsight.data.order import hash64
from farsight.data.retrieval.needles import Haystack, Sample, answer_tokens
from farsight.data.retrieval.tasks import TASKS, Task, parse_task
from farsight.data.texts import read_texts
from farsight.data.tokenizers.tokenizer import Tokenizer, find_tokenizer_dir, load_tokenizer_dir
from farsight.evals.needle_picture import draw
from farsight.evals.ranks import sharing_processes
from farsight.inference.decoder import Decoder
from farsight.inference.generate import encode_prompt, generate
from farsight.inference.model_options import LoadedModel, add_model_options, load
from farsight.inference.scope_growth import with_growing_scopes
from farsight.model.build import set_length
from farsight.outputs import add_output_options, check_outputs, write_figures
from farsight.progress import progress

WRONG_KEPT = 20
"""Answers with a score below 1 that are written down, of each model and reading."""

READINGS = {"": "as trained", "_scope_length": "scopes grown"}
"""Past the trained length: ends of the figures' keys, and what they mean."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """The questions: so many trials at each length and depth."""

    task: Task
    lengths: tuple[int, ...]
    """In tokens, ascending."""
    depths: tuple[float | None, ...]
    """One None for tasks without depth."""
    trials: int
    seed: int = 0
    haystack: str | None = None
    """A text; None has it made up."""

    def questions(self, length: int) -> list["Question"]:
        return [Question(length, depth, trial) for depth in self.depths for trial in range(self.trials)]

    def sample(self, question: "Question", tokenizer: Tokenizer) -> Sample:
        """The prompt and its answers.

        Raises:
            ConfigError: a length that is too short for the task, and the least.
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
    """What a model wrote, and what it is worth."""

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
        rows_at_once: prompts that are read together.
        new_tokens: of each answer; None for as many as the right one takes.
        rank, world: this process and how many share the questions; all of them get all figures.

    Returns:
        {"cells": [{"length", "depth", "accuracy", "trials"}], "mean", "wrong": […]}; for scopes that can grow and
        lengths beyond the trained one, also "cells_scope_length", "mean_scope_length" and "wrong_scope_length".

    Raises:
        ConfigError: a length that is too short for the task.
    """
    decoder, config = loaded.decoder, loaded.config
    readings = {"": decoder}
    grown = with_growing_scopes(config)
    if grown is not None and max(grid.lengths) > loaded.trained_length:
        readings["_scope_length"] = Decoder(decoder.model, grown, decoder.extension, decoder.chunk, decoder.name)
    # Up to the trained length the scopes are the same.
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
                bar.update(done - bar.n)  # a prompt leaves room for its answer
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
    """What a model writes after each prompt, greedily.

    Args:
        new_tokens: of each; None for as many as the right answer takes.
        bar: moved on by the tokens of prompts.
        end_tokens: in place of the tokenizer's.
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
    """Accuracy in per cent, a column a length and a line a depth."""
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
    """One whole number is how many depths there are, evenly spaced from 0 to 1 (one is 0.5); anything else the depths.

    Raises:
        ConfigError: no depths, or depths that are no number from 0 to 1.
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


@command
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="farsight needle", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path, nargs="+", help="model directories, adapters or checkpoints")
    parser.add_argument("--lengths", type=positive, nargs="+", required=True, help="of prompt and answer, in tokens")
    parser.add_argument(
        "--depths", nargs="+", default=["10"], metavar="D", help="how many, evenly spaced (default: 10), or the depths"
    )
    parser.add_argument(
        "--task", default="passkey", metavar="TASK[:KEY=N,…]", help=f"{', '.join(TASKS)} (default: %(default)s)"
    )
    parser.add_argument("--trials", type=positive, default=10, help="prompts at each length and depth (%(default)s)")
    parser.add_argument(
        "--seed", type=bounded(int, least=0, most=2**62), default=0, help="makes up the prompts (%(default)s)"
    )
    parser.add_argument("--haystack", type=Path, metavar="FILE", help="UTF-8 text or .jsonl to hide needles in")
    parser.add_argument("--rows", type=positive, default=8, help="prompts read together (%(default)s)")
    parser.add_argument(
        "--new-tokens", type=positive, metavar="N", help="of an answer (default: what the right one takes)"
    )
    parser.add_argument("--show", action="store_true", help="print the first prompt with its answer, and stop")
    add_model_options(parser)
    add_output_options(parser)
    options = parser.parse_args(arguments)
    check_outputs(parser, options)
    grid = _grid(options)
    if options.show:
        _show(grid, options.model_dir[0])
        return
    with sharing_processes() as (rank, world):
        results = {}
        for folder in options.model_dir:
            loaded = load(folder, options)
            figures = measure(loaded, grid, options.rows, options.new_tokens, rank, world)
            results[str(folder)] = {**_about(loaded, grid, options), **figures}
    if rank:
        return
    for folder, figures in results.items():
        if len(results) > 1:
            print(folder)
        print(table(figures))
    if options.json:
        write_figures(options.json, results)
    if options.picture:
        draw(results, options.picture)
        print(options.picture)


def _grid(options: argparse.Namespace) -> Grid:
    task = parse_task(options.task)
    depths = parse_depths(options.depths)
    text = None if options.haystack is None else "\n".join(read_texts(options.haystack))
    lengths = tuple(sorted(set(options.lengths)))
    return Grid(task, lengths, depths if task.by_depth else (None,), options.trials, options.seed, text)


def _about(loaded: LoadedModel, grid: Grid, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": str(loaded.path),
        "task": options.task,
        "seed": grid.seed,
        "trials": grid.trials,
        "haystack": None if options.haystack is None else str(options.haystack),
        "trained_length": loaded.trained_length,
        "extend": options.extend,
    }


def _show(grid: Grid, folder: Path) -> None:
    tokenizer = load_tokenizer_dir(find_tokenizer_dir(folder) or folder)
    sample = grid.sample(grid.questions(grid.lengths[0])[0], tokenizer)
    print(f"{sample.prompt}\n\n→ {', '.join(sample.answers)}")


if __name__ == "__main__":
    main()
