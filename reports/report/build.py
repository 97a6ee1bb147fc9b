"""Builds the page of `farsight report`, and its own figures as JSON."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from farsight.files import write_text
from farsight.json_files import fields_of, read_object
from farsight.model.build import count_parameters
from farsight.outputs import write_json
from farsight.reports.page import page, section, small, table
from farsight.reports.results import Result, of_kind
from farsight.reports.sections.benchmarks import HARNESS
from farsight.reports.sections.cost import (
    DEFAULT_LENGTHS,
    GENERATE,
    ModelCost,
    bytes_text,
    cost_parts,
    model_costs,
    percent,
)
from farsight.reports.sections.needles import NEEDLE
from farsight.reports.sections.perplexity import PERPLEXITY, perplexity_text
from farsight.reports.sections.training import losses_section, models_section, named, stages, trained_tokens
from farsight.reports.tools import Tools
from farsight.training.runs import NamedModel, find_models

TOOLS = Tools("evals", (PERPLEXITY, NEEDLE, GENERATE, HARNESS))
PASSKEY = "passkey"
"""The task of farsight needle that models are compared by."""


def write_report(options: argparse.Namespace, made_by: str) -> None:
    """Measures what is missing if the options say so, and writes the page and the figures.

    Args:
        made_by: the command line, shown on the page.
    """
    models = find_models(options.models)
    results = collect(models, options.results)
    if options.measure:
        TOOLS.measure(models, results, options.data, options.lengths)
        results = collect(models, options.results)
    costs = model_costs(models, sorted({*DEFAULT_LENGTHS, *options.lengths}))
    costly = {GENERATE.command: cost_parts(costs)}
    weightless = ", ".join(model.name for model in models if model.weights is None)
    text = page(
        " · ".join(model.name for model in models),
        f"{len(models)} model{'s' * (len(models) > 1)}, side by side.",
        [
            section("At a glance", _glance(models, results, costs)),
            losses_section(models),
            *TOOLS.sections(models, results, options.data, options.lengths, costly),
            models_section(models),
        ],
        made_by,
        [result.file for result in results],
        [f"Without weights, so that nothing can be measured: {weightless}."] if weightless else (),
    )
    write_text(options.out, text)
    write_json(options.json, figures(models, costs))
    print(options.out)


def collect(models: Sequence[NamedModel], files: Sequence[Path]) -> list[Result]:
    """The results in the models' folders and in the named files; failing these, perplexities that a recipe measured itself.

    Raises:
        ConfigError: a file that cannot be read, or a named file without a result of these models.
    """
    results = TOOLS.collect(models, files)
    measured = {result.model.number for result in of_kind(results, PERPLEXITY.kind)}
    return results + [found for model in models if model.number not in measured for found in _recipe_summary(model)]


def _recipe_summary(model: NamedModel) -> list[Result]:
    """Perplexities that a recipe measured after its last stage."""
    file = model.path / "summary.json"
    if not file.is_file() or not model.runs:
        return []
    stages = read_object(file).get("stages")
    with fields_of(file):
        last: dict[str, Any] = next((stage for stage in stages or () if stage["name"] == model.runs[-1].name), {})
        if not last.get("perplexity"):
            return []
        data, _, tokens = last["perplexity_of"]
        text = f"the first {tokens:,} tokens of {data}" if tokens else data
        values = {"lengths": last["perplexity"], "data": [text], "trained_length": last["seq_len"]}
        if "perplexity_scope_length" in last:
            values["lengths_scope_length"] = last["perplexity_scope_length"]
    return [Result(model, "perplexity", file, values)]


def _glance(models: Sequence[NamedModel], results: Sequence[Result], costs: Sequence[ModelCost]) -> Markup:
    """The most important figures, one row for each model."""
    longest = costs[0].costs[-1].length
    header = [
        "model", "parameters", "trained length", "trained on", "held-out loss", "perplexity", "needles", f"KV cache at {longest:,}",
    ]  # fmt: skip
    rows = []
    for model in models:
        tokens, losses = trained_tokens(model), [stage["val_loss"] for stage in stages(model) if stage["val_loss"]]
        cost = next(c.costs[-1] for c in costs if c.model is model)
        rows.append([
            named(model),
            f"{count_parameters(model.config):,}",
            f"{model.config.trained_length:,}",
            "–" if tokens is None else f"{tokens:,}",
            f"{losses[-1][-1]:.3f}" if losses else "–",
            _first_perplexity(model, results),
            _first_mean(model, results),
            small(bytes_text(cost.cache_bytes), percent(cost.cache_bytes / cost.dense_cache_bytes)),
        ])  # fmt: skip
    caption = (
        "Lengths and training in tokens. Perplexity at the trained length, or at the nearest one measured. Needles: the mean over all "
        "cells, of the passkey task unless another is named. Both without --extend and sliding windows. Cache: for one sequence in bfloat16, with its share of a dense one. –: not measured or not recorded."
    )
    return table(header, rows, caption)


def _first_perplexity(model: NamedModel, results: Sequence[Result]) -> str:
    found = next((r.values["lengths"] for r in _plain(model, of_kind(results, "perplexity"))), None)
    if not found:
        return "–"
    length = min(found, key=lambda length: abs(int(length) - model.config.trained_length))
    return f"{perplexity_text(found[length])} at {int(length):,}"


def _first_mean(model: NamedModel, results: Sequence[Result]) -> str:
    tasks = [(r.values.get("task", PASSKEY), r.values["mean"]) for r in _plain(model, of_kind(results, "needle"))]
    if not tasks:
        return "–"
    task, mean = min(tasks, key=lambda found: found[0] != PASSKEY)
    return f"{100 * mean:.1f} %" + f" ({task})" * (task != PASSKEY)


def _plain(model: NamedModel, results: Sequence[Result]) -> list[Result]:
    """The model's results that compare with other models': read as trained, and not in sliding windows."""
    return [r for r in results if r.model is model and not r.values.get("extend") and not r.values.get("stride")]


def figures(models: Sequence[NamedModel], costs: Sequence[ModelCost]) -> dict[str, Any]:
    """The report's own figures, for other programs; the tools' figures are in their own files."""
    return {
        "models": {
            str(model.path): {
                "name": model.name,
                "parameters": count_parameters(model.config),
                "trained_length": model.config.trained_length,
                "tokens": trained_tokens(model),
                "stages": stages(model),
                **{
                    "cost_scope_length" if c.grown else "cost": [dataclasses.asdict(cost) for cost in c.costs]
                    for c in costs
                    if c.model is model
                },
            }
            for model in models
        }
    }
