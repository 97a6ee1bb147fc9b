"""Summarises a recipe: `summary.json`, a table, and a picture of its loss curves."""

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from farsight.checkpoints.load import load_model
from farsight.configs.schema import JobConfig
from farsight.data.sample import sample_texts
from farsight.data.texts import encode_file
from farsight.data.tokenizers.tokenizer import load_tokenizer_dir
from farsight.evals.perplexity.measure import perplexity_by_length
from farsight.files import write_text
from farsight.outputs import write_json
from farsight.parallel.device import default_device
from farsight.plots import PALETTE, borders, picture, token_unit
from farsight.training.metrics_file import loss_points, run_summary
from farsight.training.stages import Recipe, Stage

logger = logging.getLogger("farsight")


def write_held_out(config: JobConfig, path: Path, tokens: int) -> Path:
    """Writes held-out documents of the data to one file, with at least `tokens` tokens if there are enough; returns its path."""
    if path.is_file():
        return path
    # Five bytes per token are enough for any common tokenizer.
    write_text(path, "\n".join(sample_texts(config.data, 5 * tokens, "validation")))
    return path


def report(recipe: Recipe, stages: Sequence[Stage], root: Path, data: Path | None) -> None:
    """Writes `summary.json` and `loss.png` for the finished stages, and prints the table.

    Perplexities of earlier stages are reused from the existing summary if they still apply, and measured otherwise.

    Args:
        stages: the finished stages.
        root: the recipe's run folder.
        data: text file to measure perplexity on; None measures none.
    """
    path = root / "summary.json"
    known = json.loads(path.read_text(encoding="utf-8"))["stages"] if path.is_file() else []
    entries = []
    for number, stage in enumerate(stages):
        training = stage.config.training
        entry = run_summary(stage.name, stage.folder, training.seq_len, training.steps)
        old = known[number] if number < len(known) else {}
        asked = [str(data), list(recipe.perplexity_lengths), recipe.perplexity_tokens]
        if old.get("train_loss") == entry["train_loss"] and old.get("perplexity_of") == asked:
            entry |= {key: value for key, value in old.items() if key.startswith("perplexity")}
        elif data is not None and recipe.perplexity_lengths:
            entry |= _perplexity(recipe, stage, data) | {"perplexity_of": asked}
        entries.append(entry)
    summary = {"model_dir": str(stages[-1].model_dir), "stages": entries}
    write_json(path, summary)
    draw_losses(stages, root / "loss.png")
    print(summary_table(entries))
    print(f"loss curves: {root / 'loss.png'}   figures: {path}")
    print(f"model directory: {stages[-1].model_dir}", flush=True)


def _perplexity(recipe: Recipe, stage: Stage, data: Path) -> dict[str, Any]:
    device = default_device()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model, config = load_model(stage.model_dir, device=device, dtype=dtype)
    documents, left = [], recipe.perplexity_tokens or sys.maxsize
    for document in encode_file(data, load_tokenizer_dir(stage.model_dir)):
        documents.append(document[:left])
        left -= len(documents[-1])
    longest = max(map(len, documents), default=0)
    asked = [multiple * stage.config.training.seq_len for multiple in recipe.perplexity_lengths]
    lengths = [length for length in asked if length <= longest]
    if len(lengths) < len(asked):
        logger.warning(f"{data} has {longest:,} tokens in one document: perplexity at {max(asked):,} is skipped")
    figures = perplexity_by_length(model, config, documents, lengths)
    grown = figures.get("lengths_scope_length")
    return {"perplexity": figures["lengths"]} | ({"perplexity_scope_length": grown} if grown else {})


def summary_table(entries: Sequence[dict[str, Any]]) -> str:
    """A table of the stages: losses, speed, and perplexity at each length."""
    lines = ["", f"{'stage':<16}{'steps':>7}{'train loss':>18}{'val loss':>18}{'tok/s':>9}   perplexity by length"]
    for e in entries:
        losses = [f"{v[0]:.3f} → {v[1]:.3f}" if v else "–" for v in (e["train_loss"], e["val_loss"])]
        figures = "   ".join(f"{int(length):,}: {value:.1f}" for length, value in e["perplexity"].items())
        lines.append(
            f"{e['name']:<16}{e['steps']:>7}{losses[0]:>18}{losses[1]:>18}{e['tokens_per_second']:>9,.0f}   {figures}"
        )
    return "\n".join(lines)


def draw_losses(stages: Sequence[Stage], path: Path) -> None:
    """Draws training and validation loss against tokens, with all stages in one panel."""
    curves: list[Any] = []
    for stage in stages:
        curves.append(loss_points(stage.folder, curves[-1][0][-1][0] if curves else 0.0))
    ends = [train[-1][0] for train, _ in curves]
    unit, size = token_unit(ends[-1])
    with picture(path, 9, 4.5) as figure:
        axes = figure.subplots()
        for number, (stage, both) in enumerate(zip(stages, curves, strict=True)):
            points, held_out = ([(tokens / size, loss) for tokens, loss in curve] for curve in both)
            colour = PALETTE[number % len(PALETTE)]
            label = f"{stage.name}, {stage.config.training.seq_len:,} tokens"
            axes.plot(*zip(*points, strict=True), color=colour, label=label)
            if held_out:
                label = "held-out documents" if number == len(stages) - 1 else ""
                axes.plot(*zip(*held_out, strict=True), "o--", color=colour, markeredgecolor="black", label=label)
        borders(axes, [end / size for end in ends[:-1]])
        axes.set(xlabel=f"{unit} tokens", ylabel="loss, nats per token", title=path.parent.name)
        axes.legend()
