"""Plasticity and scores as text."""

from typing import Any

TITLES = {"ap_overall": "overall", "ap_first": "first 20 %", "ap_last": "last 20 %", "ap_drop": "drop"}


def table(figures: dict[str, Any]) -> str:
    """Table 6.3, best score first, with the correlation of each column with the score below it."""
    rows = [*figures["models"].values()]
    labels = [row["name"] + f" ({row['family']})" * bool(row["family"]) for row in rows]
    width = max(18, *map(len, labels), *(len(family) + 14 for family in figures["families"]))
    score = max(8, len(figures["score"]))
    head = " ".join(f"{title:>10}" for title in TITLES.values())
    lines = [f"{'model':<{width}} {figures['score']:>{score}} {head}"]
    for label, row in zip(labels, rows, strict=True):
        lines.append(f"{label:<{width}} {row['score']:>{score}.4g} " + " ".join(f"{row[key]:>10.3f}" for key in TITLES))
    for family, found in {"": figures["correlations"], **figures["families"]}.items():
        for kind, name in (("pearson", "Pearson's r"), ("spearman", "Spearman's ρ")):
            for key, title, digits in ((kind, name, "+.3f"), (f"{kind}_p", "p", ".3g")):
                shown = " ".join(f"{_figure(found[column][key], digits):>10}" for column in TITLES)
                lines.append(f"{f'{title}, {family}' if family else title:<{width}} {'':>{score}} {shown}")
    lines.append(f"{len(rows)} models; a p-value is the chance of so large a correlation if there is none")
    if figures["left_out"]:
        lines.append(f"left out, as they have no {figures['score']}: {', '.join(figures['left_out'])}")
    if figures["unknown"]:
        lines.append(f"scores of models without plasticity: {', '.join(figures['unknown'])}")
    return "\n".join(lines)


def _figure(value: float | None, digits: str) -> str:
    return "–" if value is None else f"{value:{digits}}"
