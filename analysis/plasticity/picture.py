"""The pictures of farsight plasticity: a model's profiles, distance map and layers; or a run's checkpoints."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farsight.analysis.plasticity.options import TARGET_DROP
from farsight.json_files import or_nan
from farsight.outputs import short_name
from farsight.plots import GREY, PALETTE, borders, length_ticks, line_style, picture, token_unit, whole_numbers


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


def draw_training(figures: dict[str, Any], path: Path) -> None:
    """Writes the picture of a run's checkpoints over tokens: bias strength per token and times the context, and plasticity."""
    rows = figures["checkpoints"]
    unit, size = token_unit(rows[-1]["tokens"])
    stages = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row["stage"])]
    with picture(path, 7.5, 8) as figure:
        panels = figure.subplots(3, 1, sharex=True)
        lines = [
            (panels[0], "bias_strength", "per token", 0),
            (panels[1], "bias_context", "× context", 0),
            (panels[2], "ap_first", "AP first 20 %", 2),
            (panels[2], "ap_last", "AP last 20 %", 1),
            (panels[2], "ap_drop", "AP_drop", 4),
        ]
        for panel, key, label, colour in lines:
            for stage in stages:  # one line per stage, as lengths differ
                points = [row["tokens"] / size for row in stage], _values([row[key] for row in stage])
                panel.plot(*points, **line_style(colour), label=label if stage is stages[0] else None)
        for panel in panels:
            borders(panel, [before[-1]["tokens"] / size for before in stages[:-1]])
        for stage in stages:
            panels[0].annotate(
                f"{stage[0]['stage']} ({stage[0]['length']:,})",
                ((stage[0]["tokens"] + stage[-1]["tokens"]) / 2 / size, 1.02),
                xycoords=("data", "axes fraction"),
                ha="center",
                fontsize="x-small",
            )
        panels[2].axhline(TARGET_DROP, color=PALETTE[4], linestyle="--", linewidth=0.8, label="target of AP_drop")
        panels[0].set_ylabel("bias strength per token")
        panels[1].set_ylabel("bias strength × context")
        panels[2].set(ylabel="plasticity", xlabel=f"{unit} tokens trained on (dotted: end of a stage)")
        panels[2].legend(loc="center left")
        figure.suptitle(f"{short_name(figures['model'])}: positional bias and plasticity over training")


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
    drop = "–" if figures["ap_drop"] is None else f"{figures['ap_drop']:.3f}"
    axes.set_title(f"profiles of {len(heads)} heads, AP_drop {drop}", fontsize="small")
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
