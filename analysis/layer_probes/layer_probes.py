"""What a model loses when one layer alone loses its positions, their resolution, or its precision (LASP, section 4.1 and A.2).

    farsight layer-probes MODEL_DIR --data FILE --probe mask --json F --picture F.png
    farsight layer-probes MODEL_DIR --data FILE --probe coarsen --factors 2 8 64 512 --picture F.png
    farsight layer-probes MODEL_DIR --data FILE --probe mask --passkey 5 --passkey-length 1024
    farsight layer-probes MODEL_DIR --data FILE --probe noise --noise 0.1 0.5

Layer by layer, and beside the model as it is:
mask     the layer's queries and keys are turned as if every token stood at position 0; YaRN's temperature stays.
coarsen  token m is turned as if it stood at floor(m / k), for each k of --factors: k tokens share a position.
noise    Gaussian noise is added to the layer's output hidden states, --noise times each token's root mean square: a control for
         errors that grow on their way through the layers after it.

Measured is the perplexity of all tokens of --sequences sequences of --length tokens but their first; and with --passkey N the mean
accuracy of N prompts at each of ten depths, as farsight needle has it. Layers without RoPE lose nothing by mask and coarsen: they
are given the model's own figures and marked.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
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
from farsight.analysis.layer_probes.picture import draw
from farsight.analysis.sequences import add_text_options, read_sequences
from farsight.cli import bounded, command, positive
from farsight.configs.check import ConfigError
from farsight.data.retrieval.tasks import parse_task
from farsight.evals.needle.measure import Grid, measure, parse_depths
from farsight.files import write_text
from farsight.inference.decoder import Decoder
from farsight.inference.loading import LoadedModel, load
from farsight.inference.model_options import add_model_options
from farsight.outputs import add_output_options, check_outputs
from farsight.progress import progress

PROBES = ("mask", "coarsen", "noise")
FACTORS = (2, 8, 64, 512)
NOISE = (0.1,)
DEPTHS = 10
SEQUENCES = 16


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What is measured of the model and of each probe.

    Args:
        tokens_SL: whose perplexity.
        passkeys: and how many of these are found; None measures none.
        rows: prompts that are read together.
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
    """The model's figures and those of each layer's probes.

    Args:
        probe: of `PROBES`.
        factors: k of "coarsen", or standard deviations of "noise" in units of a token's root mean square.
        seed: of the noise, which is the same in every layer and at every factor.

    Returns:
        {"baseline": figures, "layers": [{"layer", "rotates", "factor", …figures}]}, without "factor" for "mask".

    Raises:
        ConfigError: a model without RoPE for a probe of it, or an extension that turns keys itself.
    """
    decoder = loaded.decoder
    rotating = rotating_layers(loaded.config)
    if probe != "noise":
        refuse_own_keys(decoder)
        if not any(rotating):
            raise ConfigError(f"--probe {probe}: no layer of the model rotates; --probe noise does without RoPE.")
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
    """Layer and factor of each; masking has one."""
    for factor in (0,) if probe == "mask" else factors:
        for layer in range(n_layers):
            yield layer, factor


def table(figures: dict[str, Any]) -> str:
    """Perplexity, and accuracy in per cent, a line a layer and a column a factor."""
    baseline, probe, entries = figures["baseline"], figures["probe"], figures["layers"]
    factors = list(dict.fromkeys(entry.get("factor") for entry in entries))
    shown = [probe if factor is None else f"{probe} {factor:g}" for factor in factors]
    lines = []
    for name, title, scale in (("perplexity", "perplexity", 1), ("passkey", "passkeys found, in %", 100)):
        if name not in baseline:
            continue
        lines.append(f"{title}: {_number(baseline[name], scale)} without a probe")
        lines.append(f"{'layer':>5}" + "".join(f"{column:>14}" for column in shown))
        for layer in dict.fromkeys(entry["layer"] for entry in entries):
            own = [entry for entry in entries if entry["layer"] == layer]
            still = probe != "noise" and not own[0]["rotates"]
            cells = "".join(f"{_number(entry[name], scale):>14}" for entry in own)
            lines.append(f"{layer:>5}{cells}" + ("  (no rotation)" if still else ""))
    return "\n".join(lines)


def _number(value: float, scale: int) -> str:
    return f"{scale * value:.1f}" if scale > 1 else f"{value:,.3f}" if value < 1e6 else f"{value:.3g}"


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="farsight layer-probes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, help="model directory, adapter or checkpoint")
    parser.add_argument("--probe", choices=PROBES, required=True, help="what a layer loses")
    add_text_options(parser, SEQUENCES)
    parser.add_argument(
        "--factors",
        type=positive,
        nargs="+",
        metavar="K",
        help=f"of coarsen: tokens at a position (default: {_list(FACTORS)})",
    )
    parser.add_argument(
        "--noise",
        type=bounded(float, least=0),
        nargs="+",
        metavar="X",
        help=f"of noise: its size to a token's (default: {_list(NOISE)})",
    )
    parser.add_argument("--passkey", type=positive, metavar="N", help=f"also passkeys, N at each of {DEPTHS} depths")
    parser.add_argument(
        "--passkey-length", type=positive, metavar="L", help="of prompt and answer (default: the trained length)"
    )
    parser.add_argument("--rows", type=positive, metavar="N", help="passkey prompts read together (default: 8)")
    add_model_options(parser)
    add_output_options(parser)
    options = parser.parse_args(arguments)
    _check(parser, options)
    figures = _figures(options)
    print(table(figures))
    if options.json:
        write_text(options.json, json.dumps(_without_nan(figures), indent=2, allow_nan=False) + "\n")
    if options.picture:
        draw(figures, options.picture)
        print(options.picture)


def _list(values: Sequence[float]) -> str:
    return " ".join(f"{value:g}" for value in values)


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.data is None:
        parser.error("--data FILE is needed: the text whose perplexity is measured")
    for name, probe in (("factors", "coarsen"), ("noise", "noise")):
        if getattr(options, name) and options.probe != probe:
            parser.error(f"--{name} goes with --probe {probe}, and this is --probe {options.probe}")
    for name in ("passkey_length", "rows"):
        if getattr(options, name) and not options.passkey:
            parser.error(f"--{name.replace('_', '-')} goes with --passkey N, the prompts at each depth")
    check_outputs(parser, options)


def _figures(options: argparse.Namespace) -> dict[str, Any]:
    loaded = load(options.model, options)
    length = options.length or loaded.trained_length
    tokens_SL = read_sequences(options.data, loaded.tokenizer, length, options.sequences)
    passkeys, passkey_length = None, None
    if options.passkey:
        passkey_length = options.passkey_length or loaded.trained_length
        depths = parse_depths([str(DEPTHS)])
        passkeys = Grid(parse_task("passkey"), (passkey_length,), depths, options.passkey, options.seed)
    factors = {"mask": (), "coarsen": options.factors or FACTORS, "noise": options.noise or NOISE}[options.probe]
    measurement = Measurement(tokens_SL, passkeys, options.rows or 8)
    return {
        "tool": "analysis.layer_probes",
        "model": str(options.model),
        "probe": options.probe,
        "factors": list(factors),
        "data": str(options.data),
        "length": length,
        "sequences": len(tokens_SL),
        "passkey_trials": options.passkey,
        "passkey_length": passkey_length,
        "seed": options.seed,
        "extend": options.extend,
        **probe_layers(loaded, measurement, options.probe, factors, options.seed),
    }


def _without_nan(value: Any) -> Any:
    """NaN is no JSON: null."""
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value


if __name__ == "__main__":
    main()
