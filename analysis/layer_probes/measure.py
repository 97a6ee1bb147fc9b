"""Measures a model as it is and with each of its layers probed."""

import argparse
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from farsight.analysis.layer_probes.one_layer import (
    RopeProbe,
    mean_loss,
    noise_after,
    probed,
    refuse_own_keys,
    rotating_layers,
)
from farsight.analysis.layer_probes.options import DEPTHS, FACTORS, NOISE
from farsight.analysis.sequences import sequences_from_options, text_settings
from farsight.data.retrieval.tasks import parse_task
from farsight.errors import ConfigError
from farsight.evals.needle.measure import Grid, measure, parse_depths
from farsight.inference.decoder import Decoder
from farsight.inference.loading import LoadedModel, load
from farsight.inference.model_options import reading_options
from farsight.progress import progress
from farsight.remote import shown


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The measurements made on the model and with each probe.

    Args:
        tokens_SL: sequences to measure perplexity on.
        passkeys: passkeys to look for; None skips them.
        rows: passkey prompts per batch.
    """

    tokens_SL: Tensor
    passkeys: Grid | None = None
    rows: int = 8

    def of(self, loaded: LoadedModel, decoder: Decoder) -> dict[str, float]:
        """{"perplexity"} and, with passkeys, {"passkey"}: the accuracy, from 0 to 1."""
        figures = {"perplexity": math.exp(min(mean_loss(decoder, self.tokens_SL), 700))}
        if self.passkeys is not None:
            read = dataclasses.replace(loaded, decoder=decoder)
            figures["passkey"] = measure(read, self.passkeys, self.rows)["mean"]
        return figures


def probe_layers(
    loaded: LoadedModel, measurement: Measurement, probe: str, factors: Sequence[float] = (), seed: int = 0
) -> dict[str, Any]:
    """The figures of the model and of each layer's probes.

    Args:
        probe: one of `PROBES`.
        factors: k of "coarsen", or standard deviations of "noise" relative to a token's root mean square.
        seed: seed of the noise, which is the same for every layer and factor.

    Returns:
        {"baseline": figures, "layers": [{"layer", "rotates", "factor", …figures}]}, without "factor" for "mask".

    Raises:
        ConfigError: a probe of RoPE on a model without it, or together with an extension that rotates keys itself.
    """
    decoder = loaded.decoder
    rotating = rotating_layers(loaded.config)
    if probe != "noise":
        refuse_own_keys(decoder)
        if not any(rotating):
            raise ConfigError(f"--probe {probe}: no layer of the model rotates; --probe noise works without RoPE.")
    baseline = measurement.of(loaded, decoder)
    every = list(_probes(probe, len(rotating), factors))
    found = []
    for layer, factor in progress(every, unit="probe", desc=probe):
        if probe == "noise":
            with noise_after(decoder.model.layers[str(layer)], factor, seed):
                figures = measurement.of(loaded, decoder)
        elif rotating[layer]:
            changed = RopeProbe(layer, masked=True) if probe == "mask" else RopeProbe(layer, group=int(factor))
            figures = measurement.of(loaded, probed(decoder, changed))
        else:
            figures = baseline
        named = {} if probe == "mask" else {"factor": factor}
        found.append({"layer": layer, "rotates": rotating[layer], **named, **figures})
    return {"baseline": baseline, "layers": found}


def _probes(probe: str, n_layers: int, factors: Sequence[float]) -> Iterator[tuple[int, float]]:
    """(layer, factor) of each probe; masking has a single factor, 0."""
    for factor in (0,) if probe == "mask" else factors:
        for layer in range(n_layers):
            yield layer, factor


def measure_model(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of the model that the command line names."""
    loaded = load(options.model, options)
    length = options.length or loaded.trained_length
    tokens_SL = sequences_from_options(options, loaded.tokenizer, length)
    passkeys, passkey_length = None, None
    if options.passkey:
        passkey_length = options.passkey_length or loaded.trained_length
        depths = parse_depths([str(DEPTHS)])
        passkeys = Grid(parse_task("passkey"), (passkey_length,), depths, options.passkey, options.seed)
    factors = {"mask": (), "coarsen": options.factors or FACTORS, "noise": options.noise or NOISE}[options.probe]
    measurement = Measurement(tokens_SL, passkeys, options.rows or 8)
    return {
        "tool": "analysis.layer_probes",
        "model": shown(options.model),
        "probe": options.probe,
        "factors": list(factors),
        "data": str(options.data),
        "length": length,
        "sequences": len(tokens_SL),
        "passkey_trials": options.passkey,
        "passkey_length": passkey_length,
        "seed": options.seed,
        **text_settings(options),
        **reading_options(options),
        **probe_layers(loaded, measurement, options.probe, factors, options.seed),
    }
