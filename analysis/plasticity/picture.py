"""The pictures of farsight plasticity: a model's profiles, distance map and layers; several models; or checkpoints."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farsight.analysis.plasticity.options import TARGET_DROP
from farsight.analysis.timeline import Timeline, checkpoint_name, training_name
from farsight.json_files import or_nan
from farsight.outputs import short_name, short_names
from farsight.plots import GREY, PALETTE, length_ticks, line_style, picture, shades, whole_numbers


def draw(figures: dict[str, Any], path: Path) -> None:
    """Writes the picture of a model (PNG, SVG or PDF; Figures 6.3 and 6.4), with figures by length if there are any."""
    beside = "by_length" in figures
    with picture(path, 14 + 4.5 * beside, 4.3 + 0.9 * beside) as figure:  # with room for a legend below
        profiles, distances, layers, *others = figure.subplots(1, 3 + beside)
        _profiles(profiles, figures)
        _heat_map(figure, distances, figures)
        _layers(layers, figures)
        for axes in others:
            _lengths(axes, figures)
        covariance, pairs = figures["covariance"], figures["pairs"]
        figure.suptitle(f"{short_name(figures['model'])}: attention plasticity, {covariance} covariance, {pairs} pairs")


def draw_models(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Writes the picture of several models, by path: each one's heads and distance map (Figures 6.3, 6.4), and all means."""
    names, figures = short_names(results), list(results.values())
    columns = min(4, len(figures))
    rows = math.ceil(len(figures) / columns)
    with picture(path, max(9.0, 3.6 * columns), 5.6 * rows + 3.6) as figure:
        own, means = figure.subfigures(2, 1, height_ratios=(5.6 * rows, 3.6))
        panels = own.subplots(2 * rows, columns, squeeze=False)
        for axes in panels.flat:
            axes.set_visible(False)
        for number, (name, of_one) in enumerate(zip(names, figures, strict=True)):
            row, column = divmod(number, columns)
            for axes in (profiles := panels[2 * row, column], heat := panels[2 * row + 1, column]):
                axes.set_visible(True)
            _profiles(profiles, of_one)
            profiles.set_title(f"{name}: AP_drop {_drop(of_one)}", fontsize="small")
            if number:
                profiles.legend().remove()
            _heat_map(own, heat, of_one)
            heat.set_ylabel("tokens to the query")
            heat.set_title(heat.get_title() if not number else "", fontsize="small")
        by_fifth, drops = means.subplots(1, 2)
        for number, (name, of_one) in enumerate(zip(names, figures, strict=True)):
            by_fifth.plot(range(5), _values(of_one["quintiles"]), **line_style(number), label=name)
        by_fifth.set_xticks(range(5), [f"{low}–{low + 20} %" for low in range(0, 100, 20)])
        by_fifth.set(xlabel="position of the query, as a share of the length", ylabel="plasticity")
        by_fifth.legend()
        colours = [PALETTE[number % len(PALETTE)] for number in range(len(names))]
        drops.barh(range(len(names)), _values([of_one["ap_drop"] for of_one in figures]), color=colours)
        drops.axvline(TARGET_DROP, color=PALETTE[4], linestyle="--", linewidth=1, label="target")
        drops.axvline(0, color=PALETTE[4], linewidth=0.8)
        drops.set_yticks(range(len(names)), names)
        drops.invert_yaxis()
        drops.set(xlabel="AP_drop: first minus last 20 %")
        drops.grid(False, axis="y")
        drops.legend()
        covariance, pairs = figures[0]["covariance"], figures[0]["pairs"]
        figure.suptitle(f"attention plasticity, {covariance} covariance, {pairs} pairs")


