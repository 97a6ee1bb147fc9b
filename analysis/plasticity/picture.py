"""The pictures of farsight plasticity: a model's profiles, distance map and layers; or a run's checkpoints."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farsight.analysis.plasticity.options import TARGET_DROP
from farsight.json_files import or_nan
from farsight.outputs import model_style


def draw(figures: dict[str, Any], path: Path) -> None:
    """Writes the picture of a model (PNG, SVG or PDF; Figures 6.3 and 6.4), with figures by length if there are any."""
    plt = _pyplot()
    beside = "by_length" in figures
    figure, panels = plt.subplots(1, 3 + beside, figsize=(14 + 4.5 * beside, 4.3), layout="constrained")
    _profiles(panels[0], figures)
    _heat_map(figure, panels[1], figures)
    _layers(panels[2], figures)
    if beside:
        _lengths(panels[3], figures)
    figure.suptitle(
        f"{figures['model']}: attention plasticity, {figures['covariance']} covariance, {figures['pairs']} pairs",
        fontsize="medium",
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_training(figures: dict[str, Any], path: Path) -> None:
    """Writes the picture of a run's checkpoints over tokens: bias strength per token and times the context, and plasticity."""
    plt = _pyplot()
    rows = figures["checkpoints"]
    figure, panels = plt.subplots(3, 1, figsize=(7.5, 8), layout="constrained", sharex=True)
    unit, size = ("billion", 1e9) if rows[-1]["tokens"] >= 2e9 else ("million", 1e6)
    stages = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row["stage"])]
    lines = [
        (panels[0], "bias_strength", "per token", 0),
        (panels[1], "bias_context", "× context", 0),
        (panels[2], "first", "AP first 20 %", 2),
        (panels[2], "last", "AP last 20 %", 1),
        (panels[2], "drop", "AP_drop", 4),
    ]
    for panel, key, label, colour in lines:
        for stage in stages:  # one line per stage, as lengths differ
            points = [row["tokens"] / size for row in stage], [or_nan(row[key]) for row in stage]
            panel.plot(*points, **model_style(colour), label=label if stage is stages[0] else None)
    borders = [before[-1]["tokens"] / size for before in stages[:-1]]
    for panel in panels:
        panel.grid(alpha=0.3)
        for border in borders:
            panel.axvline(border, color="grey", linestyle=":")
    for stage in stages:
        panels[0].annotate(
            f"{stage[0]['stage']} ({stage[0]['length']:,})",
            ((stage[0]["tokens"] + stage[-1]["tokens"]) / 2 / size, 1.02),
            xycoords=("data", "axes fraction"),
            ha="center",
            fontsize="x-small",
        )
    panels[2].axhline(TARGET_DROP, color="black", linestyle="--", linewidth=0.8, label="target of AP_drop")
    panels[0].set_ylabel("bias strength per token")
    panels[1].set_ylabel("bias strength × context")
    panels[2].set(ylabel="plasticity", xlabel=f"{unit} tokens trained on (dotted: end of a stage)")
    panels[2].legend(fontsize="small", loc="center left")
    figure.suptitle(f"{figures['model']}: positional bias and plasticity over training", fontsize="medium")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def _values(profile: Sequence[float | None]) -> list[float]:
    return [or_nan(value) for value in profile]


def _profiles(axes: Any, figures: dict[str, Any]) -> None:
    positions = figures["positions"]
    heads = [head for head in figures["heads"] if head["measurable"]]
    for head in heads:
        axes.plot(positions, _values(head["profile"]), color="0.6", linewidth=0.6, alpha=0.6)
    axes.plot([], [], color="0.6", linewidth=0.8, label="one head")
    axes.plot(
        positions, _values(figures["counted"]), color="black", linestyle="--", linewidth=1.4, label="mean, counted"
    )
    axes.plot(positions, _values(figures["profile"]), color="red", linewidth=2, label="mean, closed form")
    axes.set(xlabel="position of the query", ylabel="plasticity", ylim=(0, 1.02), xlim=(0, figures["length"]))
    drop = "–" if figures["drop"] is None else f"{figures['drop']:.3f}"
    axes.set_title(f"profiles of {len(heads)} heads, AP_drop {drop}", fontsize="small")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="lower left")


def _heat_map(figure: Any, axes: Any, figures: dict[str, Any]) -> None:
    heat = figures["heat"]
    edges = heat["distances"]
    image = axes.pcolormesh(
        edges, edges, [_values(row) for row in heat["plasticity"]], cmap="inferno", vmin=0, vmax=1, rasterized=True
    )
    axes.set_facecolor("0.9")
    axes.set(xlabel="tokens between the keys", ylabel="tokens from the keys' midpoint to the query")
    axes.set_title("by distance (grey: no such pair)", fontsize="small")
    figure.colorbar(image, ax=axes, label="plasticity", shrink=0.9)


def _layers(axes: Any, figures: dict[str, Any]) -> None:
    layers = [(int(layer), values["drop"]) for layer, values in figures["layers"].items() if values["drop"] is not None]
    axes.bar([layer for layer, _ in layers], [drop for _, drop in layers], color=model_style(0)["color"])
    axes.axhline(figures["target_drop"], color="black", linestyle="--", linewidth=1, label="target")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xlabel="layer", ylabel="AP_drop: first minus last 20 %")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title("drop by layer", fontsize="small")
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize="small")


def _lengths(axes: Any, figures: dict[str, Any]) -> None:
    rows = figures["by_length"]
    lengths = [row["length"] for row in rows]
    name = next(key for key in rows[0] if key not in ("length", "plasticity"))
    axes.plot(lengths, [row[name] for row in rows], **model_style(0), label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=45, ha="right")
    axes.minorticks_off()
    axes.set(xlabel="length in tokens", ylabel=name)
    axes.set_title("plasticity of queries at the end of that length", fontsize="small")
    other = axes.twinx()
    other.plot(lengths, [or_nan(row["plasticity"]) for row in rows], **model_style(1), label="plasticity")
    other.set(ylabel="plasticity", ylim=(0, 1.02))
    if name == "accuracy":
        axes.set_ylim(-0.02, 1.02)
    lines = [*axes.get_lines(), *other.get_lines()]
    axes.legend(
        lines,
        [line.get_label() for line in lines],
        fontsize="small",
        ncols=2,
        frameon=False,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.3),  # with two scales there is no room inside
    )
    axes.grid(alpha=0.3)
