"""The sections on plasticity and on the geometry of queries and keys."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from markupsafe import Markup

from farsight.analysis.plasticity.options import TARGET_DROP
from farsight.analysis.timeline import checkpoint_name
from farsight.json_files import or_nan
from farsight.reports.charts import Axis, Series, heat_map, line_chart, short_tokens
from farsight.reports.page import figure, folded, heading, legend, line_figure, note, panels, table
from farsight.reports.results import Result, labelled

LAYER = Axis("layer", "whole")
CLASSES = ("position-dominated", "Q-positional", "K-positional", "content-focused", "mixed")


def figure_text(value: float | None, digits: int = 3) -> str:
    """A figure as text, without a sign before zero, or a dash for none."""
    return "–" if value is None or not math.isfinite(value) else f"{value:z.{digits}f}"


def layer_figure(lines: Sequence[Series], title: str, caption: str) -> Markup:
    """A legend, and a chart of lines over layers beside a table of their figures."""
    return line_figure(lines, LAYER, Axis(title, say="{:.3g}".format), (caption, f"By layer: {title}."))


def by_layer(values: Mapping[str, Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """Points by layer from {"0": {key: …}, …}."""
    return sorted((float(layer), or_nan(figures.get(key))) for layer, figures in values.items())


def show_plasticity(results: Sequence[Result]) -> list[Markup]:
    """Plasticity by position, by layer, and by the distances of keys; and over a run's checkpoints."""
    models, runs = _models_and_runs(results)
    parts = _profile_parts(models) if models else []
    return parts + _while_it_trained(runs, _plasticity_rows)


def _models_and_runs(results: Sequence[Result]) -> tuple[list[Result], list[Result]]:
    """The results of one model each, and those of the checkpoints of one run each."""
    runs = [result for result in results if "checkpoints" in result.values]
    return [result for result in results if "checkpoints" not in result.values], runs


def _while_it_trained(
    runs: Sequence[Result], rows_of: Callable[[Result], tuple[Sequence[str], list[list[str]], str]]
) -> list[Markup]:
    """A table for each run, of the columns, rows and caption that `rows_of` gives; the first column is the checkpoint's name."""
    parts = [heading("While it trained")] * bool(runs)
    for result in runs:
        columns, rows, caption = rows_of(result)
        named = [[checkpoint_name(c), *row] for c, row in zip(result.values["checkpoints"], rows, strict=True)]
        parts.append(table(["checkpoint", *columns], named, f"{result.model.name}: {caption}"))
    return parts


def _profile_parts(results: Sequence[Result]) -> list[Markup]:
    found = labelled(results)
    profiles = [
        Series(name, [(at, or_nan(ap)) for at, ap in zip(r.values["positions"], r.values["profile"], strict=True)], n)
        for r, name, n in found
    ]
    chart = line_chart(
        profiles,
        Axis("position of the query in tokens"),
        Axis("attention plasticity", say="{:.3f}".format, ends=(0, 1)),
    )
    drops = [Series(name, by_layer(r.values["layers"], "ap_drop"), n) for r, name, n in found]
    header = ["model", "0–20 %", "20–40 %", "40–60 %", "60–80 %", "80–100 %", "overall", "drop", "target"]
    rows = [
        [
            name,
            *map(figure_text, (*r.values["quintiles"], r.values["ap_overall"], r.values["ap_drop"])),
            "met" if or_nan(r.values["ap_drop"]) < TARGET_DROP else "not met",
        ]
        for r, name, _ in found
    ]
    caption = f"Means over fifths of the context; the drop is the first minus the last, and the target is a drop below {TARGET_DROP:.2f}."
    return [
        note(
            "How likely a random query is to change which of two earlier keys a head prefers: 1 if the query alone decides, 0 if "
            "positions do. Mean over heads. `farsight plasticity --help` says how it is computed."
        ),
        legend(profiles),
        figure(chart, "By the position of the query.", table(header, rows, caption)),
        heading("By layer"),
        layer_figure(drops, "drop", "The plasticity that each layer's heads lose from the first fifth to the last."),
        heading("By the distances of keys"),
        panels(_distance_map(name, r.values) for r, name, _ in found),
    ]


