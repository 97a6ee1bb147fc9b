"""Measures how well a token's position in its sequence can be read from each layer of a model (SCOPE, appendix B.1).

    farsight probes MODEL_DIR --data held_out.jsonl --length 1024
    farsight probes runs/scope/model runs/rope/model --data held_out.jsonl --json probes.json --picture probes.png
    farsight probes MODEL_DIR --data held_out.jsonl --probe linear

For each layer (and the embedding, as layer -1) a probe is trained on the hidden states: a 2-layer MLP, or a linear map. It is
trained on most of the sequences; its error on the held-out ones is reported, as the mean absolute distance in tokens between
predicted and true position. "guess" is the error of always predicting the same position, near the middle.

The paper finds low errors in early layers and higher ones after them in most models. A probe's error depends on how many tokens
it is trained on, so a layer may hold more position information than its probe can read.
"""

import argparse
from typing import Any, get_args

from farsight.analysis.probes.settings import Kind, ProbeSettings, Target
from farsight.analysis.sequences import add_text_options
from farsight.cli import above_zero, bounded, command, model_path, new_parser, positive
from farsight.errors import ConfigError
from farsight.inference.model_options import add_model_options
from farsight.outputs import add_output_options, write_figures, write_picture
from farsight.remote import shown

SEQUENCES = 100


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("farsight probes", __doc__)
    add = parser.add_argument
    add("models", nargs="+", type=model_path, metavar="MODEL_DIR", help="directories, adapters or checkpoints")
    add_text_options(parser, SEQUENCES)
    default = ProbeSettings(length=1024)
    add(
        "--tokens-per-sequence",
        type=positive,
        default=default.tokens_per_sequence,
        metavar="N",
        help="tokens to use per sequence at most, drawn uniformly of longer ones (%(default)s, the paper's length)",
    )
    add(
        "--held-out",
        type=bounded(float, above=0, below=1),
        default=default.held_out,
        metavar="SHARE",
        help="share of the sequences to hold out (%(default)g)",
    )
    add("--probe", choices=get_args(Kind), default=default.probe, help="2-layer MLP or linear map (%(default)s)")
    add(
        "--target",
        choices=get_args(Target),
        default=default.target,
        help="predict the position as a class (the likeliest counts) or as a number (%(default)s)",
    )
    add("--epochs", type=positive, default=default.epochs, help="passes over the tokens (%(default)s)")
    add("--width", type=positive, default=default.width, help="units in the MLP's hidden layer (%(default)s)")
    add("--batch", type=positive, default=default.batch, metavar="TOKENS", help="tokens per step (%(default)s)")
    add(
        "--learning-rate",
        type=above_zero,
        default=default.learning_rate,
        metavar="X",
        help="initial learning rate of Adam, which falls to 0 (%(default)g)",
    )
    add("--buckets", type=positive, default=default.buckets, help="buckets of positions in the map (%(default)s)")
    add_model_options(parser, foreign=True)
    add_output_options(parser)
    return parser


@command
def main(arguments: list[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)

    from farsight.analysis.probes.measure import probe_from_options
    from farsight.analysis.probes.picture import draw
    from farsight.analysis.probes.table import table

    results: dict[str, dict[str, Any]] = {}
    for path in options.models:
        # A copy, as it gets the model's own dtype and start token.
        results[shown(path)] = probe_from_options(path, argparse.Namespace(**vars(options)))
    first = next(iter(results.values()))
    lengths = {figures["length"] for figures in results.values()}
    if len(lengths) > 1:
        raise ConfigError(
            f"The models were trained at {' and '.join(map(str, sorted(lengths)))} tokens: set --length to compare them."
        )
    print(
        f"mean absolute error in tokens: {first['sequences_held_out']} of {first['sequences']} sequences of "
        f"{first['length']:,} held out, {first['probe']} probes, target {first['target']}"
    )
    print(table(results))
    write_figures(options.json, results)
    write_picture(options.picture, draw, results)


if __name__ == "__main__":
    main()
