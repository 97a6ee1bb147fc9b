"""Attention plasticity of a model, or of every checkpoint of a training, as farsight plasticity reports it."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from farsight.analysis.capture.from_options import captured_or_capture, settings_of
from farsight.analysis.capture.samples import Samples
from farsight.analysis.checkpoints import Checkpoint, measure_checkpoints
from farsight.analysis.geometry.rotation import planar_rotation
from farsight.analysis.plasticity.heads import head_profile, midpoint
from farsight.analysis.plasticity.lengths import by_length, read_lengths
from farsight.analysis.plasticity.options import AP, DRAWS, Covariance, Pairs
from farsight.analysis.plasticity.summary import DistanceMap, check_buckets, head_figures, model_figures
from farsight.errors import ConfigError
from farsight.progress import progress
from farsight.remote import shown


def measure(
    samples: Samples, covariance: Covariance = "diagonal", pairs: Pairs = "pooled", draws: int = DRAWS, seed: int = 0
) -> dict[str, Any]:
    """The figures of all captured heads; pairs of keys are drawn for each head separately.

    Returns:
        "positions", "profile", "counted", the keys of AP, "quintiles", "heat", "layers", "heads" and the other
        entries that docs/analysis/plasticity.md lists.

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
            "--sequences or --per-bucket, or more --buckets if all scopes are short."
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


def measure_model(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of the model or capture that the command line names."""
    samples = captured_or_capture(options.model, options, own=("seed",))
    captured = settings_of(options.model, options, samples)
    source = {"captured_in": shown(options.model), "capture_seed": captured["seed"]} if options.data is None else {}
    measured = None if options.needle is None else read_lengths(options.needle, Path(captured["model"]))
    figures = captured | source | _settings(options) | _measured(samples, options)
    if measured is not None:
        rows = by_length(figures["profile"], figures["length"], measured)
        figures |= {"needle": str(options.needle), "by_length": rows}
    return figures


def measure_training(checkpoints: Sequence[Checkpoint], options: argparse.Namespace) -> dict[str, Any]:
    """The figures of every checkpoint of a run."""
    if options.needle:
        raise ConfigError("--needle is for one model: name a model directory or a checkpoint in place of a run folder.")
    check_buckets(options.buckets)
    figures = measure_checkpoints(checkpoints, options, lambda samples: checkpoint_figures(samples, options), ("seed",))
    return figures | _settings(options)


def checkpoint_figures(samples: Samples, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of a checkpoint: positional bias and plasticity (Tables 6.2 and A.1), without those of heads and layers."""
    figures = _measured(samples, options)
    kept = (*AP, "quintiles", "positions", "profile", "counted", "sequences", "not_measurable")
    return bias_figures(samples) | {key: figures[key] for key in kept}


def bias_figures(samples: Samples) -> dict[str, float]:
    """Means over all heads of what section 4.3 measures.

    Bias strength (per token, and times the context), μ_Q on axis a, |α_K| and |r_k| on it, and the separation along b.
    """
    found = [
        planar_rotation(samples.queries(n), samples.keys(n), samples.positions_T) for n in range(len(samples.heads))
    ]
    bias = fmean(rotation.bias_strength for rotation in found)
    return {
        "bias_strength": bias,
        "bias_context": bias * samples.length,
        "query_mean": fmean(rotation.query_mean for rotation in found),
        "key_slope": fmean(abs(rotation.key_slope) for rotation in found),
        "key_correlation": fmean(abs(rotation.key_correlation) for rotation in found),
        "separation": fmean(rotation.separation for rotation in found),
    }


def _measured(samples: Samples, options: argparse.Namespace) -> dict[str, Any]:
    return measure(samples, options.covariance, options.pairs, options.draws, options.seed)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "tool": "analysis.plasticity",
        **{name: getattr(options, name) for name in ("covariance", "pairs", "draws", "seed")},
    }
