"""The report's sections on single layers: sensitivity, probes, order awareness, grafts."""

from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from farsight.json_files import or_nan
from farsight.reports.page import Part, figure, note, section, table, tag
from farsight.reports.results import Result, line_numbers, names
from farsight.reports.sections.plasticity import figure_text, layer_axis, layer_figure
from farsight.reports.svg_axes import length_axis, short_tokens, value_axis
from farsight.reports.svg_charts import Series, heat_map, heat_map_scale, legend, line_chart


def _points(values: Sequence[float | None]) -> list[tuple[float, float]]:
    return [(float(layer), or_nan(value)) for layer, value in enumerate(values)]


def layers_section(results: Sequence[Result], absent: Sequence[Part]) -> Element:
    """Each layer's sensitivity to correctness and the influence of its RoPE."""
    if not results:
        return section("Layer sensitivity", *absent)
    named = list(zip(results, names(results), line_numbers(results), strict=True))
    delta = [Series(name, _points(r.values["delta"]), n) for r, name, n in named]
    rho = [Series(name, _points(r.values["rho"]), n) for r, name, n in named]
    header = ["model", "γ", "Spearman, ρ", "Spearman, |ρ|", "top by δ", "top by |ρ|", "shared"]
    rows: list[list[Part]] = [
        [
            name,
            f"{r.values['gamma']:g}",
            figure_text(r.values["spearman_signed"]),
            figure_text(r.values["spearman_absolute"]),
            ", ".join(map(str, r.values["top"]["delta"])),
            ", ".join(map(str, r.values["top"]["absolute_rho"])),
            f"{r.values['overlap']} (by chance {r.values['overlap_expected']:.1f})"
            if any(r.values["rotates"])
            else "–",
        ]
        for r, name, _ in named
    ]
    return section(
        "Layer sensitivity",
        note(
            "δ: the cosine distance between correct and wrong texts after a layer. ρ: the increase in loss when one layer's RoPE base is "
            "multiplied by γ. ", tag("code", "farsight layers --help"), " says how both are measured; fine-tuning reads them from its profile."
        ),
        legend(delta),
        layer_figure(delta, "δ", "Sensitivity."),
        layer_figure(rho, "ρ", "Influence of RoPE; 0 where a layer has none."),
        table(header, rows, "Rank correlation of δ with ρ, and the top layers by each.", numbers=False),
        *absent,
    )  # fmt: skip


SAID = {
    "mask": "RoPE masked in one layer",
    "coarsen": "positions coarsened in one layer",
    "noise": "noise added to one layer's output",
}


def layer_probes_section(results: Sequence[Result], absent: Sequence[Part]) -> Element:
    """Perplexity with one layer's positions masked or coarsened, or its output disturbed."""
    if not results:
        return section("One layer disturbed", *absent)
    parts: list[Part] = []
    for probe in dict.fromkeys(result.values["probe"] for result in results):
        chosen = [result for result in results if result.values["probe"] == probe]
        lines: list[Series] = []
        for r, name, n in zip(chosen, names(chosen), line_numbers(chosen), strict=True):
            factors = list(dict.fromkeys(layer.get("factor") for layer in r.values["layers"]))
            for place, factor in enumerate(factors):
                points = [
                    (float(layer["layer"]), or_nan(layer["perplexity"]))
                    for layer in r.values["layers"]
                    if layer.get("factor") == factor
                ]
                said = name if factor is None or len(factors) == 1 else f"{name}, {factor:g}"
                lines.append(Series(said, points, n if len(factors) == 1 else n + place))
            base = or_nan(r.values["baseline"]["perplexity"])
            same = [(layer, base) for layer, _ in points]
            lines.append(Series(f"{name}, as it is", same, n, dashed=True, markers=False))
        y = value_axis([y for line in lines for _, y in line.points], "perplexity", "{:,.10g}".format)
        parts += [
            tag("h3", SAID.get(probe, probe)),
            legend(lines),
            layer_figure(lines, "perplexity", "Dashed: the model as it is.", 4, y),
        ]
    return section(
        "One layer disturbed",
        note(
            "Perplexity when one layer alone is disturbed. ", tag("code", "farsight layer-probes --help"), " says how."
        ),
        *parts,
        *absent,
    )


def position_section(results: Sequence[Result], absent: Sequence[Part]) -> Element:
    """Accuracy of position probes on each layer's hidden states."""
    if not results:
        return section("Position probes", *absent)
    named = list(zip(results, names(results), line_numbers(results), strict=True))
    lines = [
        Series(name, [(float(layer["layer"]), or_nan(layer["error"])) for layer in r.values["layers"]], n)
        for r, name, n in named
    ]
    guesses = ", ".join(f"{name} {figure_text(r.values['guess'], 1)}" for r, name, _ in named)
    return section(
        "Position probes",
        note(
            "A small network predicts positions from hidden states; shown is its mean error in tokens on sequences that it was not "
            "trained on. Layer −1 is the embedding. The error of a constant guess: ", guesses, ". ",
            tag("code", "farsight probes --help"), " says how."
        ),
        legend(lines),
        layer_figure(lines, "mean error in tokens", "By layer.", 4),
        heat_map_scale(),
        tag("div", *(_probe_panel(name, r.values) for r, name, _ in named), class_="panels"),
        *absent,
    )  # fmt: skip


