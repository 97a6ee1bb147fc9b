"""Measures delta and rho of every layer, or reads them from a layer profile, and compares the two."""

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farsight.analysis.layer_probes.one_layer import RopeProbe, probed, refuse_own_keys, rotating_layers
from farsight.analysis.layers.agreement import Overlap, p_value, spearman
from farsight.analysis.layers.rankings import usual_top
from farsight.analysis.layers.rows import Rows, mean_loss, read_rows
from farsight.analysis.layers.sensitivity import OWN_PAIRS, over_domains, read_pairs, sensitivity
from farsight.errors import ConfigError
from farsight.inference.decoder import Decoder
from farsight.inference.loading import load
from farsight.inference.model_options import READING, reading_options
from farsight.model.adapt.layers import largest
from farsight.progress import progress
from farsight.remote import shown


def rope_influence(decoder: Decoder, rows: Rows, gamma: float) -> tuple[float, list[float]]:
    """The mean loss, and each layer's rho: the increase with a changed base (GARFA, equation 6), 0 for layers without RoPE.

    Raises:
        ConfigError: an extension that rotates keys itself, a base too small for RoPE, or a non-finite loss.
    """
    refuse_own_keys(decoder)
    layers = decoder.config.layers(rows.length)
    for number, layer in enumerate(layers):
        base = getattr(layer.rotary, "theta", math.inf) * gamma
        if not base > 1:
            raise ConfigError(f"--gamma {gamma:g} makes the RoPE base of layer {number} {base:g}: it must be above 1.")
    baseline, rho = mean_loss(decoder, rows), []
    rotating = rotating_layers(decoder.config)
    for layer in progress(range(len(rotating)), unit="layer", desc="rho"):
        rho.append(0.0)
        if rotating[layer]:
            rho[layer] = mean_loss(probed(decoder, RopeProbe(layer, base=gamma)), rows) - baseline
    if not math.isfinite(baseline + sum(rho)):
        raise ConfigError("A loss is not a finite number: read the model with --dtype float32.")
    return baseline, rho


def compare(delta: Sequence[float], rho: Sequence[float], rotates: Sequence[bool], top: int) -> dict[str, Any]:
    """Agreement of the two profiles, and the top layers of each ranking.

    Args:
        rotates: whether each layer rotates; those that don't have no rho and are left out of the rankings by rho.
        top: number of layers at the top of a ranking, or all if there are fewer.
    """
    magnitude = [abs(value) for value in rho]
    rotating = [layer for layer, rotated in enumerate(rotates) if rotated]

    def leading(values: Sequence[float]) -> tuple[int, ...]:
        return tuple(rotating[place] for place in largest([values[layer] for layer in rotating], top))

    sensitive = largest(delta, top)
    by_rho = {"absolute_rho": leading(magnitude), "rho": leading(rho)}
    # Random sets to compare with can only contain layers that rotate.
    sensitive_rotating = {*sensitive} & {*rotating}
    shared = {name: Overlap.of(sensitive_rotating, layers, max(1, len(rotating))) for name, layers in by_rho.items()}
    signed, absolute = spearman(delta, rho), spearman(delta, magnitude)
    return {
        "spearman_signed": signed,
        "p_signed": p_value(signed, len(delta)),
        "spearman_absolute": absolute,
        "p_absolute": p_value(absolute, len(delta)),
        "top": {"delta": list(sensitive), **{name: list(layers) for name, layers in by_rho.items()}},
        "overlap": len(shared["absolute_rho"].layers),
        "overlap_expected": shared["absolute_rho"].expected,
        "shared": {name: dataclasses.asdict(overlap) for name, overlap in shared.items()},
        "signed_is_smallest": by_rho["rho"] == leading([-value for value in magnitude]) != by_rho["absolute_rho"],
    }


