"""Builds the page of `farsight report` and `farsight inside`, and its own figures as JSON."""

import argparse
import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farsight.files import write_text
from farsight.json_files import fields_of, read_object
from farsight.model.build import count_parameters
from farsight.remote import shown
from farsight.reports.collect import collect_results
from farsight.reports.page import page, section
from farsight.reports.results import Result, of_kind
from farsight.reports.sections.analyses import ANALYSES
from farsight.reports.sections.benchmarks import HARNESS
from farsight.reports.sections.cost import DEFAULT_LENGTHS, GENERATE, ModelCost, cost_parts, model_costs
from farsight.reports.sections.glance import glance
from farsight.reports.sections.needles import NEEDLE
from farsight.reports.sections.perplexity import PERPLEXITY
from farsight.reports.sections.training import (
    evaluations_section,
    losses_section,
    models_section,
    stages,
    trained_tokens,
)
from farsight.reports.tools import Tool
from farsight.training.runs import NamedModel

EVALUATIONS = (PERPLEXITY, NEEDLE, GENERATE, HARNESS)
TOOLS = (*EVALUATIONS, *ANALYSES)
"""In the page's order."""


def write_report(
    models: Sequence[NamedModel],
    options: argparse.Namespace,
    tools: Sequence[Tool],
    made_by: str,
    lengths: Sequence[int] = (),
    more: Sequence[str] = (),
) -> tuple[list[Result], list[ModelCost]]:
    """Measures what is missing if the options say so, writes the page, and returns the results and costs that it shows.

    The page has the results of all tools.

    Args:
        tools: those to measure with, or whose commands the page shows for models without a result.
        made_by: the command line, shown on the page.
        lengths: context lengths to measure at, and to add to those of the cost.
        more: further options for the tools that measure.
    """
    results = collect(models, options.results)
    if options.measure:
        known = {(result.model.number, result.kind) for result in results}
        for model in models:
            for tool in tools:
                if tool.measured and (model.number, tool.kind) not in known and model.weights and tool.fits(model):
                    tool.measure(model, options.data, lengths, more)
        results = collect(models, options.results)
    costs = model_costs(models, sorted({*DEFAULT_LENGTHS, *lengths}))
    weightless = ", ".join(model.name for model in models if model.weights is None)
    sections = [
        tool.section(
            models if tool in tools else (),
            results,
            options.data,
            lengths,
            cost_parts(costs) if tool is GENERATE else (),
        )
        for tool in TOOLS
    ]
    text = page(
        " · ".join(model.name for model in models),
        f"{len(models)} models, side by side." if len(models) > 1 else "1 model.",
        [
            section("At a glance", glance(models, results, costs, tools)),
            losses_section(models),
            evaluations_section(models),
            *itertools.chain(*sections),
            models_section(models),
        ],
        made_by,
        [result.file for result in results],
        [f"Without weights, so that nothing can be measured: {weightless}."] if weightless else (),
    )
    write_text(options.out, text)
    print(options.out)
    return results, costs


def collect(models: Sequence[NamedModel], files: Sequence[Path]) -> list[Result]:
    """The results in the models' folders and in the named files; failing these, perplexities that a recipe measured itself.

    Raises:
        ConfigError: a file that cannot be read, or a named file without a result of these models.
    """
    results = collect_results(TOOLS, models, files)
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


def figures(models: Sequence[NamedModel], costs: Sequence[ModelCost]) -> dict[str, Any]:
    """The report's own figures, for other programs; the tools' figures are in their own files."""
    return {
        "models": {
            shown(model.path): {
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
