"""Summarises a recipe: `summary.json`, a table, and a picture of its loss curves."""

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farsight.checkpoints.load import load_model
from farsight.data.texts import encode_file, has_fields
from farsight.data.tokenizers.tokenizer import load_tokenizer_dir
from farsight.evals.perplexity.measure import perplexity_by_length
from farsight.evals.windows import Windows
from farsight.launch.recipe.held_out import asked_lengths
from farsight.outputs import write_json
from farsight.parallel.device import default_device
from farsight.plots import PALETTE, borders, picture, token_unit
from farsight.training.metrics_file import loss_points, run_summary
from farsight.training.stages import Recipe, Stage

logger = logging.getLogger("farsight")


def report(recipe: Recipe, stages: Sequence[Stage], root: Path, texts: Sequence[Path]) -> None:
    """Writes `summary.json` and `loss.png` for the finished stages, and prints the table.

    Perplexities of earlier stages are reused from the existing summary if they still apply, and measured otherwise.

    Args:
        stages: the finished stages.
        root: the recipe's run folder.
        texts: for each stage of the recipe the file to measure its perplexity on; empty measures none.
    """
    path = root / "summary.json"
    known = json.loads(path.read_text(encoding="utf-8"))["stages"] if path.is_file() else []
    entries = []
    for number, stage in enumerate(stages):
        training = stage.config.training
        entry = run_summary(stage.name, stage.folder, training.seq_len, training.steps)
        if texts:
            last = texts[-1] if texts[-1] != texts[number] else None
            # A file of held-out documents is read whole: it has no more of them than the recipe asks for.
            tokens = recipe.perplexity_tokens if recipe.perplexity_data else 0
            asked = {
                "perplexity_of": [str(texts[number]), list(recipe.perplexity_lengths), tokens],
                "perplexity_last_of": last and str(last),
            }
            old = known[number] if number < len(known) else {}
            if old.get("train_loss") == entry["train_loss"] and asked.items() <= old.items():
                entry |= {key: value for key, value in old.items() if key.startswith("perplexity")}
            else:
                entry |= _perplexity(recipe, stage, texts[number], last) | asked
        entries.append(entry)
    summary = {"model_dir": str(stages[-1].model_dir), "stages": entries}
    write_json(path, summary)
    draw_losses(stages, root / "loss.png")
    print(summary_table(entries))
    print(f"loss curves: {root / 'loss.png'}   figures: {path}")
    print(f"model directory: {stages[-1].model_dir}", flush=True)


def _perplexity(recipe: Recipe, stage: Stage, data: Path, last: Path | None) -> dict[str, Any]:
    """Perplexity of a stage's model on `data`, and on the last stage's documents if they are others."""
    device = default_device()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model, config = load_model(stage.model_dir, device=device, dtype=dtype)
    tokenizer = load_tokenizer_dir(stage.model_dir)

    def measured(file: Path) -> dict[str, Any]:
        documents, asked = encode_file(file, tokenizer), asked_lengths(recipe, stage)
        longest = max(map(len, documents), default=0)
        lengths = [length for length in asked if length <= longest]
        if len(lengths) < len(asked):
            logger.warning(
                f"{file}: its longest document has {longest:,} tokens: perplexity at {max(asked):,} is skipped"
            )
        if not lengths:
            return {"lengths": {}}
        windows = Windows(final=has_fields(file))
        documents = _first(documents, recipe.perplexity_tokens or sys.maxsize, max(lengths), windows)
        return perplexity_by_length(model, config, documents, lengths, windows)

    figures = measured(data)
    grown = figures.get("lengths_scope_length")
    return (
        {"perplexity": figures["lengths"]}
        | ({"perplexity_scope_length": grown} if grown else {})
        | ({"perplexity_last": measured(last)["lengths"]} if last else {})
    )


def _first(documents: Sequence[Tensor], tokens: int, length: int, windows: Windows) -> list[Tensor]:
    """The first documents in which windows of `length` tokens read about `tokens` tokens."""
    if windows.final:
        return [document for document in documents if len(document) >= length][: max(1, tokens // length)]
    taken = []
    for document in documents:
        taken.append(document[:tokens])
        tokens -= len(taken[-1])
    return taken


def summary_table(entries: Sequence[dict[str, Any]]) -> str:
    """A table of the stages: losses, speed, and perplexity at each length, on each stage's own data and on the last one's."""
    lines = ["", f"{'stage':<16}{'steps':>7}{'train loss':>18}{'val loss':>18}{'tok/s':>9}   perplexity by length"]
    for e in entries:
        losses = [f"{v[0]:.3f} → {v[1]:.3f}" if v else "–" for v in (e["train_loss"], e["val_loss"])]
        lines.append(
            f"{e['name']:<16}{e['steps']:>7}{losses[0]:>18}{losses[1]:>18}{e['tokens_per_second']:>9,.0f}   "
            + _by_length(e["perplexity"])
        )
    if any("perplexity_last" in e for e in entries):
        lines.append("perplexity on the last stage's documents:")
        lines += [f"{e['name']:<16}{_by_length(e.get('perplexity_last', e['perplexity']))}" for e in entries]
    if any(e.get("evaluations") for e in entries):
        lines.append("last evaluations on the way:")
        lines += [f"{e['name']:<16}{_values(e['evaluations'])}" for e in entries if e.get("evaluations")]
    return "\n".join(lines)


def _values(figures: dict[str, float]) -> str:
    return "   ".join(f"{name}: {value:.4g}" for name, value in figures.items())


def _by_length(figures: dict[str, float]) -> str:
    return "   ".join(f"{int(length):,}: {value:.1f}" for length, value in figures.items())


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