def read_profile(path: Path) -> dict[str, Any]:
    """Reads a layer profile with "delta" and "rho".

    Raises:
        ConfigError: no such file, or one without the two profiles; the message says what is missing.
    """
    try:
        profile = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--profile {path} is not a JSON file: {error}") from None
    for name in ("delta", "rho"):
        values = profile.get(name) if isinstance(profile, dict) else None
        if not isinstance(values, list) or not values or not all(_is_number(value) for value in values):
            raise ConfigError(f'--profile {path}: "{name}" must be a list of numbers, one per layer.')
    if len(profile["delta"]) != len(profile["rho"]):
        raise ConfigError(
            f'--profile {path}: "delta" has {len(profile["delta"])} layers and "rho" {len(profile["rho"])}; give both '
            "for all layers."
        )
    rotates = profile.get("rotates", [True] * len(profile["rho"]))
    if not isinstance(rotates, list) or [type(turns) for turns in rotates] != [bool] * len(profile["rho"]):
        raise ConfigError(f'--profile {path}: "rotates" must be true or false for each layer, or left out.')
    return profile


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def measure_model(options: argparse.Namespace) -> dict[str, Any]:
    """Measures the model that the command line names, and compares its delta with its rho."""
    options.dtype = options.dtype or "float32"  # rho is below the rounding error of 16 bits
    loaded = load(options.model, options)
    top = _top(options, loaded.config.architecture.n_layers)
    pairs = read_pairs(options.pairs or OWN_PAIRS)
    rows = read_rows(
        options.data,
        loaded.tokenizer,
        options.length,
        options.sequences,
        loaded.trained_length,
        loaded.config.architecture.vocab_size,
    )
    baseline, rho = rope_influence(loaded.decoder, rows, options.gamma)
    domains = sensitivity(loaded.decoder, loaded.tokenizer, pairs)
    delta, rotates = over_domains(domains), rotating_layers(loaded.config)
    return {
        "tool": "analysis.layers",
        "model": shown(options.model),
        "data": str(options.data),
        "rows": rows.kind,
        "length": rows.length,
        "trained_length": loaded.trained_length,
        "sequences": len(rows.tokens),
        "targets": rows.targets,
        "pairs": None if options.pairs is None else str(options.pairs),
        "gamma": options.gamma,
        **reading_options(options),
        "dtype": options.dtype,
        "baseline_loss": baseline,
        "rotates": rotates,
        "delta": delta,
        "rho": rho,
        "domains": domains,
        **compare(delta, rho, rotates, top),
    }


def _top(options: argparse.Namespace, n_layers: int) -> int:
    """The number of layers that each ranking lists; raises `ConfigError` for more than there are."""
    if (options.top or 0) > n_layers:
        raise ConfigError(
            f"--top {options.top}: {options.model or options.profile} has {n_layers} layers; set 1 to {n_layers}."
        )
    return options.top or usual_top(n_layers)


def compare_profile(options: argparse.Namespace) -> dict[str, Any]:
    """Compares delta with rho in the profile that the command line names."""
    profile = read_profile(options.profile)
    delta, rho = profile["delta"], profile["rho"]
    rotates, top = profile.get("rotates", [True] * len(rho)), _top(options, len(rho))
    return {
        "tool": "analysis.layers",
        "model": profile.get("model"),
        "profile": str(options.profile),
        "source": profile.get("source"),
        "rotates": rotates,
        "delta": delta,
        "rho": rho,
        **compare(delta, rho, rotates, top),
    }


def profile_of(figures: dict[str, Any]) -> dict[str, Any]:
    """The layer profile that fine-tuning reads."""
    settings = (
        "model", "data", "rows", "length", "sequences", "targets", "pairs", "gamma", *READING, "dtype",
        "baseline_loss", "rotates",
    )  # fmt: skip
    source = f"farsight layers: {figures['model']}, rho from {figures['gamma']:g} x each layer's RoPE base"
    return {"source": source, **{name: figures[name] for name in (*settings, "delta", "rho")}}
