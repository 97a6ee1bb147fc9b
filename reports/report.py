"""One page about one or several models: how they were trained, what they measure, what they cost to serve.

    farsight report runs/quickstart --out report.html
    farsight report runs/scope runs/rope/128k/model configs/recipes/scope_llama3_8b.toml --out report.html
    farsight report runs/scope runs/rope --measure --data BOOKS.jsonl --lengths 4096 16384 --out report.html

Takes run folders, recipes' folders, model directories, adapters, checkpoints, and config files (of which it shows positions and
cost alone). The page is a single file: it loads nothing and runs no script. Figures come from the runs' metrics.jsonl, from
recipes' summary.json, and from JSON files that farsight perplexity, farsight needle, farsight harness and farsight generate wrote into
the evals/ folder of a run or model, or that --results names. What was not measured is named with the command that does.
--measure runs farsight perplexity and farsight needle where a model has no result of them, and keeps theirs in its evals/.
"""

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from farsight import cli
from farsight.files import write_text
from farsight.model.build import count_parameters
from farsight.outputs import check_outputs
from farsight.reports.measure import command_line, measure
from farsight.reports.page import Part, command, missing, note, page, section, table, tag
from farsight.reports.results import Kind, Result, collect, of_kind
from farsight.reports.sections.benchmarks import harness_section
from farsight.reports.sections.cost import DEFAULT_LENGTHS, ModelCost, bytes_text, cost_section, model_costs, percent
from farsight.reports.sections.needles import needle_section
from farsight.reports.sections.perplexity import perplexity_section, perplexity_text
from farsight.reports.sections.training import losses_section, models_section, named, stages, trained_tokens
from farsight.training.runs import ReportedModel, find_models

PASSKEY = "passkey"
"""The task of farsight needle that a model is compared by."""


def report(
    models: Sequence[ReportedModel],
    results: Sequence[Result],
    costs: Sequence[ModelCost],
    made_by: str,
    data: Sequence[Path] = (),
    lengths: Sequence[int] = (),
) -> str:
    """The page.

    Args:
        made_by: the command line, shown at its end.
        data, lengths: what the commands for missing figures are given.
    """

    def absent(kind: Kind) -> list[Element]:
        measured = {result.model.number for result in of_kind(results, kind)}
        without = [model for model in models if model.number not in measured and model.weights is not None]
        commands = [command_line(kind, model, data, lengths) for model in without]
        return [missing(f"Not measured: {', '.join(model.name for model in without)}.", commands)] * bool(without)

    weightless = [model.name for model in models if model.weights is None]
    return page(
        " · ".join(model.name for model in models),
        note(f"{len(models)} model{'s' * (len(models) > 1)}, side by side. Made on {datetime.now():%d %B %Y, %H:%M}."),
        section("At a glance", _glance(models, results, costs)),
        losses_section(models),
        perplexity_section(of_kind(results, "perplexity"), absent("perplexity")),
        needle_section(of_kind(results, "needle"), absent("needle")),
        cost_section(costs, of_kind(results, "generate"), absent("generate")),
        harness_section(of_kind(results, "harness"), absent("harness")),
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


def _glance(models: Sequence[ReportedModel], results: Sequence[Result], costs: Sequence[ModelCost]) -> Element:
    """The figures that one compares first, a row a model."""
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
        "Lengths and training in tokens. Perplexity at the trained length, or at the nearest one measured. Needles: the mean of all "
        "cells, of the passkey task where no other is named. Both without --extend and windows that slide. Cache: of one sequence in bfloat16, with its share of dense. –: not measured or not recorded."
    )
    return table(header, rows, caption)


def _first_perplexity(model: ReportedModel, results: Sequence[Result]) -> str:
    found = next((r.values["lengths"] for r in _plain(model, of_kind(results, "perplexity"))), None)
    if not found:
        return "–"
    length = min(found, key=lambda length: abs(int(length) - model.config.trained_length))
    return f"{perplexity_text(found[length])} at {int(length):,}"


def _first_mean(model: ReportedModel, results: Sequence[Result]) -> str:
    tasks = [(r.values.get("task", PASSKEY), r.values["mean"]) for r in _plain(model, of_kind(results, "needle"))]
    if not tasks:
        return "–"
    task, mean = min(tasks, key=lambda found: found[0] != PASSKEY)
    return f"{100 * mean:.1f} %" + f" ({task})" * (task != PASSKEY)


def _plain(model: ReportedModel, results: Sequence[Result]) -> list[Result]:
    """The model's own, where it was read as it was trained and in windows that do not slide: what compares between models."""
    return [r for r in results if r.model is model and not r.values.get("extend") and not r.values.get("stride")]


def _sources(results: Sequence[Result]) -> list[Part]:
    files = dict.fromkeys(str(result.file) for result in results)
    return [tag("ul", *(tag("li", tag("code", file)) for file in files))] if files else [tag("p", "none")]


def figures(models: Sequence[ReportedModel], costs: Sequence[ModelCost]) -> dict[str, Any]:
    """What the report itself worked out, for other programs; what the tools measured is in their own files."""
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


@cli.command
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="farsight report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+", metavar="RUN_OR_MODEL")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the page to write (.html)")
    parser.add_argument("--results", type=Path, nargs="+", default=[], metavar="FILE", help="JSON files of our tools")
    parser.add_argument(
        "--lengths", type=cli.bounded(int, least=1), nargs="+", default=[], metavar="L",
        help="context lengths to measure at (default: 1, 2 and 4 times each model's trained length), and to add to the cost's 1k to 128k",
    )  # fmt: skip
    parser.add_argument(
        "--measure", action="store_true", help="measure perplexity and needles where there is no result"
    )
    parser.add_argument(
        "--data", type=Path, nargs="+", default=[], metavar="FILE", help="text to measure perplexity on"
    )
    parser.add_argument("--json", type=Path, metavar="F", help="write what the report works out here too")
    options = parser.parse_args(arguments)
    if options.measure and not options.data:
        parser.error("--measure needs --data FILE, the text to measure perplexity on")
    check_outputs(parser, options, "out")
    models = find_models(options.models)
    results = collect(models, options.results)
    if options.measure:
        measure(models, results, options.data, options.lengths)
        results = collect(models, options.results)
    costs = model_costs(models, sorted({*DEFAULT_LENGTHS, *options.lengths}))
    made_by = shlex.join(["farsight", "report", *(sys.argv[1:] if arguments is None else arguments)])
    write_text(options.out, report(models, results, costs, made_by, options.data, options.lengths))
    if options.json:
        write_text(options.json, json.dumps(figures(models, costs), indent=2) + "\n")
    print(options.out)


if __name__ == "__main__":
    main()
