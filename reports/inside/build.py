"""Builds the page of `farsight inside`."""

import argparse
from collections.abc import Callable, Sequence

from markupsafe import Markup

from farsight.analysis.plasticity.options import TARGET_DROP
from farsight.configs.schema import NoRotary
from farsight.errors import ConfigError
from farsight.files import write_text
from farsight.json_files import or_nan
from farsight.model.build import count_parameters
from farsight.reports.inside.csv_file import write_csv
from farsight.reports.page import page, section, table
from farsight.reports.results import Result, of_kind
from farsight.reports.sections.layers import (
    show_grafts,
    show_layer_probes,
    show_layers,
    show_order_awareness,
    show_probes,
)
from farsight.reports.sections.plasticity import figure_text, mean_bias, show_geometry, show_plasticity
from farsight.reports.sections.training import models_section, named
from farsight.reports.tools import Tool, Tools
from farsight.training.runs import NamedModel, find_models


def _tool(
    command: str,
    heading: str,
    show: Callable[[Sequence[Result]], list[Markup]],
    *options: str,
    fits: Callable[[NamedModel], bool] = lambda _: True,
) -> Tool:
    """A command that --measure runs on one text, with its options; it writes its module's name into its results."""
    return Tool(
        command,
        heading,
        lambda values: values.get("tool") == f"analysis.{command.replace('-', '_')}",
        show,
        lambda texts, _: ["--data", texts[0], *options],
        measured=True,
        fits=fits,
    )


def _rotates(model: NamedModel) -> bool:
    return any(not isinstance(layer.rotary, NoRotary) for layer in model.config.layers())


TOOLS = Tools(
    "analysis",
    (
        _tool("plasticity", "Plasticity", show_plasticity),
        _tool("geometry", "Geometry of queries and keys", show_geometry),
        _tool("layers", "Layer sensitivity", show_layers),
        _tool("layer-probes", "One layer disturbed", show_layer_probes, "--probe", "mask", fits=_rotates),
        _tool("probes", "Position probes", show_probes),
        _tool("order-awareness", "Order awareness", show_order_awareness),
        Tool("graft-sweep", "Grafts", lambda values: values.get("tool") == "analysis.graft_sweep", show_grafts),
    ),
)


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
    results = TOOLS.collect(models, options.results)
    data = [options.data] if options.data else []
    if options.measure:
        given = {"--length": options.length, "--device": options.device}
        more = [part for name, value in given.items() if value is not None for part in (name, str(value))]
        TOOLS.measure(models, results, data, more=more)
        results = TOOLS.collect(models, options.results)
    text = page(
        "Inside " + " · ".join(model.name for model in models),
        "How these models use their context.",
        [
            section("At a glance", _glance(models, results)),
            *TOOLS.sections(models, results, data),
            models_section(models),
        ],
        made_by,
        [result.file for result in results],
    )
    write_text(options.out, text)
    written = write_csv(options.csv, results) if options.csv else []
    print("\n".join(map(str, [options.out, *written])))


def _glance(models: Sequence[NamedModel], results: Sequence[Result]) -> Markup:
    """The most important figures, one row for each model."""

    def first(model: NamedModel, kind: str) -> dict | None:
        return next((dict(r.values) for r in of_kind(results, kind) if r.model is model), None)

    rows = []
    for model in models:
        plasticity, geometry = first(model, "plasticity"), first(model, "geometry")
        layers, probes, order = first(model, "layers"), first(model, "probes"), first(model, "order_awareness")
        errors = [or_nan(layer["error"]) for layer in probes["layers"]] if probes else []
        rows.append([
            named(model),
            f"{count_parameters(model.config):,}",
            f"{model.config.trained_length:,}",
            figure_text(plasticity.get("overall")) if plasticity else "–",
            figure_text(plasticity.get("drop")) if plasticity else "–",
            figure_text(mean_bias(geometry["heads"]), 2) if geometry else "–",
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