def _probe_panel(name: str, values: Mapping[str, Any]) -> Element:
    """A heat map of a probe's accuracy: 100 % is no error, 0 % the error of a constant guess, or a larger one."""
    edges, layers, guess = values["positions"], values["layers"], values["guess"]
    shares = {
        (column, row): max(0.0, 1 - error / guess)
        for row, layer in enumerate(layers)
        for column, error in enumerate(layer["by_position"])
        if error is not None
    }

    def hover(column: int, row: int) -> str:
        error = figure_text(layers[row]["by_position"][column], 1)
        return f"{name}\nlayer {layers[row]['layer']}, tokens {edges[column]:,.0f} to {edges[column + 1]:,.0f}: {error} tokens"

    picture = heat_map(
        [short_tokens(round(edge)) for edge in edges[1:]],
        [str(layer["layer"]) for layer in layers],
        shares,
        hover,
        ("position in tokens, up to", "layer"),
        of="position error",
    )
    return tag(
        "div",
        tag("h4", name),
        figure(
            picture,
            "100 %: no error; 0 %: the error of a constant guess, or more. The constant is the middle position, so the middle is bright even in a layer without information.",
        ),
    )


def order_section(results: Sequence[Result], absent: Sequence[Part]) -> Element:
    """Effect of the order of tokens on the last token's hidden state, by distance."""
    if not results:
        return section("Order awareness", *absent)
    named = list(zip(results, names(results), line_numbers(results), strict=True))
    lines = [
        Series(name, [(float(t["tokens"]), or_nan(t["exchange"])) for t in r.values["spans"]], n)
        for r, name, n in named
    ]
    points = [point for line in lines for point in line.points]
    chart = line_chart(
        lines,
        length_axis([int(x) for x, _ in points], "distance of the exchanged tokens"),
        value_axis([y for _, y in points], "relative change", "{:,.10g}".format),
        lambda s, x, y: f"{s.name}\ntwo tokens exchanged {x:,.0f} tokens back: {y:.3g}",
    )
    rows: list[list[Part]] = [[name, f"{r.values['horizon']:,}"] for r, name, _ in named]
    return section(
        "Order awareness",
        note(
            "How much the last token's hidden state changes when two neighbouring tokens at a distance before it swap places. ",
            tag("code", "farsight order-awareness --help"), " says how."
        ),
        legend(lines),
        figure(chart, "Median over texts.", table(["model", "horizon in tokens"], rows, "The widest span in which the model told every tested permutation apart.")),
        *absent,
    )  # fmt: skip


def graft_section(results: Sequence[Result]) -> Element | None:
    """Perplexity of grafts by the layer where the two models meet (LASP, figure 4)."""
    if not results:
        return None
    parts: list[Part] = []
    for result in results:
        values = result.values
        lengths = list(values["plain"]["long"]["perplexity"])
        for length in lengths:
            lines = [
                Series(mode, [(float(p["depth"]), or_nan(p["perplexity"][length])) for p in points], place)
                for place, (mode, points) in enumerate(values["modes"].items())
            ]
            depths = [x for line in lines for x, _ in line.points]
            for place, (name, plain) in enumerate(values["plain"].items()):
                y = or_nan(plain["perplexity"][length])
                lines.append(Series(f"{name} alone", [(min(depths), y), (max(depths), y)], 2 + place, True, False))
            x = layer_axis(depths)
            x = type(x)(x.low, x.high, x.ticks, "layers from the front model")
            chart = line_chart(
                lines,
                x,
                value_axis([y for line in lines for _, y in line.points], "perplexity", "{:,.10g}".format),
                lambda s, x, y: f"{s.name}\n{x:.0f} layers from the front model: {y:.4g}",
            )
            grafts = lines[: len(values["modes"])]
            rows: list[list[Part]] = [
                [f"{depth:.0f}", *(figure_text(dict(line.points).get(depth), 2) for line in grafts)]
                for depth in sorted({depth for line in grafts for depth, _ in line.points})
            ]
            figures = table(
                ["layers from the front", *(line.name for line in grafts)], rows, "Perplexity of each graft."
            )
            parts += [
                tag("h3", f"{result.model.name}, {int(length):,} tokens"),
                legend(lines),
                figure(chart, f"base: {values['base']}; long: {values['long']}. Dashed: each alone.", figures),
            ]
    return section(
        "Grafts",
        note("The first layers of one model before the last layers of another. ", tag("code", "farsight graft-sweep --help"), " makes them."),
        *parts,
    )  # fmt: skip
