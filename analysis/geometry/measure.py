"""Measures each captured head and summarises layers and the model."""

import argparse
import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from farsight.analysis.capture.from_options import settings_of
from farsight.analysis.capture.samples import Samples
from farsight.analysis.checkpoints import Checkpoint, measure_checkpoints
from farsight.analysis.geometry.pca import CLASSES, PAPER_CLASSES, head_class, paper_class, principal_components
from farsight.analysis.geometry.rotation import correlation, planar_rotation
from farsight.errors import ConfigError
from farsight.progress import progress


def head_figures(samples: Samples, number: int, components: int) -> dict[str, Any]:
    """The figures of `samples.heads[number]`."""
    head, positions_T = samples.heads[number], samples.positions_T
    q_TH, k_TH = samples.queries(number), samples.keys(number)
    found = principal_components(q_TH, k_TH, positions_T, components)
    name = head_class(found[0].query_correlation, found[0].key_correlation)
    plane = planar_rotation(q_TH, k_TH, positions_T)
    return {
        **dataclasses.asdict(head),
        "class": name,
        "paper_class": paper_class(name),
        "pca": [{"share": c.share, "r_q": c.query_correlation, "r_k": c.key_correlation} for c in found],
        "bias_strength": plane.bias_strength,
        "bias_context": plane.bias_strength * samples.length,
        "key_slope": plane.key_slope,
        "query_mean": plane.query_mean,
        "r_q": plane.query_correlation,
        "r_k": plane.key_correlation,
        "separation": plane.separation,
        "query_bias": plane.query_bias,
        "query_bias_context": plane.query_bias * samples.length,
        "key_drift": plane.key_drift,
        "drift_cosine": plane.drift_cosine,
        "query_linear_share": plane.query_linear_share,
        "key_linear_share": plane.key_linear_share,
        "plane_share": plane.plane_share,
    }


def summary(heads: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over heads, and the number of heads in each class."""

    def mean(name: str, size: bool = False) -> float:
        return math.fsum(abs(head[name]) if size else head[name] for head in heads) / len(heads)

    def component(number: int) -> dict[str, float]:
        found = [head["pca"][number] for head in heads]
        sizes = {f"abs_{name}": math.fsum(abs(pc[name]) for pc in found) / len(found) for name in ("r_q", "r_k")}
        return {"share": math.fsum(pc["share"] for pc in found) / len(found), **sizes}

    classes, papers = Counter(head["class"] for head in heads), Counter(head["paper_class"] for head in heads)
    components = [component(number) for number in range(len(heads[0]["pca"]))]
    return {
        "heads": len(heads),
        "bias_strength": mean("bias_strength"),
        "bias_context": mean("bias_context"),
        "query_bias": mean("query_bias"),
        "query_bias_context": mean("query_bias_context"),
        "recency": sum(head["bias_strength"] > 0 for head in heads) / len(heads),
        "primacy": sum(head["bias_strength"] < 0 for head in heads) / len(heads),
        "abs_r_q": mean("r_q", size=True),
        "abs_r_k": mean("r_k", size=True),
        "query_mean": mean("query_mean"),
        "abs_key_slope": mean("key_slope", size=True),
        "separation": mean("separation"),
        "bias_separation": bias_separation(heads),
        "query_linear_share": mean("query_linear_share"),
        "key_linear_share": mean("key_linear_share"),
        "plane_share": mean("plane_share"),
        "pc0_share": components[0]["share"],
        "pc0_abs_r_q": components[0]["abs_r_q"],
        "pc0_abs_r_k": components[0]["abs_r_k"],
        "pca": components,
        "classes": {name: classes[name] for name in CLASSES},
        "class_shares": {name: classes[name] / len(heads) for name in CLASSES},
        "paper_classes": {name: papers[name] for name in PAPER_CLASSES},
        "paper_class_shares": {name: papers[name] / len(heads) for name in PAPER_CLASSES},
    }


def bias_separation(heads: Sequence[dict[str, Any]]) -> float:
    """Correlation of bias strength with the separation of queries and keys over heads (Figure A.3); 0 if either is constant."""
    bias, apart = (
        torch.tensor([head[key] for head in heads], dtype=torch.float64) for key in ("bias_strength", "separation")
    )
    return correlation(bias, apart)


def measure(samples: Samples, components: int = 4) -> dict[str, Any]:
    """The figures of all heads, of layers and of the model: what --json holds besides the settings.

    Raises:
        ConfigError: too few tokens.
    """
    if len(samples.positions_T.unique()) < 2:
        raise ConfigError(
            f"{len(samples.positions_T)} tokens were kept, which is too few: raise --sequences or --per-bucket."
        )
    numbers = progress(range(len(samples)), unit="head", desc="geometry")
    heads = [head_figures(samples, number, components) for number in numbers]
    layers: dict[str, list[dict[str, Any]]] = {}
    for head in heads:
        layers.setdefault(str(head["layer"]), []).append(head)
    return {
        "model_summary": summary(heads),
        "layers": {layer: summary(of_layer) for layer, of_layer in layers.items()},
        "heads": heads,
    }


def measure_model(samples: Samples, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of the model or capture that the command line names, with its samples' settings."""
    settings = {"tool": "analysis.geometry", **settings_of(options.model, options, samples)}
    return settings | {"components": options.components} | measure(samples, options.components)


def measure_training(checkpoints: Sequence[Checkpoint], options: argparse.Namespace) -> dict[str, Any]:
    """The figures of every checkpoint of a training: those of its model, layers and heads in each."""
    figures = measure_checkpoints(checkpoints, options, lambda samples: measure(samples, options.components))
    return {"tool": "analysis.geometry", "components": options.components, **figures}
