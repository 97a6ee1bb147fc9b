"""The figures of farsight geometry as text."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from farsight.analysis.geometry.measure import bias_separation
from farsight.analysis.timeline import checkpoint_name
from farsight.outputs import short_names


def table(figures: dict[str, Any]) -> str:
    """A line per layer, and one for the model."""
    lines = _summaries("layer", [*figures["layers"].items(), ("model", figures["model_summary"])])
    scoped = sum(head["scope"] < figures["length"] for head in figures["heads"])
    if scoped:
        lines.append(f"{scoped} heads have scopes: keys further apart than a head's scope never compete")
    if any(head["slope"] for head in figures["heads"]):
        lines.append("ALiBi acts in addition to these figures")
    return "\n".join(lines)


def models_table(results: Mapping[str, dict[str, Any]]) -> str:
    """A line per model, and the correlation of bias with separation within each and over all their heads (Figure A.3)."""
    names, found = short_names(results), list(results.values())
    lines = _summaries("model", [(name, of["model_summary"]) for name, of in zip(names, found, strict=True)])
    pooled = bias_separation(list(itertools.chain(*(figures["heads"] for figures in found))))
    within = ", ".join(
        f"{name} {of['model_summary']['bias_separation']:+.2f}" for name, of in zip(names, found, strict=True)
    )
    lines.append(f"correlation of bias with separation over heads: {pooled:+.2f} over all; {within}")
    return "\n".join(lines)


def training_table(figures: dict[str, Any]) -> str:
    """A line per checkpoint."""
    rows = figures["checkpoints"]
    return "\n".join(_summaries("checkpoint", [(checkpoint_name(row), row["model_summary"]) for row in rows]))


def _summaries(title: str, summaries: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    width = max(6, len(title), *(len(name) for name, _ in summaries))
    lines = [
        f"{title:>{width}} {'heads':>6} {'bias/token':>11} {'× length':>9} {'recency':>8} {'|r_q| a':>8} {'|r_k| a':>8} "
        f"{'μ_Q':>8} {'|α_K|':>9} {'Q–K':>8} {'PC0':>5} {'|r_q| 0':>8} {'|r_k| 0':>8}  classes"
    ]
    for name, s in summaries:
        classes = ", ".join(f"{count} {kind}" for kind, count in s["classes"].items() if count)
        lines.append(
            f"{name:>{width}} {s['heads']:>6} {s['bias_strength']:>11.2e} {s['bias_context']:>9.3f} {s['recency']:>8.0%} "
            f"{s['abs_r_q']:>8.2f} {s['abs_r_k']:>8.2f} {s['query_mean']:>8.3f} {s['abs_key_slope']:>9.2e} {s['separation']:>8.3f} "
            f"{s['pc0_share']:>5.0%} {s['pc0_abs_r_q']:>8.2f} {s['pc0_abs_r_k']:>8.2f}  {classes}"
        )
    return lines
