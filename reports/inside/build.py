"""Builds the page of `farsight inside`."""

import argparse
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from xml.etree.ElementTree import Element

from farsight.analysis.plasticity.options import TARGET_DROP
from farsight.errors import ConfigError
from farsight.files import write_text
from farsight.json_files import or_nan
from farsight.model.build import count_parameters
from farsight.reports.inside.csv_file import write_csv
from farsight.reports.inside.measure import ANALYSIS, MEASURED, can_be_measured, command_line, measure
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
    checkpoints_section,
    figure_text,
    geometry_section,
    heads_table,
    plasticity_section,
)
from farsight.reports.sections.training import models_section, named
from farsight.training.runs import NamedModel, find_models

SECTIONS: dict[str, Callable[[Sequence[Result], Sequence[Part]], Element]] = {
    "plasticity": plasticity_section,
    "geometry": geometry_section,
    "layers": layers_section,
    "layer_probes": layer_probes_section,
    "probes": position_section,
    "order_awareness": order_section,
}


def report(models: Sequence[NamedModel], results: Sequence[Result], made_by: str, data: Path | None = None) -> str:
    """The page.

    Args:
        made_by: the command line, shown at the page's end.
        data: the text named in commands for missing figures.
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


def _glance(models: Sequence[NamedModel], results: Sequence[Result]) -> Element:
    """The most important figures, one row for each model."""

    def first(model: NamedModel, kind: str) -> dict | None:
        return next((dict(r.values) for r in of_kind(results, kind) if r.model is model), None)

    rows: list[list[Part]] = []
    for model in models:
        plasticity, geometry = first(model, "plasticity"), first(model, "geometry")
        layers, probes, order = first(model, "layers"), first(model, "probes"), first(model, "order_awareness")
        heads = geometry["heads"] if geometry else []
        errors = [or_nan(layer["error"]) for layer in probes["layers"]] if probes else []
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
        f"Plasticity: the mean over positions, and what it loses from the first fifth of the context to the last (target: below {TARGET_DROP:.2f}). "
        "Bias: what keys gain in score over a whole context. δ with |ρ|: rank correlation of the layers' sensitivity with their RoPE's "
        "influence. Position error: of the best layer's probe, in tokens. –: not measured."
    )
    return table(header, rows, caption)


def write_report(options: argparse.Namespace, made_by: str) -> None:
    """Measures what is missing if the options say so, and writes the page and the CSV files.

    Args:
        made_by: the command line, shown on the page.

    Raises:
        ConfigError: a model without weights.
    """
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
    write_text(options.out, report(models, results, made_by, options.data))
    written = write_csv(options.csv, results) if options.csv else []
    print("\n".join(map(str, [options.out, *written])))
