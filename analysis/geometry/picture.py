"""The picture of farsight geometry: head classes, bias by layer, and the plane of one head."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from farsight.analysis.capture.samples import Samples
from farsight.analysis.geometry.pca import HIGH, LOW
from farsight.analysis.geometry.rotation import planar_rotation
from farsight.outputs import short_name
from farsight.plots import GREY, PALETTE, picture, whole_numbers

_MOST_POINTS = 4000
"""Points to draw of a head's queries, and of its keys; more would only overlap."""


def draw(figures: dict[str, Any], samples: Samples, path: Path) -> None:
    """Writes the picture.

    Args:
        figures: what --json holds.
        samples: what they were measured on.
        path: PNG, SVG or PDF file.
    """
    heads, length = figures["heads"], figures["length"]
    with picture(path, 16, 4.6) as figure:
        classes, bias, plane = figure.subplots(1, 3)
        _draw_classes(classes, heads)
        _draw_bias(bias, heads, length)
        _draw_plane(plane, heads, samples)
        figure.suptitle(f"{short_name(figures['model'])}, {length:,} tokens")


def _draw_classes(axes: Any, heads: Sequence[dict[str, Any]]) -> None:
    first = [head["pca"][0] for head in heads]
    places = [pc["r_q"] for pc in first], [pc["r_k"] for pc in first]
    shown = axes.scatter(*places, c=[head["layer"] for head in heads], s=22)
    draw_thresholds(axes)
    axes.set_title("first principal component, a point per head")
    whole_numbers(axes.figure.colorbar(shown, ax=axes, label="layer").ax.yaxis)


def draw_thresholds(axes: Any) -> None:
    """Draws the borders of the classes in a panel of r_q and r_k on the first component, and names its axes."""
    for threshold, style in ((LOW, ":"), (HIGH, "--")):
        for sign in (-threshold, threshold):
            axes.axvline(sign, color=GREY, linewidth=0.8, linestyle=style)
            axes.axhline(sign, color=GREY, linewidth=0.8, linestyle=style)
    axes.set(xlim=(-1.05, 1.05), ylim=(-1.05, 1.05), xticks=(-1, -0.5, 0, 0.5, 1), yticks=(-1, -0.5, 0, 0.5, 1))
    axes.set(xlabel="r_q: queries and position", ylabel="r_k: keys and position")


def _draw_bias(axes: Any, heads: Sequence[dict[str, Any]], length: int) -> None:
    layers = sorted({head["layer"] for head in heads})
    sizes = sorted(abs(head["bias_context"]) for head in heads)
    # Linear up to the median, so that one outlier does not squeeze the others into a line. Set first, so that margins are its own.
    axes.set_yscale("symlog", linthresh=max(sizes[len(sizes) // 2], 1e-9))
    for sign, colour, label in ((1, PALETTE[0], "recency"), (-1, PALETTE[1], "primacy")):
        here = [head for head in heads if sign * head["bias_strength"] > 0]
        axes.scatter(
            [head["layer"] for head in here],
            [head["bias_context"] for head in here],
            s=22, color=colour, alpha=0.7, label=f"{label}: {len(here)}",
        )  # fmt: skip
    means = [[head["bias_context"] for head in heads if head["layer"] == layer] for layer in layers]
    axes.plot(layers, [sum(values) / len(values) for values in means], color=PALETTE[4], linewidth=1, label="mean")
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.set(xlabel="layer", ylabel=f"bias strength × {length:,} tokens")
    axes.set_title("score of the mean query: last key minus first")
    whole_numbers(axes.xaxis)
    axes.legend()


def _draw_plane(axes: Any, heads: Sequence[dict[str, Any]], samples: Samples) -> None:
    """The plane of the head with the median absolute bias."""
    order = sorted(range(len(heads)), key=lambda number: abs(heads[number]["bias_strength"]))
    number = order[len(order) // 2]
    q_TH, k_TH, positions_T = samples.queries(number), samples.keys(number), samples.positions_T
    found = planar_rotation(q_TH, k_TH, positions_T)
    axes_H2 = torch.stack([found.a_H, found.b_H], 1)
    every = -(-len(positions_T) // _MOST_POINTS)
    for x_TH, marker, label in ((q_TH, "o", "queries"), (k_TH, "^", "keys")):
        x_T2 = (x_TH @ axes_H2)[::every]
        shown = axes.scatter(
            x_T2[:, 0], x_T2[:, 1], c=positions_T[::every], marker=marker, s=14, alpha=0.7, linewidths=0,
            label=label,
        )  # fmt: skip
    axes.set(xlabel="a: drift", ylabel="b: from keys to queries")
    axes.set_title(f"layer {heads[number]['layer']}, head {heads[number]['head']}: median bias")
    axes.figure.colorbar(shown, ax=axes, label="position")
    for handle in axes.legend().legend_handles:
        handle.set_color(GREY)
