"""The report's sections on the models themselves: their architecture and training."""

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from farsight.analysis.loss_curves.curves import read_losses
from farsight.checkpoints.cards.model import read_history, shape_text, training_rows
from farsight.configs.load import read_toml
from farsight.model.build import count_parameters
from farsight.model.position.layers import describe
from farsight.plots import token_unit
from farsight.remote import shown
from farsight.reports.charts import Axis, Mark, Point, Series, line_chart, swatch
from farsight.reports.page import facts, figure, folded, heading, legend, line_figure, missing, note, section, table
from farsight.training.metrics_file import evaluation_points, loss_points, run_summary, smoothed
from farsight.training.runs import NamedModel

MOST_POINTS = 1000
"""Most points in a loss curve; in a longer curve, points are averaged."""


def named(model: NamedModel) -> Markup:
    """A model's name with its colour and marker, which are the same in all sections."""
    return Markup('<span class="name">{}{}</span>').format(swatch(Series(model.name, (), model.number)), model.name)


def models_section(models: Sequence[NamedModel]) -> Markup:
    """Architecture, positions by layer, and recorded training of each model."""
    return section("Models", *map(_model, models))


def _model(model: NamedModel) -> Markup:
    history = read_history(model.weights) if model.weights is not None else []
    tokens = trained_tokens(model)
    known = {
        "path": shown(model.path),
        "weights": "none yet" if model.weights is None else shown(model.weights),
        "shape": shape_text(model.config),
        "parameters": f"{count_parameters(model.config):,}",
        "trained length": f"{model.config.trained_length:,} tokens",
        "trained on": "not recorded" if tokens is None else f"{tokens:,} tokens",
    }
    layers = Markup("<pre><code>{}</code></pre>").format(describe(model.config.layers()))
    parts = [heading(named(model)), facts(known), layers]
    if history:
        header, *rows = training_rows(history)
        runs = table(header, rows, "Runs that trained these weights, oldest first.", numbers=False)
        parts.append(folded("history", runs))
    return Markup().join(parts)


def trained_tokens(model: NamedModel) -> int | None:
    """Training tokens over all recorded runs; None without records."""
    if model.weights is not None and (history := read_history(model.weights)):
        return sum(entry["tokens"] for entry in history)
    return int(sum(loss_points(run.folder)[0][-1][0] for run in model.runs)) if model.runs else None


def stages(model: NamedModel) -> list[dict[str, Any]]:
    """The figures of each run that trained the model, with its number of tokens."""
    return [
        run_summary(run.name, run.folder, run.seq_len, run.steps) | {"tokens": loss_points(run.folder)[0][-1][0]}
        for run in model.runs
    ]


def losses_section(models: Sequence[NamedModel]) -> Markup:
    """Training and held-out loss over tokens, across stages."""
    drawn, marks, longest = [], set(), 1
    for model in models:
        if model.runs:
            losses = read_losses(model)
            marks |= set(losses["stages"][:-1])
            thinned, together = thin(losses["training"])
            longest = max(longest, together)
            drawn.append(Series(f"{model.name}, training", thinned, model.number, markers=False, thin=True))
            drawn.append(Series(f"{model.name}, held out", losses["held_out"], model.number))
    absent = _without_runs([model for model in models if not model.runs])
    if not drawn:
        return section("Loss", *absent)
    unit, size = token_unit(max(s.points[-1][0] for s in drawn if s.points))
    scaled = [dataclasses.replace(s, points=[(x / size, y) for x, y in s.points]) for s in drawn]
    chart = line_chart(
        scaled,
        Axis(f"{unit} tokens", say="{:,.4g}".format),
        Axis("loss, nats per token", say="{:.4f}".format),
        [Mark(mark / size) for mark in sorted(marks)],
    )
    caption = "Thin: the loss at logged training steps. With markers: the mean over held-out documents."
    caption += f" Each point of a thin line is the mean of {longest} logged steps or fewer." * (longest > 1)
    caption += " Vertical lines mark the ends of stages." * bool(marks)
    keys = legend([s for s in scaled if s.markers])
    return section("Loss", keys, figure(chart, caption, _stages_table(models)), *absent)


def evaluations_section(models: Sequence[NamedModel]) -> Markup:
    """Figures of evaluations on the way over tokens, a chart for each evaluation; empty if no run has any."""
    charts: dict[str, list[Series]] = {}
    for model in models:
        curves: dict[str, list[Point]] = {}
        tokens = 0.0
        for run in model.runs:
            for name, points in evaluation_points(run.folder, tokens).items():
                curves.setdefault(name, []).extend(points)
            tokens = loss_points(run.folder, tokens)[0][-1][0]
        for name, points in curves.items():
            lines = charts.setdefault(name.partition(".")[0], [])
            lines.append(Series(f"{model.name}, {name}" if len(models) > 1 else name, points, len(lines)))
    if not charts:
        return Markup()
    unit, size = token_unit(max(line.points[-1][0] for lines in charts.values() for line in lines))
    parts = []
    for name, lines in charts.items():
        scaled = [dataclasses.replace(line, points=[(x / size, y) for x, y in line.points]) for line in lines]
        x, y = Axis(f"{unit} tokens", say="{:,.4g}".format), Axis(name, "auto", say="{:.4g}".format)
        parts.append(line_figure(scaled, x, y, (f"{name}, evaluated while the model trained.", "From metrics.jsonl.")))
    return section("Evaluations on the way", *parts)


def _without_runs(models: Sequence[NamedModel]) -> list[Markup]:
    """How to get loss curves of models named by config files, or by what a run left instead of its folder."""
    untrained = [model for model in models if model.path.is_file()]
    parts: list[Markup] = []
    if untrained:
        starts = {model.path: "stages" in read_toml(model.path) for model in untrained}
        commands = [
            f"python {'-m farsight recipe' if recipe else 'train.py --job.config_file'} {shlex.quote(str(path))}"
            for path, recipe in starts.items()
        ]
        parts.append(missing(f"Not trained: {', '.join(model.name for model in untrained)}.", commands))
    if others := [model.name for model in models if model not in untrained]:
        parts.append(
            note(f"The losses of {', '.join(others)} are in their run folders: name those instead of the models.")
        )
    return parts


def thin(points: Sequence[Point]) -> tuple[list[Point], int]:
    """Averages groups of a curve's points to leave at most MOST_POINTS; returns the points and the size of a group."""
    together = -(-len(points) // MOST_POINTS) or 1
    return smoothed(points, together), together


def _stages_table(models: Sequence[NamedModel]) -> Markup:
    header = ["run", "context", "steps", "tokens", "training loss", "held-out loss", "tokens/s"]
    rows = []
    for model in models:
        for stage in stages(model):
            ends = [
                "–" if not pair else f"{pair[0]:.3f} → {pair[1]:.3f}"
                for pair in (stage["train_loss"], stage["val_loss"])
            ]
            name = model.name if len(model.runs) == 1 else f"{model.name}, {stage['name']}"
            speed = f"{stage['tokens_per_second']:,.0f}"
            rows.append([name, f"{stage['seq_len']:,}", f"{stage['steps']:,}", f"{stage['tokens']:,.0f}", *ends, speed])
    return table(
        header,
        rows,
        "From metrics.jsonl. Training loss: at the first step, and the mean over the last fifth of logged steps. Held-out loss: "
        "before the first step and after the last. Speed: median.",
    )
