"""The figures of farsight geometry as text."""

from typing import Any


def table(figures: dict[str, Any]) -> str:
    """A line per layer, and one for the model."""
    lines = [
        f"{'layer':>6} {'heads':>6} {'bias/token':>11} {'× length':>9} {'recency':>8} {'|r_q| a':>8} {'|r_k| a':>8} "
        f"{'|α_K|':>9} {'PC0':>5} {'|r_q| 0':>8} {'|r_k| 0':>8}  classes"
    ]
    for name, s in [*figures["layers"].items(), ("model", figures["model_summary"])]:
        classes = ", ".join(f"{count} {kind}" for kind, count in s["classes"].items() if count)
        lines.append(
            f"{name:>6} {s['heads']:>6} {s['bias_strength']:>11.2e} {s['bias_context']:>9.3f} {s['recency']:>8.0%} "
            f"{s['abs_r_q']:>8.2f} {s['abs_r_k']:>8.2f} {s['abs_key_slope']:>9.2e} {s['pc0_share']:>5.0%} "
            f"{s['pc0_abs_r_q']:>8.2f} {s['pc0_abs_r_k']:>8.2f}  {classes}"
        )
    scoped = sum(head["scope"] < figures["length"] for head in figures["heads"])
    if scoped:
        lines.append(f"{scoped} heads have scopes: keys further apart than a head's scope never compete")
    if any(head["slope"] for head in figures["heads"]):
        lines.append("ALiBi acts in addition to these figures")
    return "\n".join(lines)
