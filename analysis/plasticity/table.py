"""The figures of farsight plasticity as text."""

from collections.abc import Sequence
from typing import Any

from farsight.analysis.plasticity.options import AP


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


def training_table(rows: Sequence[dict[str, Any]]) -> str:
    """The columns of Table 6.2, and bias × context."""
    width = max(5, *(len(row["stage"]) for row in rows))
    lines = [
        f"{'stage':<{width}} {'step':>8} {'length':>8} {'bias':>10} {'× context':>10} {'|α_K|':>10} {'|r_k|':>6} "
        f"{'overall':>8} {'first 20%':>10} {'last 20%':>9} {'drop':>7}"
    ]
    for row in rows:
        overall, first, last, drop = (_figure(row[key]) for key in AP)
        lines.append(
            f"{row['stage']:<{width}} {row['step']:>8,} {row['length']:>8,} {row['bias_strength']:>10.3e} "
            f"{row['bias_context']:>10.3f} {row['key_slope']:>10.3e} {row['key_correlation']:>6.3f} "
            f"{overall:>8} {first:>10} {last:>9} {drop:>7}"
        )
    most = max(len(row["not_measurable"]) for row in rows)
    if most:
        lines.append(
            f"Up to {most} heads have scopes too short for their buckets; they are left out of plasticity's means."
        )
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
