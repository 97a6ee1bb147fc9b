"""Joins models' plasticity with their scores, and correlates the two."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from farsight.analysis.layers.agreement import p_value, ranks, spearman
from farsight.analysis.plasticity.options import AP
from farsight.analysis.plasticity_scores.read import Scored, is_named, read_plasticity, read_scores
from farsight.errors import ConfigError
from farsight.outputs import short_names

LEAST = 3
"""Models that a correlation needs at least."""
EXACT = 8
"""Models up to which the p-value of a rank correlation is counted over all orders, 40,320 of them."""


def compare(plasticity: Sequence[Path], scores: Sequence[str], wanted: str | None = None) -> dict[str, Any]:
    """The figures of farsight plasticity-scores.

    Args:
        plasticity, scores: files, as on the command line.
        wanted: name of the score; None for the only one that all models have, or else their "mean".

    Returns:
        "score" (its name); "models" {path: {"name", "family", "score", the keys of AP}}, the best first; "left_out", models
        without a score; "unknown", names of scores that are of no model; "correlations" as correlations() gives them, and the
        same of each family of three models or more in "families".

    Raises:
        ConfigError: files that can't be read, names that fit two models, no common score, fewer than three models.
    """
    of_model = read_plasticity(plasticity)
    found, unknown = _by_model([*of_model], [scored for argument in scores for scored in read_scores(argument)])
    if unknown and not any(own for own, _ in found.values()):
        raise ConfigError(
            f"No model has both plasticity and scores, as no name matches: plasticity is of {', '.join(of_model)}; scores are of "
            f"{', '.join(unknown)}. Give a file of one model's scores as --scores NAME=FILE with a name of the former."
        )
    name = wanted or _common({model: own for model, (own, _) in found.items() if own})
    named = dict(zip(of_model, short_names(of_model), strict=True))
    rows: dict[str, dict[str, Any]] = {
        model: {"name": named[model], "family": found[model][1], "score": found[model][0][name], **of_model[model]}
        for model in sorted(
            (model for model in of_model if name in found[model][0]), key=lambda model: -found[model][0][name]
        )
    }
    if len(rows) < LEAST:
        have = sorted({score for own, _ in found.values() for score in own})
        raise ConfigError(
            f"{len(rows)} models have plasticity and the score {name!r}, and a correlation needs {LEAST}. Scores of these models: "
            f"{', '.join(have) or 'none'}; of no model with plasticity: {', '.join(unknown) or 'none'}."
        )
    families: dict[str, list[dict[str, Any]]] = {}
    for row in rows.values():
        families.setdefault(row["family"] or "", []).append(row)
    return {
        "tool": "analysis.plasticity_scores",
        "score": name,
        "models": rows,
        "left_out": [named[model] for model in of_model if model not in rows],
        "unknown": unknown,
        "correlations": correlations([*rows.values()]),
        "families": {family: correlations(of) for family, of in families.items() if family and len(of) >= LEAST},
    }


def _by_model(
    models: Sequence[str], every: Sequence[Scored]
) -> tuple[dict[str, tuple[dict[str, float], str | None]], list[str]]:
    """Each model's scores by name, with its family; and the names that are of no model."""
    scores: dict[str, dict[str, float]] = {model: {} for model in models}
    families: dict[str, str | None] = dict.fromkeys(models)
    unknown = []
    for scored in every:
        fit = [model for model in models if is_named(scored.model, model)]
        if len(fit) > 1:
            raise ConfigError(
                f"{scored.source} names {scored.model}, which may be {' or '.join(fit)}: name more of its path."
            )
        if not fit:
            unknown.append(scored.model)
            continue
        twice = next((name for name in scored.scores if name in scores[fit[0]]), None)
        if twice is not None:
            raise ConfigError(f"{scored.source} has {twice} of {scored.model} again; name one file with it.")
        scores[fit[0]] |= scored.scores
        families[fit[0]] = scored.family or families[fit[0]]
    return {model: (scores[model], families[model]) for model in models}, unknown


def _common(scores: Mapping[str, Mapping[str, float]]) -> str:
    """The only score that all of these models have, or "mean"."""
    shared = [name for name in next(iter(scores.values()), {}) if all(name in own for own in scores.values())]
    if len(shared) == 1:
        return shared[0]
    if "mean" in shared:
        return "mean"
    if not shared:
        raise ConfigError("The models have no score in common; --score NAME takes one that some of them have.")
    raise ConfigError(f"The models have several scores: choose one with --score. They all have {', '.join(shared)}.")


def correlations(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Correlations of each figure of AP with the score: {"pearson", "pearson_p", "spearman", "spearman_p"}.

    All None where a figure, or the score, is the same for all models.
    """
    score = [row["score"] for row in rows]
    found: dict[str, dict[str, float | None]] = {}
    for key in AP:
        values = [row[key] for row in rows]
        r, rho = pearson(values, score), spearman(values, score)
        found[key] = {
            "pearson": r,
            "pearson_p": p_value(r, len(rows)),
            "spearman": rho,
            "spearman_p": None if rho is None else rank_p_value(values, score),
        }
    return found


def pearson(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Pearson's correlation; None if all values of either are equal."""
    a, b = (np.asarray(values) - np.mean(values) for values in (first, second))
    scale = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / scale if scale > 0 else None


def rank_p_value(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Chance that Spearman's correlation is as far from 0 if every order of the second is equally likely.

    Over all n! orders up to n = EXACT; above that from p_value, the usual approximation.
    """
    n, rho = len(first), spearman(first, second)
    assert rho is not None
    if n > EXACT:
        return p_value(rho, n)
    a, b = (np.array(ranks(values)) - (n + 1) / 2 for values in (first, second))
    orders = np.array([*itertools.permutations(range(n))])
    products = np.abs(b[orders] @ a)
    return float(np.mean(products >= abs(a @ b) - 1e-9))
