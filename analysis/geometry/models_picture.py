"""The pictures of farsight geometry for several models, and for the checkpoints of trainings."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farsight.analysis.geometry.pca import CLASSES
from farsight.analysis.geometry.picture import draw_thresholds
from farsight.analysis.timeline import Timeline, checkpoint_name, training_name
from farsight.outputs import short_names
from farsight.plots import GREY, MARKERS, PALETTE, line_style, picture, whole_numbers

_SHOWN = 6
"""Checkpoints whose heads are shown, as in Figure A.5."""
_NAMED = 12
"""Bars with a name below them, at most."""


def draw_models(results: Mapping[str, dict[str, Any]], path: Path) -> None:
    """Writes the picture of several models, by path: Figures 6.1, 6.2 and A.1 to A.3, and the classes of each model's heads."""
    names, found = short_names(results), list(results.values())
    summaries = [figures["model_summary"] for figures in found]
    heads = [figures["heads"] for figures in found]
    with picture(path, 16, 9) as figure:
        (components, drift, scatter), (bias, separation, classes) = figure.subplots(2, 3)
        for number, summary in enumerate(summaries):
            for key, hollow in (("abs_r_q", False), ("abs_r_k", True)):
                values = [pc[key] for pc in summary["pca"]]
                label = None if hollow else names[number]
                components.plot(range(len(values)), values, label=label, **line_style(number, hollow))
        components.set(
            xlabel="principal component (hollow: keys)", ylabel="mean |correlation| with position", ylim=(0, 1)
        )
        components.set_title("queries and keys on components")
        components.legend()
        whole_numbers(components.xaxis)
        places = range(len(names))
        for key, label, colour, shift in (("abs_r_q", "queries: |r_q|", 0, -0.2), ("abs_r_k", "keys: |r_k|", 1, 0.2)):
            values = [summary[key] for summary in summaries]
            drift.bar([place + shift for place in places], values, 0.4, color=PALETTE[colour], label=label)
        drift.set_xticks(places, names, rotation=30, ha="right")
        drift.set(ylabel="mean |correlation| with position", ylim=(0, 1))
        drift.set_title("on the drift axis a")
        drift.legend()
        for number, of_one in enumerate(heads):
            style = {"s": 16, "alpha": 0.6, "color": PALETTE[number % len(PALETTE)], "linewidths": 0}
            marker = MARKERS[(number + number // len(PALETTE)) % len(MARKERS)]
            first = [head["pca"][0] for head in of_one]
            scatter.scatter(
                [pc["r_q"] for pc in first], [pc["r_k"] for pc in first], marker=marker, label=names[number], **style
            )
            apart, strength = ([head[key] for head in of_one] for key in ("separation", "bias_strength"))
            label = f"{names[number]}: {summaries[number]['bias_separation']:+.2f}"
            separation.scatter(apart, strength, marker=marker, label=label, **style)
        draw_thresholds(scatter)
        scatter.set_title("first principal component, a point per head")
        scatter.legend(loc="lower left")
        separation.axhline(0, color=GREY, linewidth=0.8)
        separation.set(xlabel="separation of queries and keys", ylabel="bias strength per token")
        separation.set_title("bias and separation, with their correlation")
        separation.legend()
        bias.boxplot([[head["bias_strength"] for head in of_one] for of_one in heads], whis=(5, 95), sym=".")
        sizes = sorted(abs(head["bias_strength"]) for of_one in heads for head in of_one)
        bias.set_yscale("symlog", linthresh=max(sizes[len(sizes) // 2], 1e-12))
        bias.axhline(0, color=GREY, linewidth=0.8)
        bias.set_xticks([place + 1 for place in places], names, rotation=30, ha="right")
        bias.set_ylabel("bias strength per token")
        bias.set_title("heads' bias: quartiles, and 5 to 95 %")
        _draw_shares(classes, summaries)
        classes.set_xticks(places, names, rotation=30, ha="right")
        classes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))
        lengths = ", ".join(f"{length:,}" for length in sorted({figures["length"] for figures in found}))
        figure.suptitle(f"{lengths} tokens: position in queries and keys of {len(names)} models")


def draw_trainings(trainings: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes the picture of one or more trainings below each other: Figures 6.5, A.4 and A.5 over their checkpoints."""
    with picture(path, 16, 7.5 * len(trainings)) as figure:
        parts = figure.subfigures(len(trainings), 1, squeeze=False)[:, 0]
        for part, name, training in zip(parts, short_names([t["model"] for t in trainings]), trainings, strict=True):
            _training(part, training["checkpoints"])
            part.suptitle(f"{training_name(name, training['checkpoints'])}: position in queries and keys over training")


def _training(figure: Any, rows: Sequence[dict[str, Any]]) -> None:
    summaries = [row["model_summary"] for row in rows]
    line = Timeline([row | row["model_summary"] for row in rows])
    over, below = figure.subfigures(2, 1)
    bias, query, slope, classes = over.subplots(1, 4)
    for axes, key, label, colour in (
        (bias, "bias_strength", "bias strength per token", 0),
        (query, "query_mean", "μ_Q: mean query along a", 1),
        (query, "separation", "separation along b", 2),
        (slope, "abs_key_slope", "|α_K|: slope of keys along a", 4),
    ):
        line.line(axes, key, label, colour)
        axes.set_ylabel("" if axes is query else label)
    query.legend()
    for axes in (bias, query, slope):
        line.finish([axes])
        axes.xaxis.label.set_fontsize("small")
    _draw_shares(classes, summaries)
    every = range(0, len(rows), -(-len(rows) // _NAMED))
    names = [checkpoint_name(rows[number]) for number in every]
    classes.set_xticks(every, names, rotation=45, ha="right", fontsize="x-small")
    classes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    kept = sorted({round(place * (len(rows) - 1) / (_SHOWN - 1)) for place in range(_SHOWN)})
    panels = below.subplots(1, len(kept), sharey=True, squeeze=False)[0]
    for axes, number in zip(panels, kept, strict=True):
        first = [head["pca"][0] for head in rows[number]["heads"]]
        colours = [PALETTE[CLASSES.index(head["class"])] for head in rows[number]["heads"]]
        axes.scatter([pc["r_q"] for pc in first], [pc["r_k"] for pc in first], s=14, c=colours, alpha=0.7, linewidths=0)
        draw_thresholds(axes)
        axes.set_ylabel(axes.get_ylabel() if axes is panels[0] else "")
        axes.set_title(checkpoint_name(rows[number]), fontsize="small")


def _draw_shares(axes: Any, summaries: Sequence[Mapping[str, Any]]) -> None:
    """Bars of the shares of heads in each class, on top of each other (Figure A.4)."""
    below = [0.0] * len(summaries)
    for kind, colour in zip(CLASSES, PALETTE, strict=False):
        shares = [summary["class_shares"][kind] for summary in summaries]
        axes.bar(range(len(shares)), shares, bottom=below, color=colour, label=kind)
        below = [low + share for low, share in zip(below, shares, strict=True)]
    axes.set(ylabel="share of heads", ylim=(0, 1))
    axes.set_title("classes of heads", fontsize="small")
    axes.grid(False)
