"""The loss of quality when a single layer loses its positions, their resolution, or its precision (LASP, sections 4.1 and A.2).

    farsight layer-probes MODEL_DIR --data FILE --probe mask --json F --picture F.png
    farsight layer-probes MODEL_DIR --data FILE --probe coarsen --factors 2 8 64 512 --picture F.png
    farsight layer-probes MODEL_DIR --data FILE --probe mask --passkey 5 --passkey-length 1024
    farsight layer-probes MODEL_DIR --data FILE --probe noise --noise 0.1 0.5

Each layer is probed in turn, and compared with the unmodified model:
mask     the layer's queries and keys are rotated as if every token were at position 0; YaRN's temperature stays.
coarsen  token m is rotated as if it were at floor(m / k), for each k of --factors: k tokens share a position.
noise    Gaussian noise is added to the layer's output hidden states, with a standard deviation of --noise times each token's root
         mean square: a control for errors that grow in the layers after it.

Reports the perplexity over --sequences sequences of --length tokens (all tokens but the first of each) and, with --passkey N, the
mean accuracy on N prompts at each of ten depths, as in farsight needle. mask and coarsen do nothing to layers without RoPE: these
get the unmodified model's figures and are marked.
"""

import argparse
from collections.abc import Sequence

from farsight.analysis.layer_probes.options import DEPTHS, FACTORS, NOISE, PROBES, SEQUENCES
from farsight.analysis.sequences import add_text_options
from farsight.cli import bounded, command, model_path, new_parser, positive
from farsight.inference.model_options import add_model_options
from farsight.json_files import finite_or_null
from farsight.outputs import add_output_options, write_json, write_picture


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight layer-probes", __doc__)
    add = parser.add_argument
    add("model", type=model_path, help="model directory, adapter or checkpoint")
    add("--probe", choices=PROBES, required=True, help="what to do to a layer")
    add_text_options(parser, SEQUENCES)
    add(
        "--factors",
        type=positive,
        nargs="+",
        metavar="K",
        help=f"for coarsen: tokens that share a position (default: {_list(FACTORS)})",
    )
    add(
        "--noise",
        type=bounded(float, least=0),
        nargs="+",
        metavar="X",
        help=f"for noise: its size relative to a token's hidden state (default: {_list(NOISE)})",
    )
    add("--passkey", type=positive, metavar="N", help=f"also look for passkeys, N at each of {DEPTHS} depths")
    add(
        "--passkey-length", type=positive, metavar="L", help="tokens of prompt and answer (default: the trained length)"
    )
    add("--rows", type=positive, metavar="N", help="passkey prompts per batch (default: 8)")
    add_model_options(parser)
    add_output_options(parser)
    options = parser.parse_args(arguments)
    _check(parser, options)

    from farsight.analysis.layer_probes.measure import measure_model
    from farsight.analysis.layer_probes.picture import draw
    from farsight.analysis.layer_probes.table import table

    figures = measure_model(options)
    print(table(figures))
    write_json(options.json, finite_or_null(figures), allow_nan=False)
    write_picture(options.picture, draw, figures)


def _list(values: Sequence[float]) -> str:
    return " ".join(f"{value:g}" for value in values)


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    for name, probe in (("factors", "coarsen"), ("noise", "noise")):
        if getattr(options, name) and options.probe != probe:
            parser.error(f"--{name} goes with --probe {probe}, and this is --probe {options.probe}")
    for name in ("passkey_length", "rows"):
        if getattr(options, name) and not options.passkey:
            parser.error(f"--{name.replace('_', '-')} goes with --passkey N, the prompts at each depth")


if __name__ == "__main__":
    main()
