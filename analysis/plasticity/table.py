"""The figures of farsight plasticity as text."""

import itertools
from collections.abc import Mapping
from typing import Any

from farsight.analysis.plasticity.options import AP
from farsight.analysis.plasticity.summary import by_range, range_edges
from farsight.analysis.timeline import checkpoint_name
from farsight.outputs import short_names


def table(figures: dict[str, Any]) -> str:
    """A model's profile, its layers, and a summary."""
    width = figures["length"] / figures["buckets"]
    lines = [
        f"{figures['model']}: {len(figures['heads'])} heads, {figures['tokens']:,} tokens of {figures['sequences']:,} sequences of "
        f"{figures['length']:,}, {figures['buckets']} buckets; {figures['covariance']} covariance, {figures['pairs']} pairs, "
        f"{figures['draws']:,} per bucket",
        f"{'position':>10} {'plasticity':>11} {'counted':>8}",
    ]
    for position, value, counted in zip(figures["positions"], figures["profile"], figures["counted"], strict=True):
        lines.append(f"{position:>10,.1f} {_figure(value):>11} {_figure(counted):>8}")
    lines.append(f"{'layer':>10} {'overall':>11} {'first 20%':>10} {'last 20%':>9} {'drop':>7}")
    for layer, values in [*figures["layers"].items(), ("all", figures)]:
        shown = [_figure(values[key]) for key in AP]
        lines.append(f"{layer:>10} {shown[0]:>11} {shown[1]:>10} {shown[2]:>9} {shown[3]:>7}")
    lines.append("by fifths of the positions: " + "  ".join(map(_figure, figures["quintiles"])))
    verdict = {True: "below", False: "not below", None: "no head has both bands, so it can't be compared with"}[
        figures["meets_target"]
    ]
    lines.append(f"AP_drop {_figure(figures['ap_drop'])}: {verdict} the target of {figures['target_drop']:.2f}")
    if figures["not_measurable"]:
        lines.append(
            f"{len(figures['not_measurable'])} heads are not measurable at this bucket width ({width:g} tokens), since no two "
            f"keys of earlier buckets are in scope: {', '.join(figures['not_measurable'])} (layer.head). They are left out of "
            "all means; more --buckets may make them measurable."
        )
    fewest = min(many for many in figures["queries"][1:])
    if figures["covariance"] == "full" and fewest <= figures["head_dim"]:
        lines.append(
            f"A bucket has {fewest} queries of {figures['head_dim']} dimensions: too few for a full covariance, which is then "
            "underestimated. Set more --sequences or --per-bucket."
        )
    if "by_length" in figures:
        name = next(key for row in figures["by_length"] for key in row if key not in ("length", "plasticity"))
        lines.append(f"{'length':>10} {name:>11} {'plasticity':>11}")
        lines += [
            f"{row['length']:>10,} {row[name]:>11.3f} {_figure(row['plasticity']):>11}" for row in figures["by_length"]
        ]
    return "\n".join(lines)


def models_table(results: Mapping[str, dict[str, Any]]) -> str:
    """Table 6.1: a line per model, with its plasticity in each fifth of the positions."""
    names = short_names(results)
    width = max(5, *map(len, names))
    fifths = "".join(f"{f'{low}–{low + 20} %':>11}" for low in range(0, 100, 20))
    lines = [f"{'model':<{width}} {'length':>9}{fifths} {'overall':>8} {'drop':>7}  target"]
    for name, figures in zip(names, results.values(), strict=True):
        shown = "".join(f"{_figure(value):>11}" for value in figures["quintiles"])
        met = {True: "met", False: "not met", None: "–"}[figures["meets_target"]]
        lines.append(
            f"{name:<{width}} {figures['length']:>9,}{shown} {_figure(figures['ap_overall']):>8} "
            f"{_figure(figures['ap_drop']):>7}  {met}"
        )
    left_out = [
        f"{name} {many}" for name, f in zip(names, results.values(), strict=True) if (many := len(f["not_measurable"]))
    ]
    if left_out:
        lines.append(f"Heads whose scopes are too short for their buckets, left out of means: {', '.join(left_out)}.")
    return "\n".join(lines)


def training_table(figures: dict[str, Any]) -> str:
    """A line per checkpoint: the columns of Table 6.2 with μ_Q, separation and bias × context, then those of Table A.1."""
    rows = figures["checkpoints"]
    names = [checkpoint_name(row) for row in rows]
    width = max(10, *map(len, names))
    lines = [
        f"{'checkpoint':<{width}} {'length':>8} {'bias':>10} {'× context':>10} {'μ_Q':>8} {'|α_K|':>10} {'|r_k|':>6} "
        f"{'Q–K':>8} {'overall':>8} {'first 20%':>10} {'last 20%':>9} {'drop':>7}"
    ]
    for name, row in zip(names, rows, strict=True):
        overall, first, last, drop = (_figure(row[key]) for key in AP)
        lines.append(
            f"{name:<{width}} {row['length']:>8,} {row['bias_strength']:>10.3e} {row['bias_context']:>10.3f} "
            f"{row['query_mean']:>8.3f} {row['key_slope']:>10.3e} {row['key_correlation']:>6.3f} {row['separation']:>8.3f} "
            f"{overall:>8} {first:>10} {last:>9} {drop:>7}"
        )
    edges = range_edges(rows)
    titles = [f"{_short(low)}–{_short(high)}" for low, high in itertools.pairwise(edges)]
    lines += [
        "plasticity by the position of the query:",
        f"{'':<{width}} " + " ".join(f"{title:>9}" for title in titles),
    ]
    for name, row in zip(names, rows, strict=True):
        lines.append(f"{name:<{width}} " + " ".join(f"{_figure(value):>9}" for value in by_range(row, edges)))
    most = max(len(row["not_measurable"]) for row in rows)
    if most:
        lines.append(
            f"Up to {most} heads have scopes too short for their buckets; they are left out of plasticity's means."
        )
    return "\n".join(lines)


def _short(position: int) -> str:
    """A position, in K of 1,024 if it is a whole number of them."""
    return f"{position // 1024}K" if position and position % 1024 == 0 else f"{position:,}"


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
