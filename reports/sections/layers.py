"""The sections on single layers: sensitivity, probes, order awareness, grafts."""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from farsight.json_files import or_nan
from farsight.reports.charts import Axis, Series, heat_map, length_axis, line_chart, short_tokens
from farsight.reports.page import figure, heading, legend, line_figure, note, panels, table
from farsight.reports.results import Result, labelled
from farsight.reports.sections.plasticity import LAYER, figure_text, layer_figure

PERPLEXITY = Axis("perplexity", "auto", say="{:.4g}".format)
SAID = {
    "mask": "RoPE masked in one layer",
    "coarsen": "positions coarsened in one layer",
    "noise": "noise added to one layer's output",
}


def show_layers(results: Sequence[Result]) -> list[Markup]:
    """Each layer's sensitivity to correctness and the influence of its RoPE."""
    found = labelled(results)
    delta, rho = (
        [Series(name, [(layer, or_nan(value)) for layer, value in enumerate(r.values[key])], n) for r, name, n in found]
        for key in ("delta", "rho")
    )
    header = ["model", "γ", "Spearman, ρ", "Spearman, |ρ|", "top by δ", "top by |ρ|", "shared"]
    rows = [
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
        for r, name, _ in found
    ]
    return [
        note(
            "δ: the cosine distance between correct and wrong texts after a layer. ρ: the increase in loss when one layer's RoPE base is "
            "multiplied by γ. `farsight layers --help` says how both are measured; fine-tuning reads them from its profile."
        ),
        layer_figure(delta, "δ", "Sensitivity."),
        layer_figure(rho, "ρ", "Influence of RoPE; 0 where a layer has none."),
        table(header, rows, "Rank correlation of δ with ρ, and the top layers by each.", numbers=False),
    ]


def show_layer_probes(results: Sequence[Result]) -> list[Markup]:
    """Perplexity with one layer's positions masked or coarsened, or its output disturbed."""
    parts = [note("Perplexity when one layer alone is disturbed. `farsight layer-probes --help` says how.")]
    for probe in dict.fromkeys(result.values["probe"] for result in results):
        lines: list[Series] = []
        for r, name, n in labelled([result for result in results if result.values["probe"] == probe]):
            layers = r.values["layers"]
            factors = list(dict.fromkeys(layer.get("factor") for layer in layers))
            for place, factor in enumerate(factors):
                own = [layer for layer in layers if layer.get("factor") == factor]
                points = [(float(layer["layer"]), or_nan(layer["perplexity"])) for layer in own]
                said = name if factor is None or len(factors) == 1 else f"{name}, {factor:g}"
                lines.append(Series(said, points, n if len(factors) == 1 else n + place))
            base = or_nan(r.values["baseline"]["perplexity"])
            same = [(layer, base) for layer, _ in points]
            lines.append(Series(f"{name}, as it is", same, n, dashed=True, markers=False))
        parts += [
            heading(SAID.get(probe, probe)),
            line_figure(lines, LAYER, PERPLEXITY, ("Dashed: the model as it is.", "By layer: perplexity.")),
        ]
    return parts


def show_probes(results: Sequence[Result]) -> list[Markup]:
    """Accuracy of position probes on each layer's hidden states."""
    found = labelled(results)
    lines = [
        Series(name, [(float(layer["layer"]), or_nan(layer["error"])) for layer in r.values["layers"]], n)
        for r, name, n in found
    ]
    error = Axis("mean error in tokens", say="{:.4g}".format)
    guesses = ", ".join(f"{name} {figure_text(r.values['guess'], 1)}" for r, name, _ in found)
    return [
        note(
            "A small network predicts positions from hidden states; shown is its mean error in tokens on sequences that it was not "
            f"trained on. Layer −1 is the embedding. The error of a constant guess: {guesses}. `farsight probes --help` says how."
        ),
        line_figure(lines, LAYER, error, ("By layer.", "By layer: mean error in tokens.")),
        panels(_probe_map(name, r.values) for r, name, _ in found),
    ]


def _probe_map(name: str, values: Mapping[str, Any]) -> tuple[str, Markup, str]:
    """Name, heat map of a probe's accuracy, and caption: 100 % is no error, 0 % the error of a constant guess, or a larger one."""
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
    caption = (
        "100 %: no error; 0 %: the error of a constant guess, or more. The constant is the middle position, so the middle is bright even "
        "in a layer without information."
    )
    return name, picture, caption


def show_order_awareness(results: Sequence[Result]) -> list[Markup]:
    """Effect of the order of tokens on the last token's hidden state, by distance."""
    found = labelled(results)
    lines = [
        Series(name, [(float(t["tokens"]), or_nan(t["exchange"])) for t in r.values["spans"]], n)
        for r, name, n in found
    ]
    chart = line_chart(
        lines,
        length_axis((int(x) for line in lines for x, _ in line.points), "distance of the exchanged tokens"),
        Axis("relative change", "auto", say="{:.3g}".format),
    )
    rows = [[name, f"{r.values['horizon']:,}"] for r, name, _ in found]
    caption = "The widest span in which the model told every tested permutation apart."
    return [
        note(
            "How much the last token's hidden state changes when two neighbouring tokens at a distance before it swap places. "
            "`farsight order-awareness --help` says how."
        ),
        legend(lines),
        figure(chart, "Median over texts.", table(["model", "horizon in tokens"], rows, caption)),
    ]


def show_grafts(results: Sequence[Result]) -> list[Markup]:
    """Perplexity of grafts by the layer where the two models meet (LASP, figure 4)."""
    parts = [
        note(
            "The first layers of one model before the last layers of another. `farsight graft-sweep --help` makes them."
        )
    ]
    for result in results:
        for length in result.values["plain"]["long"]["perplexity"]:
            parts += [heading(f"{result.model.name}, {int(length):,} tokens"), _graft_figure(result.values, length)]
    return parts


def _graft_figure(values: Mapping[str, Any], length: str) -> Markup:
    grafts = [
        Series(mode, [(float(p["depth"]), or_nan(p["perplexity"][length])) for p in points], place)
        for place, (mode, points) in enumerate(values["modes"].items())
    ]
    depths = sorted({x for line in grafts for x, _ in line.points})
    plain = [
        Series(
            f"{name} alone",
            [(x, or_nan(one["perplexity"][length])) for x in depths],
            2 + place,
            True,
            False,
        )
        for place, (name, one) in enumerate(values["plain"].items())
    ]
    captions = f"base: {values['base']}; long: {values['long']}. Dashed: each alone.", "Perplexity of each graft."
    return line_figure(grafts + plain, Axis("layers from the front model", "whole"), PERPLEXITY, captions)
