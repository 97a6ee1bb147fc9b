"""How position lies in the queries and keys of a model's heads: principal components, drift, bias strength.

    farsight geometry MODEL_DIR --data FILE --json F --picture F.png
    farsight geometry captured/ --picture F.png          # of farsight capture

Bias strength is what the mean query's score q·k gains for each token by which a key comes later: positive is recency,
negative primacy. It is measured along a, the direction in which queries and keys together drift with position; what keys
drift by themselves stands beside it (query_bias), for heads whose queries and keys drift apart. Scores are divided by
√head_dim after that, and what ALiBi adds is beside it: its slope times √head_dim takes off as much for each token back.

A head with a scope chooses only among keys within it: what lies further apart never competes, however biased.

The classes are those of a head's first principal component: r_q and r_k, the correlations of its queries and its keys with
position, above 0.7 (position), below 0.3 (content) or between.
"""

import argparse
import dataclasses
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farsight.analysis.capture.capture import (
    SEQUENCES,
    Samples,
    add_capture_options,
    captured_or_capture,
    settings_of,
)
from farsight.analysis.geometry.pca import CLASSES, PAPER_CLASSES, head_class, paper_class, principal_components
from farsight.analysis.geometry.rotation import planar_rotation
from farsight.analysis.sequences import add_text_options
from farsight.cli import command, positive
from farsight.configs.load import ConfigError
from farsight.files import write_text
from farsight.inference.model_options import add_model_options
from farsight.outputs import add_output_options, check_outputs
from farsight.progress import progress


def head_figures(samples: Samples, number: int, components: int) -> dict[str, Any]:
    """What is measured of the head of that number in `samples.heads`."""
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
    """Means over heads, and how many are of each class."""

    def mean(name: str, size: bool = False) -> float:
        return math.fsum(abs(head[name]) if size else head[name] for head in heads) / len(heads)

    classes, papers = Counter(head["class"] for head in heads), Counter(head["paper_class"] for head in heads)
    first = [head["pca"][0] for head in heads]
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
        "abs_key_slope": mean("key_slope", size=True),
        "query_linear_share": mean("query_linear_share"),
        "key_linear_share": mean("key_linear_share"),
        "plane_share": mean("plane_share"),
        "pc0_share": math.fsum(pc["share"] for pc in first) / len(first),
        "pc0_abs_r_q": math.fsum(abs(pc["r_q"]) for pc in first) / len(first),
        "pc0_abs_r_k": math.fsum(abs(pc["r_k"]) for pc in first) / len(first),
        "classes": {name: classes[name] for name in CLASSES},
        "class_shares": {name: classes[name] / len(heads) for name in CLASSES},
        "paper_classes": {name: papers[name] for name in PAPER_CLASSES},
        "paper_class_shares": {name: papers[name] / len(heads) for name in PAPER_CLASSES},
    }


def measure(samples: Samples, components: int = 4) -> dict[str, Any]:
    """All heads, layers and the model: what --json holds, but for the settings.

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


def table(figures: dict[str, Any]) -> str:
    """A line a layer, and the model's."""
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
        lines.append(f"{scoped} heads have scopes: their pairs further apart never compete")
    if any(head["slope"] for head in figures["heads"]):
        lines.append("ALiBi's slopes act beside these figures")
    return "\n".join(lines)


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="farsight geometry", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", type=Path, help="model directory, adapter or checkpoint; or what farsight capture wrote"
    )
    add_text_options(parser, SEQUENCES)
    add_capture_options(parser)
    parser.add_argument(
        "--components", type=positive, default=4, metavar="N", help="principal components to report (%(default)s)"
    )
    add_model_options(parser)
    add_output_options(parser)
    options = parser.parse_args(arguments)
    check_outputs(parser, options)
    samples = captured_or_capture(options.model, options)
    settings = settings_of(options.model, options, samples)
    figures = {
        "tool": "analysis.geometry",
        **settings,
        "components": options.components,
        **measure(samples, options.components),
    }
    print(table(figures))
    if options.json:
        write_text(options.json, json.dumps(figures, indent=2, allow_nan=False) + "\n")
    if options.picture:
        from farsight.analysis.geometry.picture import draw

        draw(figures, samples, options.picture)
        print(options.picture)


if __name__ == "__main__":
    main()
