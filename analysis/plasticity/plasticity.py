"""How far the query still decides which keys a head prefers, by where the query stands (plasticity thesis, section 4.4).

    farsight plasticity MODEL_DIR --data FILE --json F --picture F.png
    farsight plasticity captured/ --covariance full --picture F.png
    farsight plasticity MODEL_DIR --data FILE --needle needle.json --picture F.png
    farsight plasticity runs/X --data FILE --json F --picture F.png

Two keys compete for a random query: p is the probability that it prefers the first, and 4 p (1 − p) the pair's plasticity, 1 where only
the query decides and 0 where the keys alone do. Its mean over pairs of earlier keys, for queries of each bucket of positions, is a
head's profile: in closed form, from Gaussian queries whose mean drifts with position, and beside it counted over the
bucket's own queries. Out of it come AP overall, AP of the first and of the last 20 % of positions, their difference AP_drop
(the thesis would have it below 0.10), a table by layer, and a map by the distance between the keys and from them to the query.

MODEL_DIR is any model directory, one that transformers wrote too, an adapter, a checkpoint, or a folder that farsight capture
wrote. A run folder, or a recipe's with its stages, gives one row for each of its checkpoints instead: bias strength and plasticity
over the training, each checkpoint at its own stage's length unless --length fixes one.

Of a head with a scope only keys within it compete. A head whose scope ends before the bucket's earlier keys begin is not
measurable at this bucket width: it is named, and left out of all means. docs/analysis/plasticity.md has the equations.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from farsight.analysis.capture.capture import (
    MANIFEST,
    SEQUENCES,
    Samples,
    add_capture_options,
    captured_or_capture,
    settings_of,
)
from farsight.analysis.plasticity.checkpoints import Checkpoint, find_checkpoints, measure_checkpoints, training_table
from farsight.analysis.plasticity.heads import Covariance, Pairs, head_profile, midpoint
from farsight.analysis.plasticity.lengths import by_length, read_lengths
from farsight.analysis.plasticity.picture import draw, draw_training
from farsight.analysis.plasticity.summary import DistanceMap, check_buckets, head_figures, model_figures
from farsight.analysis.sequences import add_text_options
from farsight.cli import command, positive
from farsight.configs.load import ConfigError
from farsight.inference.model_options import add_model_options
from farsight.outputs import add_output_options, check_outputs, write_figures
from farsight.progress import progress

DRAWS = 2000


def measure(
    samples: Samples, covariance: Covariance = "diagonal", pairs: Pairs = "pooled", draws: int = DRAWS, seed: int = 0
) -> dict[str, Any]:
    """The figures of all captured heads; every head has pairs of its own.

    Returns:
        "positions", "profile", "counted", "overall", "first", "last", "drop", "quintiles", "heat", "layers", "heads" and what else
        docs/analysis/plasticity.md lists.

    Raises:
        ConfigError: too few buckets or tokens.
    """
    check_buckets(samples.buckets)
    heat = DistanceMap(samples.length, samples.buckets)
    heads = []
    for number, head in enumerate(progress(samples.heads, unit="head", desc="plasticity")):
        if len(samples.positions_T) < 2:
            break
        profile = head_profile(
            samples.queries(number),
            samples.keys(number),
            samples.positions_T,
            samples.sequences_T,
            length=samples.length,
            buckets=samples.buckets,
            scope=head.scope,
            slope=head.slope,
            covariance=covariance,
            pairs=pairs,
            draws=draws,
            seed=seed * 1_000_003 + number,
        )
        heat.add(profile, samples.positions_T)
        heads.append(head_figures(head, profile))
    if not any(head["measurable"] for head in heads):
        raise ConfigError(
            f"No head has a pair of keys before any bucket: {len(samples.positions_T):,} tokens were captured; set more "
            "--sequences or --per-bucket, or more --buckets where all scopes are short."
        )
    return {
        "length": samples.length,
        "buckets": samples.buckets,
        "tokens": len(samples.positions_T),
        "sequences": int(samples.sequences_T.max()) + 1,
        "head_dim": samples.queries(0).shape[1],
        "positions": [midpoint(bucket, samples.buckets, samples.length) for bucket in range(samples.buckets)],
        "queries": samples.buckets_T.bincount(minlength=samples.buckets).tolist(),
        **model_figures(heads, heat),
    }


def table(figures: dict[str, Any]) -> str:
    """The model's profile, its layers, and what it all comes to."""
    width = figures["length"] / figures["buckets"]
    lines = [
        f"{figures['model']}: {len(figures['heads'])} heads, {figures['tokens']:,} tokens of {figures['sequences']:,} sequences of "
        f"{figures['length']:,}, {figures['buckets']} buckets; {figures['covariance']} covariance, {figures['pairs']} pairs, "
        f"{figures['draws']:,} a bucket",
        f"{'position':>10} {'plasticity':>11} {'counted':>8}",
    ]
    for position, value, counted in zip(figures["positions"], figures["profile"], figures["counted"], strict=True):
        lines.append(f"{position:>10,.1f} {_figure(value):>11} {_figure(counted):>8}")
    lines.append(f"{'layer':>10} {'overall':>11} {'first 20%':>10} {'last 20%':>9} {'drop':>7}")
    for layer, values in [*figures["layers"].items(), ("all", figures)]:
        shown = [_figure(values[key]) for key in ("overall", "first", "last", "drop")]
        lines.append(f"{layer:>10} {shown[0]:>11} {shown[1]:>10} {shown[2]:>9} {shown[3]:>7}")
    lines.append("by fifths of the positions: " + "  ".join(map(_figure, figures["quintiles"])))
    verdict = {True: "below", False: "not below", None: "no head has both bands; to compare with"}[
        figures["meets_target"]
    ]
    lines.append(f"AP_drop {_figure(figures['drop'])}: {verdict} the target of {figures['target_drop']:.2f}")
    if figures["not_measurable"]:
        lines.append(
            f"{len(figures['not_measurable'])} heads not measurable at this bucket width ({width:g} tokens), as no two keys of "
            f"earlier buckets are in scope: {', '.join(figures['not_measurable'])} (layer.head). They are in no mean; more --buckets reach some."
        )
    fewest = min(many for many in figures["queries"][1:])
    if figures["covariance"] == "full" and fewest <= figures["head_dim"]:
        lines.append(
            f"A bucket has {fewest} queries of {figures['head_dim']} dimensions: too few for a full covariance, which reads as too "
            "small. Set more --sequences or --per-bucket."
        )
    if "by_length" in figures:
        name = next(key for row in figures["by_length"] for key in row if key not in ("length", "plasticity"))
        lines.append(f"{'length':>10} {name:>11} {'plasticity':>11}")
        lines += [
            f"{row['length']:>10,} {row[name]:>11.3f} {_figure(row['plasticity']):>11}" for row in figures["by_length"]
        ]
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    assert __doc__
    parser = argparse.ArgumentParser(
        prog="farsight plasticity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="model directory, adapter, checkpoint, capture, or run folder")
    add_text_options(parser, SEQUENCES)
    parser.add_argument(
        "--covariance",
        choices=get_args(Covariance),
        default="diagonal",
        help="of the queries: equation 4.12's diagonal (default), or all of it",
    )
    parser.add_argument(
        "--pairs",
        choices=get_args(Pairs),
        default="pooled",
        help="keys of all earlier buckets (default; section 4.4.5), or of a random prefix of one sequence (definition 4.3)",
    )
    parser.add_argument("--draws", type=positive, default=DRAWS, help="pairs of keys a bucket (%(default)s)")
    parser.add_argument(
        "--needle",
        type=Path,
        metavar="F",
        help="this model's JSON of farsight needle or farsight perplexity: by length, beside plasticity",
    )
    add_capture_options(parser)
    add_model_options(parser)
    add_output_options(parser)
    options = parser.parse_args(arguments)
    check_outputs(parser, options)
    captured = (options.model / MANIFEST).is_file()
    if not captured and options.data is None:
        parser.error(f"{options.model} is no capture; to capture the model there, add --data FILE")
    if not options.model.is_dir():
        parser.error(f"{options.model} is no folder; name a model directory, a checkpoint, a capture or a run folder")
    checkpoints = find_checkpoints(options.model)
    if checkpoints:
        if options.needle:
            parser.error("--needle is of one model; name a model directory or a checkpoint in place of a run folder")
        figures = _over_training(checkpoints, options)
    else:
        figures = _of_one_model(options)
    print(training_table(figures["checkpoints"]) if checkpoints else table(figures))
    if options.json:
        write_figures(options.json, {str(options.model): figures})
    if options.picture:
        (draw_training if checkpoints else draw)(figures, options.picture)
        print(options.picture)


def _of_one_model(options: argparse.Namespace) -> dict[str, Any]:
    samples = captured_or_capture(options.model, options, own=("seed",))
    captured = settings_of(options.model, options, samples)
    source = {"captured_in": str(options.model), "capture_seed": captured["seed"]} if options.data is None else {}
    measured = None if options.needle is None else read_lengths(options.needle, Path(captured["model"]))
    figures = captured | source | _settings(options) | _measured(samples, options)
    if measured is not None:
        rows = by_length(figures["profile"], figures["length"], measured)
        figures |= {"needle": str(options.needle), "by_length": rows}
    return figures


def _over_training(checkpoints: Sequence[Checkpoint], options: argparse.Namespace) -> dict[str, Any]:
    check_buckets(options.buckets)
    rows = measure_checkpoints(checkpoints, options, lambda samples: _measured(samples, options))
    chosen = {name: getattr(options, name) for name in ("length", "buckets", "per_bucket", "extend", "dtype")}
    return {"model": str(options.model), "data": str(options.data), **chosen, **_settings(options), "checkpoints": rows}


def _measured(samples: Samples, options: argparse.Namespace) -> dict[str, Any]:
    return measure(samples, options.covariance, options.pairs, options.draws, options.seed)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "tool": "analysis.plasticity",
        **{name: getattr(options, name) for name in ("covariance", "pairs", "draws", "seed")},
    }


if __name__ == "__main__":
    main()