def draw_trainings(trainings: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes the picture of one or more trainings, a column each: bias and plasticity over checkpoints, and all profiles."""
    many = len(trainings)
    with picture(path, 7.5 * many, 11.5) as figure:
        columns = figure.subfigures(1, many, squeeze=False)[0]
        names = short_names([figures["model"] for figures in trainings])
        for column, name, figures in zip(columns, names, trainings, strict=True):
            _training(column, figures)
            column.suptitle(
                f"{training_name(name, figures['checkpoints'])}: positional bias and plasticity over training"
            )


def _training(figure: Any, figures: dict[str, Any]) -> None:
    """Bias strength per token and times the context, plasticity (Figure 6.6), and each checkpoint's profile (Table A.1)."""
    line = Timeline(figures["checkpoints"])
    over, below = figure.subfigures(2, 1, height_ratios=(8, 3.5))
    panels = over.subplots(3, 1, sharex=True)
    for panel, key, label, colour in (
        (panels[0], "bias_strength", "per token", 0),
        (panels[1], "bias_context", "× context", 0),
        (panels[2], "ap_first", "AP first 20 %", 2),
        (panels[2], "ap_last", "AP last 20 %", 1),
        (panels[2], "ap_drop", "AP_drop", 4),
    ):
        line.line(panel, key, label, colour)
    line.finish(panels)
    panels[2].axhline(TARGET_DROP, color=PALETTE[4], linestyle="--", linewidth=0.8, label="target of AP_drop")
    panels[0].set_ylabel("bias strength per token")
    panels[1].set_ylabel("bias strength × context")
    panels[2].set_ylabel("plasticity")
    panels[2].legend(loc="center left")
    axes = below.subplots()
    rows = figures["checkpoints"]
    named = {round(place * (len(rows) - 1) / 9) for place in range(10)} if len(rows) > 10 else range(len(rows))
    for number, (row, shade) in enumerate(zip(rows, shades(len(rows)), strict=True)):
        name = checkpoint_name(row) if number in named else None
        axes.plot(row["positions"], _values(row["profile"]), color=shade, linewidth=1.4, label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.set(xlabel="position of the query", ylabel="plasticity")
    axes.set_title("profile of each checkpoint", fontsize="small")
    axes.legend(fontsize="x-small", ncols=2)


def _drop(figures: dict[str, Any]) -> str:
    return "–" if figures["ap_drop"] is None else f"{figures['ap_drop']:.3f}"


def _values(profile: Sequence[float | None]) -> list[float]:
    return [or_nan(value) for value in profile]


def _profiles(axes: Any, figures: dict[str, Any]) -> None:
    positions = figures["positions"]
    heads = [head for head in figures["heads"] if head["measurable"]]
    for number, head in enumerate(heads):
        label = None if number else "one head"
        axes.plot(positions, _values(head["profile"]), color=GREY, linewidth=0.6, alpha=0.6, label=label)
    axes.plot(positions, _values(figures["counted"]), "--", color=PALETTE[4], linewidth=1.4, label="mean, counted")
    axes.plot(positions, _values(figures["profile"]), color=PALETTE[1], linewidth=2, label="mean, closed form")
    axes.set(xlabel="position of the query", ylabel="plasticity", ylim=(0, 1.02), xlim=(0, figures["length"]))
    axes.set_title(f"profiles of {len(heads)} heads, AP_drop {_drop(figures)}", fontsize="small")
    axes.legend(loc="lower left")


def _heat_map(figure: Any, axes: Any, figures: dict[str, Any]) -> None:
    heat = figures["heat"]
    edges = heat["distances"]
    axes.grid(False)
    cells = [_values(row) for row in heat["plasticity"]]
    image = axes.pcolormesh(edges, edges, cells, vmin=0, vmax=1, rasterized=True)
    axes.set_facecolor("0.9")
    axes.set(xlabel="tokens between the keys", ylabel="tokens from the keys' midpoint to the query")
    axes.set_title("by distance (grey: no such pair)", fontsize="small")
    figure.colorbar(image, ax=axes, label="plasticity", shrink=0.9)


def _layers(axes: Any, figures: dict[str, Any]) -> None:
    drops = {int(layer): values["ap_drop"] for layer, values in figures["layers"].items()}
    layers = [(layer, drop) for layer, drop in drops.items() if drop is not None]
    axes.bar([layer for layer, _ in layers], [drop for _, drop in layers], color=PALETTE[0])
    axes.axhline(figures["target_drop"], color=PALETTE[4], linestyle="--", linewidth=1, label="target")
    axes.axhline(0, color=PALETTE[4], linewidth=0.8)
    axes.set(xlabel="layer", ylabel="AP_drop: first minus last 20 %")
    whole_numbers(axes.xaxis)
    axes.set_title("drop by layer", fontsize="small")
    axes.grid(False, axis="x")
    axes.legend()


def _lengths(axes: Any, figures: dict[str, Any]) -> None:
    rows = figures["by_length"]
    lengths = [row["length"] for row in rows]
    name = next(key for key in rows[0] if key not in ("length", "plasticity"))
    axes.plot(lengths, [row[name] for row in rows], **line_style(0), label=name)
    length_ticks(axes, lengths, rotation=45, ha="right")
    axes.set(xlabel="length in tokens", ylabel=name)
    axes.set_title("plasticity of queries at the end of that length", fontsize="small")
    other = axes.twinx()
    other.plot(lengths, _values([row["plasticity"] for row in rows]), **line_style(1), label="plasticity")
    other.set(ylabel="plasticity", ylim=(0, 1.02))
    other.grid(False)
    if name == "accuracy":
        axes.set_ylim(-0.02, 1.02)
    lines = [*axes.get_lines(), *other.get_lines()]
    labels = [line.get_label() for line in lines]
    # With two scales there is no room inside.
    axes.legend(lines, labels, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.3))
