"""Which layers tell right from wrong, which depend on their RoPE, and whether these are the same (GARFA, section 3).

    farsight layers MODEL_DIR --data FILE --out profile.json --json F --picture F.png
    farsight layers MODEL_DIR --data FILE --length 2048 --pairs PAIRS.jsonl --gamma 4 --top 6
    farsight layers --profile configs/finetune/llama3.1_8b_profile.json

delta of a layer: how far the mean hidden states of a right text and of one that is nearly the same and wrong lie apart after it
(1 - cosine), averaged over the pairs of a domain, then over domains. --pairs takes your own, a .jsonl of {"domain", "correct",
"wrong"}; otherwise fifteen that come with Farsight.
rho of a layer: what the mean loss on --data gains when that layer's RoPE base alone is multiplied by --gamma. Every layer is
measured; one without RoPE has rho 0 and is marked.

The table is followed by Spearman's correlation of delta with rho, signed and absolute, and by the layers that lead each profile.
--out writes the profile that fine-tuning reads: layer_profile = "profile.json" with lora.layers = "sensitive:10".
--profile compares the profiles of such a file, and reads no model.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from farsight.analysis.layer_probes.one_layer import RopeProbe, mean_loss, probed, refuse_own_keys, rotating_layers
from farsight.analysis.layers.agreement import Overlap, spearman
from farsight.analysis.layers.picture import draw
from farsight.analysis.layers.sensitivity import OWN_PAIRS, over_domains, read_pairs, sensitivity
from farsight.analysis.sequences import add_text_options, read_sequences
from farsight.cli import bounded, command, positive
from farsight.configs.check import ConfigError
from farsight.files import prepare_file, write_text
from farsight.inference.decoder import Decoder
from farsight.inference.loading import load
from farsight.inference.model_options import add_model_options
from farsight.model.adapt.layers import largest
from farsight.outputs import add_output_options, check_outputs
from farsight.progress import progress

TOP = 10
SEQUENCES = 8
RANKINGS = {"delta": "delta", "absolute_rho": "|rho|", "rho": "signed rho"}
MEASURING = ("data", "length", "sequences", "pairs", "gamma", "out", "device", "dtype", "extend", "chunk")
"""Options that say how a model is measured."""


def rope_influence(decoder: Decoder, tokens_SL: Tensor, gamma: float) -> tuple[float, list[float]]:
    """The mean loss, and rho of each layer: what it gains by a changed base (GARFA, equation 6); 0 where nothing rotates.

    Raises:
        ConfigError: an extension that turns keys itself, a base that RoPE cannot take, or a loss that is no number.
    """
    refuse_own_keys(decoder)
    layers = decoder.config.layers(tokens_SL.shape[1])
    for number, layer in enumerate(layers):
        base = getattr(layer.rotary, "theta", math.inf) * gamma
        if not base > 1:
            raise ConfigError(
                f"--gamma {gamma:g} makes the RoPE base of layer {number} {base:g}: it has to be above 1."
            )
    baseline, rho = mean_loss(decoder, tokens_SL), []
    rotating = rotating_layers(decoder.config)
    for layer in progress(range(len(rotating)), unit="layer", desc="rho"):
        rho.append(0.0)
        if rotating[layer]:
            rho[layer] = mean_loss(probed(decoder, RopeProbe(layer, base=gamma)), tokens_SL) - baseline
    if not math.isfinite(baseline + sum(rho)):
        raise ConfigError("A loss is not a finite number: read the model with --dtype float32.")
    return baseline, rho


def compare(delta: Sequence[float], rho: Sequence[float], rotates: Sequence[bool], top: int) -> dict[str, Any]:
    """How the two profiles go together, and which layers lead each.

    Args:
        rotates: layers that do not have no rho to lead by.
        top: so many lead, or all where there are fewer.
    """
    magnitude = [abs(value) for value in rho]
    turning = [layer for layer, turns in enumerate(rotates) if turns]

    def leading(values: Sequence[float]) -> tuple[int, ...]:
        return tuple(turning[place] for place in largest([values[layer] for layer in turning], top))

    sensitive = largest(delta, top)
    by_rho = {"absolute_rho": leading(magnitude), "rho": leading(rho)}
    # Random sets, too, could only have layers that turn.
    sensitive_turning = {*sensitive} & {*turning}
    shared = {name: Overlap.of(sensitive_turning, layers, max(1, len(turning))) for name, layers in by_rho.items()}
    return {
        "spearman_signed": spearman(delta, rho),
        "spearman_absolute": spearman(delta, magnitude),
        "top": {"delta": list(sensitive), **{name: list(layers) for name, layers in by_rho.items()}},
        "overlap": len(shared["absolute_rho"].layers),
        "overlap_expected": shared["absolute_rho"].expected,
        "shared": {name: dataclasses.asdict(overlap) for name, overlap in shared.items()},
        "signed_is_smallest": by_rho["rho"] == leading([-value for value in magnitude]) != by_rho["absolute_rho"],
    }


def usual_top(n_layers: int) -> int:
    """Ten, or a third of the layers of a small model, as ten of 32 are."""
    return min(TOP, max(1, n_layers // 3))


def read_profile(path: Path) -> dict[str, Any]:
    """A layer profile with "delta" and "rho".

    Raises:
        ConfigError: naming the file and what it lacks.
    """
    try:
        profile = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--profile {path} is no JSON file: {error}") from None
    for name in ("delta", "rho"):
        values = profile.get(name) if isinstance(profile, dict) else None
        if not isinstance(values, list) or not values or not all(_is_number(value) for value in values):
            raise ConfigError(f'--profile {path}: "{name}" has to be a list of numbers, one a layer.')
    if len(profile["delta"]) != len(profile["rho"]):
        raise ConfigError(
            f'--profile {path}: "delta" has {len(profile["delta"])} layers and "rho" {len(profile["rho"])}; give both '
            "of all layers."
        )
    rotates = profile.get("rotates", [True] * len(profile["rho"]))
    if not isinstance(rotates, list) or [type(turns) for turns in rotates] != [bool] * len(profile["rho"]):
        raise ConfigError(f'--profile {path}: "rotates" has to say true or false of each layer, or be left out.')
    return profile


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def table(figures: dict[str, Any]) -> str:
    """The profiles, a line a layer, and how they compare."""
    top, lines = figures["top"], [f"{'layer':>5}{'delta':>12}{'rho':>12}   leads by"]
    for layer, (delta, rho) in enumerate(zip(figures["delta"], figures["rho"], strict=True)):
        note = ", ".join(RANKINGS[name] for name in RANKINGS if layer in top[name])
        note += "" if figures["rotates"][layer] else " (no rotation)"
        lines.append(f"{layer:>5}{delta:>12.3e}{rho:>+12.5f}   {note}".rstrip())
    if not any(figures["rotates"]):
        lines.append(f"top {len(top['delta'])} by delta: {' '.join(map(str, top['delta']))}")
        return "\n".join([*lines, "No layer rotates, so there is no rho to compare delta with."])
    signed, absolute = (_signed(figures[f"spearman_{kind}"]) for kind in ("signed", "absolute"))
    lines.append(f"Spearman of delta with rho: {signed} (signed), {absolute} (absolute)")
    for name, meaning in RANKINGS.items():
        lines.append(f"top {len(top[name])} by {meaning}: {' '.join(map(str, top[name]))}")
        if name == "rho" and figures["signed_is_smallest"]:
            lines[-1] += "  (the smallest |rho|)"
        if name in figures["shared"]:
            o = figures["shared"][name]
            lines.append(
                f"  {len(o['layers'])} shared with delta, {o['expected']:.1f} expected of random sets (so many or fewer: "
                f"P = {o['at_most']:.2g}, so many or more: P = {o['at_least']:.2g})"
            )
    return "\n".join(lines)


def _signed(value: float | None) -> str:
    return "undefined, as all layers are equal" if value is None else f"{value:+.3f}"


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="farsight layers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?", help="model directory, adapter or checkpoint")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="compare the profiles in here; no model is read")
    add_text_options(parser, SEQUENCES, seed=False)
    parser.add_argument(
        "--pairs", type=Path, metavar="FILE", help="right and wrong texts (default: fifteen of our own)"
    )
    parser.add_argument(
        "--gamma",
        type=bounded(float, above=0),
        default=2.0,
        metavar="X",
        help="factor on a layer's RoPE base (%(default)g)",
    )
    parser.add_argument(
        "--top", type=positive, metavar="K", help=f"layers of a ranking (default: {TOP}, at most a third of the layers)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the layer profile that fine-tuning reads")
    add_model_options(parser)
    add_output_options(parser)
    options = parser.parse_args(arguments)
    _check(parser, options)
    figures = _compared(options) if options.profile else _measured(options)
    print(table(figures))
    if options.out:
        write_text(options.out, json.dumps(_profile(figures), indent=2) + "\n")
        print(options.out)
    if options.json:
        write_text(options.json, json.dumps(figures, indent=2) + "\n")
    if options.picture:
        draw(figures, options.picture)
        print(options.picture)


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if (options.model is None) == (options.profile is None):
        parser.error("give a model directory, or --profile FILE for profiles that were measured already")
    given = [name for name in MEASURING if getattr(options, name) != parser.get_default(name)]
    if options.profile and given:
        parser.error(f"--{given[0]} is for measuring a model; --profile measures nothing")
    if options.model is not None and options.data is None:
        parser.error("--data FILE is needed: the text whose loss each layer's RoPE is judged by")
    if options.gamma == 1:
        parser.error("--gamma 1 leaves RoPE's base as it is; set another factor, for example 2")
    if options.out:
        prepare_file(options.out)
    check_outputs(parser, options)


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    options.dtype = options.dtype or "float32"  # rho is smaller than what 16 bits round off
    loaded = load(options.model, options)
    pairs = read_pairs(options.pairs or OWN_PAIRS)
    length = options.length or loaded.trained_length
    tokens_SL = read_sequences(options.data, loaded.tokenizer, length, options.sequences)
    baseline, rho = rope_influence(loaded.decoder, tokens_SL, options.gamma)
    domains = sensitivity(loaded.decoder, loaded.tokenizer, pairs)
    delta, rotates = over_domains(domains), rotating_layers(loaded.config)
    return {
        "tool": "analysis.layers",
        "model": str(options.model),
        "data": str(options.data),
        "length": length,
        "sequences": len(tokens_SL),
        "pairs": None if options.pairs is None else str(options.pairs),
        "gamma": options.gamma,
        "extend": options.extend,
        "dtype": options.dtype,
        "baseline_loss": baseline,
        "rotates": rotates,
        "delta": delta,
        "rho": rho,
        "domains": domains,
        **compare(delta, rho, rotates, options.top or usual_top(len(delta))),
    }


def _compared(options: argparse.Namespace) -> dict[str, Any]:
    profile = read_profile(options.profile)
    delta, rho = profile["delta"], profile["rho"]
    rotates = profile.get("rotates", [True] * len(rho))
    return {
        "tool": "analysis.layers",
        "model": profile.get("model"),
        "profile": str(options.profile),
        "source": profile.get("source"),
        "rotates": rotates,
        "delta": delta,
        "rho": rho,
        **compare(delta, rho, rotates, options.top or usual_top(len(delta))),
    }


def _profile(figures: dict[str, Any]) -> dict[str, Any]:
    settings = ("model", "data", "length", "sequences", "pairs", "gamma", "extend", "dtype", "baseline_loss", "rotates")
    source = f"analysis.layers: {figures['model']}, rho from {figures['gamma']:g} x each layer's RoPE base"
    return {"source": source, **{name: figures[name] for name in (*settings, "delta", "rho")}}


if __name__ == "__main__":
    main()
