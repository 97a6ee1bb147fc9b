"""The report's sections on plasticity and on the geometry of queries and keys."""

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from farsight.analysis.plasticity.options import TARGET_DROP
from farsight.json_files import or_nan
from farsight.reports.page import Part, figure, folded, note, section, table, tag
from farsight.reports.results import Result, line_numbers, names
from farsight.reports.svg_axes import Axis, linear_axis, short_tokens
from farsight.reports.svg_charts import Series, heat_map, heat_map_scale, legend, line_chart

CLASSES = ("position-dominated", "Q-positional", "K-positional", "content-focused", "mixed")


def figure_text(value: float | None, digits: int = 3) -> str:
    """A figure as text, or a dash for none."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def layer_axis(values: Sequence[float]) -> Axis:
    """An axis of layers with a tick at each layer, or at every few."""
    first, last = int(min(values, default=0)), int(max(values, default=0))
    step = max(1, math.ceil((last - first) / 16))
    ticks = tuple((float(layer), str(layer)) for layer in range(first, last + 1, step))
    return Axis(first - 0.3, max(last, first + 1) + 0.3, ticks, "layer")


def layer_chart(lines: Sequence[Series], title: str, digits: int = 3, y: Axis | None = None) -> Element:
    """A chart of lines over layers."""
    points = [point for line in lines for point in line.points]
    return line_chart(
        lines,
        layer_axis([x for x, _ in points]),
        y or linear_axis([y for _, y in points], title),
        lambda s, x, y: f"{s.name}\nlayer {x:.0f}: {y:.{digits}g}",
    )


def layer_figure(lines: Sequence[Series], title: str, caption: str, digits: int = 3, y: Axis | None = None) -> Element:
    """A chart of lines over layers, with a table of their figures."""
    layers = sorted({x for line in lines for x, _ in line.points})
    known = [dict(line.points) for line in lines]
    rows: list[list[Part]] = [
        [f"{layer:.0f}", *("–" if math.isnan(of.get(layer, math.nan)) else f"{of[layer]:.{digits}g}" for of in known)]
        for layer in layers
    ]
    figures = table(["layer", *(line.name for line in lines)], rows, f"By layer: {title}.")
    return figure(layer_chart(lines, title, digits, y), caption, figures)


def by_layer(values: Mapping[str, Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """Points by layer from {"0": {key: …}, …}."""
    return sorted((float(layer), or_nan(figures.get(key))) for layer, figures in values.items())


def plasticity_section(results: Sequence[Result], absent: Sequence[Part]) -> Element:
    """Plasticity by position, by layer, and by the distances of keys."""
    results = [result for result in results if "profile" in result.values]
    if not results:
        return section("Plasticity", *absent)
    named = list(zip(results, names(results), line_numbers(results), strict=True))
    profiles = [
        Series(name, [(at, or_nan(ap)) for at, ap in zip(r.values["positions"], r.values["profile"], strict=True)], n)
        for r, name, n in named
    ]
    points = [point for line in profiles for point in line.points]
    chart = line_chart(
        profiles,
        linear_axis([x for x, _ in points], "position of the query in tokens", snug=True),
        linear_axis([0.0, 1.0], "attention plasticity"),
        lambda s, x, y: f"{s.name}\nqueries at {x:,.0f}: {y:.3f}",
    )
    drops = [Series(name, by_layer(r.values["layers"], "drop"), n) for r, name, n in named]
    header = ["model", "0–20 %", "20–40 %", "40–60 %", "60–80 %", "80–100 %", "overall", "drop", "target"]
    rows: list[list[Part]] = [
        [
            name,
            *(figure_text(value) for value in r.values["quintiles"]),
            figure_text(r.values["overall"]),
            figure_text(r.values["drop"]),
            "met" if or_nan(r.values["drop"]) < TARGET_DROP else "not met",
        ]
        for r, name, _ in named
    ]
    parts: list[Part] = [
        note(
            "How likely a random query is to change which of two earlier keys a head prefers: 1 if the query alone decides, 0 if "
            "positions do. Mean over heads. ", tag("code", "farsight plasticity --help"), " says how it is computed."
        ),
        legend(profiles),
        figure(chart, "By the position of the query.", table(header, rows, f"Means over fifths of the context; the drop is the first minus the last, and the target is a drop below {TARGET_DROP:.2f}.")),
        tag("h3", "By layer"),
        layer_figure(drops, "drop", "The plasticity that each layer's heads lose from the first fifth to the last."),
        tag("h3", "By the distances of keys"),
        heat_map_scale(),
        tag("div", *(_heat_panel(name, r.values) for r, name, _ in named), class_="panels"),
    ]  # fmt: skip
    return section("Plasticity", *parts, *absent)


def _heat_panel(name: str, values: Mapping[str, Any]) -> Element:
    """A heat map of plasticity by the distance between keys (across) and from their middle to the query (down)."""
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
    return tag("div", tag("h4", name), figure(picture, "Mean plasticity of pairs of keys. Empty: no pairs."))


def checkpoints_section(results: Sequence[Result]) -> Element | None:
    """Bias and plasticity over a run's checkpoints (the thesis' Table 6.2)."""
    found = [result for result in results if result.values.get("checkpoints")]
    if not found:
        return None
    header = [
        "checkpoint",
        "bias per token",
        "bias × context",
        "α_K",
        "|r_K|",
        "AP overall",
        "AP first 20 %",
        "AP drop",
    ]
    tables = [
        table(
            header,
            [
                [
                    f"{c['stage']}, step {c['step']:,}",
                    f"{c['bias_strength']:.3g}",
                    figure_text(c["bias_context"], 2),
                    f"{c['key_slope']:.3g}",
                    *(figure_text(c[key]) for key in ("key_correlation", "overall", "first", "drop")),
                ]
                for c in result.values["checkpoints"]
            ],
            f"{result.model.name}: bias strength and plasticity while it trained, each checkpoint at its stage's length.",
        )
        for result in found
    ]
    return section("While it trained", *tables)


def geometry_section(results: Sequence[Result], absent: Sequence[Part]) -> Element:
    """Variation of queries and keys with position, and the bias it gives late keys."""
    if not results:
        return section("Geometry of queries and keys", *absent)
    named = list(zip(results, names(results), line_numbers(results), strict=True))
    bias = [Series(name, by_layer(r.values["layers"], "bias_context"), n) for r, name, n in named]
    header = ["model", "bias × context", "recency heads", *CLASSES]
    rows: list[list[Part]] = []
    for r, name, _ in named:
        heads = r.values["heads"]
        counts = [sum(head["class"] == kind for head in heads) for kind in CLASSES]
        rows.append(
            [
                name,
                figure_text(sum(head["bias_context"] for head in heads) / len(heads), 2),
                f"{sum(head['bias_strength'] > 0 for head in heads)} of {len(heads)}",
                *map(str, counts),
            ]
        )
    return section(
        "Geometry of queries and keys",
        note(
            "Bias strength: how much the mean query's score grows if a key comes a whole context later; above 0, late keys are "
            "favoured. Classes: whether the first principal component of queries and of keys follows position. ",
            tag("code", "farsight geometry --help"), " says how both are computed."
        ),
        legend(bias),
        layer_figure(bias, "bias strength × context", "Mean of each layer's heads, before scores are divided by √H."),
        table(header, rows, "Heads by class, and those that favour late keys."),
        *absent,
    )  # fmt: skip


def heads_table(results: Sequence[Result]) -> Element | None:
    """A folded table of each model's heads."""
    if not results:
        return None
    keys = ("r_q", "r_k", "query_mean", "separation", "plane_share")
    header = ["head", "class", "bias × context", *keys]
    tables = [
        table(
            header,
            [
                [
                    f"{h['layer']}.{h['head']}",
                    h["class"],
                    figure_text(h["bias_context"], 2),
                    *(figure_text(h[key]) for key in keys),
                ]
                for h in result.values["heads"]
            ],
            f"{result.model.name}: layer and query head.",
        )
        for result in results
    ]
    return folded("Every head", *tables)