def _distance_map(name: str, values: Mapping[str, Any]) -> tuple[str, Markup, str]:
    """Name, heat map of plasticity by the distance between keys (across) and from their middle to the query (down), and caption."""
    heat = values["heat"]
    edges, cells, pairs = heat["distances"], heat["plasticity"], heat["pairs"]
    said = [short_tokens(round(edge)) for edge in edges[1:]]
    shares = {
        (column, row): value for row, line in enumerate(cells) for column, value in enumerate(line) if value is not None
    }

    def hover(column: int, row: int) -> str:
        value = figure_text(shares.get((column, row)))
        return (
            f"{name}\nkeys {edges[column]:,.0f} to {edges[column + 1]:,.0f} apart, query {edges[row]:,.0f} to "
            f"{edges[row + 1]:,.0f} from their middle: {value} ({pairs[row][column]:,} pairs)"
        )

    picture = heat_map(said, said, shares, hover, ("tokens between keys, up to", "from the query"), of="plasticity")
    return name, picture, "Mean plasticity of pairs of keys. Empty: no pairs."


def _plasticity_rows(result: Result) -> tuple[Sequence[str], list[list[str]], str]:
    """Bias and plasticity over a run's checkpoints (the thesis' Table 6.2)."""
    keys = ("key_correlation", "ap_overall", "ap_first", "ap_drop")
    rows = [
        [
            f"{c['bias_strength']:.3g}",
            figure_text(c["bias_context"], 2),
            f"{c['key_slope']:.3g}",
            *(figure_text(c[key]) for key in keys),
        ]
        for c in result.values["checkpoints"]
    ]
    columns = ("bias per token", "bias × context", "|α_K|", "|r_K|", "AP overall", "AP first 20 %", "AP drop")
    return columns, rows, "bias strength and plasticity while it trained, each checkpoint at its stage's length."


def _geometry_rows(result: Result) -> tuple[Sequence[str], list[list[str]], str]:
    """Parts of the bias strength, and classes of heads, over a run's checkpoints (Figures 6.5 and A.4)."""
    found = [checkpoint["model_summary"] for checkpoint in result.values["checkpoints"]]
    rows = [
        [
            f"{s['bias_strength']:.3g}",
            figure_text(s["query_mean"]),
            f"{s['abs_key_slope']:.3g}",
            figure_text(s["separation"]),
            *(f"{100 * s['class_shares'][kind]:.0f} %" for kind in CLASSES),
        ]
        for s in found
    ]
    columns = ("bias per token", "μ_Q", "|α_K|", "separation", *CLASSES)
    return columns, rows, "bias strength, its parts, and heads by class while it trained."


def show_geometry(results: Sequence[Result]) -> list[Markup]:
    """Variation of queries and keys with position, and the bias it gives late keys; and over a run's checkpoints."""
    models, runs = _models_and_runs(results)
    return (_geometry_parts(models) if models else []) + _while_it_trained(runs, _geometry_rows)


def _geometry_parts(results: Sequence[Result]) -> list[Markup]:
    found = labelled(results)
    bias = [Series(name, by_layer(r.values["layers"], "bias_context"), n) for r, name, n in found]
    rows = [
        [
            name,
            figure_text(mean_bias(r.values["heads"]), 2),
            f"{sum(head['bias_strength'] > 0 for head in r.values['heads'])} of {len(r.values['heads'])}",
            *(str(sum(head["class"] == kind for head in r.values["heads"])) for kind in CLASSES),
        ]
        for r, name, _ in found
    ]
    return [
        note(
            "Bias strength: how much the mean query's score grows if a key comes a whole context later; above 0, late keys are "
            "favoured. Classes: whether the first principal component of queries and of keys follows position. "
            "`farsight geometry --help` says how both are computed."
        ),
        layer_figure(bias, "bias strength × context", "Mean of each layer's heads, before scores are divided by √H."),
        table(
            ["model", "bias × context", "recency heads", *CLASSES],
            rows,
            "Heads by class, and those that favour late keys.",
        ),
        folded("Every head", *map(_heads_table, results)),
    ]


def mean_bias(heads: Sequence[Mapping[str, Any]]) -> float:
    """The heads' mean of bias strength × context."""
    return fmean(head["bias_context"] for head in heads)


def _heads_table(result: Result) -> Markup:
    keys = ("r_q", "r_k", "query_mean", "separation", "plane_share")
    rows = [
        [
            f"{h['layer']}.{h['head']}",
            h["class"],
            figure_text(h["bias_context"], 2),
            *(figure_text(h[key]) for key in keys),
        ]
        for h in result.values["heads"]
    ]
    header = ["head", "class", "bias × context", *keys]
    return table(header, rows, f"{result.model.name}: layer and query head.")
