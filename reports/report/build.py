"""Builds the page of `farsight report`, and its own figures as JSON."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from farsight.files import write_text
from farsight.model.build import count_parameters
from farsight.reports.page import Part, command, missing, note, page, section, table, tag
from farsight.reports.report.collect import collect
from farsight.reports.report.measure import command_line, measure
from farsight.reports.report.sections import SECTIONS
from farsight.reports.results import Result, of_kind
from farsight.reports.sections.cost import DEFAULT_LENGTHS, ModelCost, bytes_text, cost_section, model_costs, percent
from farsight.reports.sections.perplexity import perplexity_text
from farsight.reports.sections.training import losses_section, models_section, named, stages, trained_tokens
from farsight.reports.tool_section import ToolSection
from farsight.training.runs import NamedModel, find_models

PASSKEY = "passkey"
"""The task of farsight needle that models are compared by."""


def report(
    models: Sequence[NamedModel],
    results: Sequence[Result],
    costs: Sequence[ModelCost],
    made_by: str,
    data: Sequence[Path] = (),
    lengths: Sequence[int] = (),
) -> str:
    """The page.

    Args:
        made_by: the command line, shown at the page's end.
        data, lengths: used in commands for missing figures.
    """

    def shown(tool: ToolSection) -> Element:
        found = of_kind(results, tool.command)
        measured = {result.model.number for result in found}
        without = [model for model in models if model.number not in measured and model.weights is not None]
        commands = [command_line(tool, model, data, lengths) for model in without]
        absent = [missing(f"Not measured: {', '.join(model.name for model in without)}.", commands)] * bool(without)
        return cost_section(costs, found, absent) if tool.render is None else tool.render(found, absent)

    weightless = [model.name for model in models if model.weights is None]
    return page(
        " · ".join(model.name for model in models),
        note(f"{len(models)} model{'s' * (len(models) > 1)}, side by side. Made on {datetime.now():%d %B %Y, %H:%M}."),
        section("At a glance", _glance(models, results, costs)),
        losses_section(models),
        *map(shown, SECTIONS),
        models_section(models),
        tag(
            "footer",
            *[tag("p", f"Without weights, so that nothing can be measured: {', '.join(weightless)}.")]
            * bool(weightless),
            tag("p", "This page was made by"),
            command(made_by),
            tag("p", "from these files:"),
            *_sources(results),
        ),
    )


def _glance(models: Sequence[NamedModel], results: Sequence[Result], costs: Sequence[ModelCost]) -> Element:
    """The most important figures, one row for each model."""
    longest = costs[0].costs[-1].length
    header = [
        "model", "parameters", "trained length", "trained on", "held-out loss", "perplexity", "needles", f"KV cache at {longest:,}",
    ]  # fmt: skip
    rows: list[list[Part]] = []
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
            tag("span", bytes_text(cost.cache_bytes), " ", tag("small", percent(cost.cache_bytes / cost.dense_cache_bytes))),
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


def _sources(results: Sequence[Result]) -> list[Part]:
    files = dict.fromkeys(str(result.file) for result in results)
    return [tag("ul", *(tag("li", tag("code", file)) for file in files))] if files else [tag("p", "none")]


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


def write_report(options: argparse.Namespace, made_by: str) -> None:
    """Measures what is missing if the options say so, and writes the page and the figures.

    Args:
        made_by: the command line, shown on the page.
    """
    models = find_models(options.models)
    results = collect(models, options.results)
    if options.measure:
        measure(models, results, options.data, options.lengths)
        results = collect(models, options.results)
    costs = model_costs(models, sorted({*DEFAULT_LENGTHS, *options.lengths}))
    write_text(options.out, report(models, results, costs, made_by, options.data, options.lengths))
    if options.json:
        write_text(options.json, json.dumps(figures(models, costs), indent=2) + "\n")
    print(options.out)
