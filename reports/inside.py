"""One page about what was found inside a model, or several side by side, and the same figures as CSV.

    farsight inside MODEL_DIR --measure --data FILE --out inside.html --csv inside/
    farsight inside runs/scope runs/rope --out inside.html
    farsight inside runs/rope --results graft.json --out inside.html

Takes what farsight report takes, config files left out: run folders, recipes' folders, model directories, adapters, checkpoints. The
page is a single file that loads nothing and runs no script. Its figures come from JSON files of farsight plasticity, farsight geometry,
farsight layers, farsight layer-probes, farsight probes, farsight order-awareness and farsight graft-sweep, in the analysis/ folder of a
run or model or named by --results. What was not measured is named with the command that does. --measure runs the tools (all but
graft_sweep, which takes two models) where a model has no result of them, on --data, and keeps theirs in its analysis/.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from xml.etree.ElementTree import Element

from farsight import cli
from farsight.cli import positive
from farsight.configs.load import ConfigError
from farsight.files import prepare_file, write_text
from farsight.model.build import count_parameters
from farsight.reports.csv_file import write_csv
from farsight.reports.inside_results import ANALYSIS, MEASURED, can_be_measured, command_line, measure
from farsight.reports.page import Part, command, missing, note, page, section, table, tag
from farsight.reports.results import Result, collect_from, of_kind
from farsight.reports.sections.layers import (
    graft_section,
    layer_probes_section,
    layers_section,
    order_section,
    position_section,
)
from farsight.reports.sections.plasticity import (
    TARGET,
    checkpoints_section,
    figure_text,
    geometry_section,
    heads_table,
    number,
    plasticity_section,
)
from farsight.reports.sections.training import models_section, named
from farsight.training.runs import ReportedModel, find_models

SECTIONS: dict[str, Callable[[Sequence[Result], Sequence[Part]], Element]] = {
    "plasticity": plasticity_section,
    "geometry": geometry_section,
    "layers": layers_section,
    "layer_probes": layer_probes_section,
    "probes": position_section,
    "order_awareness": order_section,
}


def report(models: Sequence[ReportedModel], results: Sequence[Result], made_by: str, data: Path | None = None) -> str:
    """The page.

    Args:
        made_by: the command line, shown at its end.
        data: what the commands for missing figures are given.
    """

    def absent(kind: str) -> list[Element]:
        measured = {result.model.number for result in of_kind(results, kind)}
        without = [model for model in models if model.number not in measured and can_be_measured(kind, model)]
        commands = [command_line(kind, model, data) for model in without]
        return [missing(f"Not measured: {', '.join(model.name for model in without)}.", commands)] * bool(without)

    files = dict.fromkeys(str(result.file) for result in results)
    sections = [SECTIONS[kind](of_kind(results, kind), absent(kind)) for kind in MEASURED]
    others = [checkpoints_section(of_kind(results, "plasticity")), graft_section(of_kind(results, "graft_sweep"))]
    return page(
        "Inside " + " · ".join(model.name for model in models),
        note(f"How these models use their context. Made on {datetime.now():%d %B %Y, %H:%M}."),
        section("At a glance", _glance(models, results)),
        *sections,
        *(part for part in others if part is not None),
        *(part for part in [heads_table(of_kind(results, "geometry"))] if part is not None),
        models_section(models),
        tag(
            "footer",
            tag("p", "This page was made by"),
            command(made_by),
            tag("p", "from these files:"),
            tag("ul", *(tag("li", tag("code", file)) for file in files)) if files else tag("p", "none"),
        ),
    )


def _glance(models: Sequence[ReportedModel], results: Sequence[Result]) -> Element:
    """The figures that one looks at first, a row a model."""

    def first(model: ReportedModel, kind: str) -> dict | None:
        return next((dict(r.values) for r in of_kind(results, kind) if r.model is model), None)

    rows: list[list[Part]] = []
    for model in models:
        plasticity, geometry = first(model, "plasticity"), first(model, "geometry")
        layers, probes, order = first(model, "layers"), first(model, "probes"), first(model, "order_awareness")
        heads = geometry["heads"] if geometry else []
        errors = [number(layer["error"]) for layer in probes["layers"]] if probes else []
        rows.append([
            named(model),
            f"{count_parameters(model.config):,}",
            f"{model.config.trained_length:,}",
            figure_text(plasticity.get("overall")) if plasticity else "–",
            figure_text(plasticity.get("drop")) if plasticity else "–",
            figure_text(sum(h["bias_context"] for h in heads) / len(heads), 2) if heads else "–",
            figure_text(layers["spearman_absolute"]) if layers else "–",
            f"{min(errors):.1f}" if errors else "–",
            f"{order['horizon']:,}" if order else "–",
        ])  # fmt: skip
    header = [
        "model", "parameters", "trained length", "plasticity", "drop", "bias × context", "δ with |ρ|", "position error",
        "order horizon",
    ]  # fmt: skip
    caption = (
        f"Plasticity: the mean over positions, and what it loses from the first fifth of the context to the last (target: below {TARGET:.2f}). "
        "Bias: what keys gain in score over a whole context. δ with |ρ|: rank correlation of the layers' sensitivity with their RoPE's "
        "influence. Position error: of the best layer's probe, in tokens. –: not measured."
    )
    return table(header, rows, caption)


@cli.command
def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="farsight inside", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+", metavar="RUN_OR_MODEL")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the page to write (.html)")
    parser.add_argument("--csv", type=Path, metavar="FOLDER", help="write the figures as CSV here too")
    parser.add_argument("--results", type=Path, nargs="+", default=[], metavar="FILE", help="JSON files of our tools")
    parser.add_argument("--measure", action="store_true", help="run the tools where there is no result of them")
    parser.add_argument("--data", type=Path, metavar="FILE", help="text to measure on")
    parser.add_argument(
        "--length", type=positive, metavar="L", help="tokens a sequence (default: each model's trained length)"
    )
    parser.add_argument("--device", help="to measure on (default: the accelerator if there is one, else cpu)")
    options = parser.parse_args(arguments)
    if options.measure and not options.data:
        parser.error("--measure needs --data FILE, the text to measure on")
    prepare_file(options.out)
    models = find_models(options.models)
    bare = [str(model.path) for model in models if model.weights is None]
    if bare:
        raise ConfigError(
            f"{', '.join(bare)}: no weights, so there is nothing to look into; farsight positions shows configs."
        )
    if options.measure:
        given = {"--length": options.length, "--device": options.device}
        more = [part for name, value in given.items() if value is not None for part in (name, str(value))]
        measure(models, collect_from(ANALYSIS, models, options.results), options.data, more)
    results = collect_from(ANALYSIS, models, options.results)
    made_by = shlex.join(["farsight", "inside", *(sys.argv[1:] if arguments is None else arguments)])
    write_text(options.out, report(models, results, made_by, options.data))
    written = write_csv(options.csv, results) if options.csv else []
    print("\n".join(map(str, [options.out, *written])))


if __name__ == "__main__":
    main()
