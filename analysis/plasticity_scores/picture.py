"""The picture of farsight plasticity-scores."""

from pathlib import Path
from typing import Any

from farsight.plots import GREY, MARKERS, PALETTE, picture

_PANELS = {"ap_drop": "AP_drop: first minus last 20 %", "ap_overall": "AP overall"}


def draw(figures: dict[str, Any], path: Path) -> None:
    """Writes the scatter of scores against AP_drop (Figure 6.7) and against AP overall, with the lines of least squares."""
    import numpy as np

    rows = [*figures["models"].values()]
    families = list(dict.fromkeys(row["family"] for row in rows))
    with picture(path, 12, 5) as figure:
        for axes, (key, label) in zip(figure.subplots(1, 2, sharey=True), _PANELS.items(), strict=True):
            for number, family in enumerate(families):
                own = [row for row in rows if row["family"] == family]
                places = [row[key] for row in own], [row["score"] for row in own]
                marker, colour = MARKERS[number % len(MARKERS)], PALETTE[number % len(PALETTE)]
                axes.scatter(*places, s=36, color=colour, marker=marker, label=family)
            for row in rows:
                place = row[key], row["score"]
                axes.annotate(row["name"], place, (5, 4), textcoords="offset points", fontsize="x-small")
            values, scores = (np.array([row[name] for row in rows]) for name in (key, "score"))
            found = figures["correlations"][key]
            if found["pearson"] is not None:
                ends = np.array([values.min(), values.max()])
                slope = found["pearson"] * scores.std() / values.std()
                axes.plot(ends, scores.mean() + slope * (ends - values.mean()), color=GREY, linestyle="--", linewidth=1)
                axes.set_title(
                    f"r = {found['pearson']:+.2f} (p = {found['pearson_p']:.2g}), "
                    f"ρ = {found['spearman']:+.2f} (p = {found['spearman_p']:.2g})",
                    fontsize="small",
                )
            axes.margins(x=0.2)
            axes.set_xlabel(label)
            axes.set_ylabel(figures["score"] if key == "ap_drop" else "")
            if families != [None] and key == "ap_drop":
                axes.legend()
        figure.suptitle(f"plasticity and {figures['score']} of {len(rows)} models")
