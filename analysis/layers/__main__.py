"""Sensitivity of each layer to correctness, influence of its RoPE, and the agreement of the two (GARFA, section 3).

    farsight layers MODEL_DIR --data FILE --out profile.json --json F --picture F.png
    farsight layers MODEL_DIR --data INSTRUCTIONS.jsonl --length 1024 --sequences 64 --quantization nf4
    farsight layers MODEL_DIR --data FILE --length 2048 --pairs PAIRS.jsonl --gamma 4 --top 6
    farsight layers --profile configs/finetune/llama3.1_8b_profile.json

delta of a layer: the cosine distance between the layer's mean hidden states for a correct text and for a nearly identical wrong
one, averaged over the pairs of a domain, then over domains. --pairs takes your own pairs, a .jsonl of {"domain", "correct",
"wrong"}; the default is the fifteen that come with Farsight.
rho of a layer: the increase of the mean loss on --data when the RoPE base of that layer alone is multiplied by --gamma. All
layers are measured; one without RoPE has rho 0 and is marked. --data is a text, read in windows that begin with the start token, or
instructions in one of fine-tuning's formats, where the loss is that of the answers.

The table is followed by Spearman's correlation of delta with rho, signed and absolute, with two-sided p-values, and by the top layers
of each ranking. --picture draws both profiles, and delta against rho.
--out writes the profile that fine-tuning reads: layer_profile = "profile.json" with lora.layers = "sensitive:10".
--profile compares the profiles in such a file, without reading a model.
"""

import argparse
from pathlib import Path

from farsight.analysis.layers.rankings import TOP
from farsight.cli import above_zero, command, model_path, new_parser, positive
from farsight.inference.model_options import add_model_options
from farsight.outputs import add_output_options, output_file, write_json, write_picture

SEQUENCES = 8
MEASURING = (
    "data", "length", "sequences", "pairs", "gamma", "quantization", "out", "device", "dtype", "extend", "scope_max", "chunk",
)  # fmt: skip
"""Options that only matter when a model is measured."""


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight layers", __doc__)
    add = parser.add_argument
    add("model", type=model_path, nargs="?", help="model directory, adapter or checkpoint")
    add("--profile", type=Path, metavar="FILE", help="compare the profiles in this file; reads no model")
    add(
        "--data",
        type=Path,
        metavar="FILE",
        help='.jsonl of {"text": …}, a text file, or instructions: .jsonl, .json or .parquet (required with MODEL_DIR)',
    )
    add(
        "--length",
        type=positive,
        metavar="L",
        help="tokens per window, or at most of a row of instructions (default: the trained length, or the longest windows of which "
        "the text gives --sequences)",
    )
    add(
        "--sequences",
        type=positive,
        default=SEQUENCES,
        metavar="N",
        help="windows, or rows from the start of the file, to read at most (%(default)s)",
    )
    add(
        "--quantization",
        choices=("nf4", "fp4", "int8"),
        help="keep the blocks' linear layers in 4 or 8 bits, as fine-tuning's base_model.quantization does",
    )
    add("--pairs", type=Path, metavar="FILE", help="correct and wrong texts (default: fifteen built in)")
    add("--gamma", type=above_zero, default=2.0, metavar="X", help="factor on a layer's RoPE base (%(default)g)")
    add(
        "--top",
        type=positive,
        metavar="K",
        help=f"layers to list per ranking (default: {TOP}, but at most a third of the layers)",
    )
    add("--out", type=output_file, metavar="FILE", help="write the layer profile that fine-tuning reads")
    add_model_options(parser)
    add_output_options(parser)
    options = parser.parse_args(arguments)
    _check(parser, options)

    from farsight.analysis.layers.measure import compare_profile, measure_model, profile_of
    from farsight.analysis.layers.picture import draw
    from farsight.analysis.layers.table import table

    figures = compare_profile(options) if options.profile else measure_model(options)
    print(table(figures))
    if options.out:
        write_json(options.out, profile_of(figures))
        print(options.out)
    write_json(options.json, figures)
    write_picture(options.picture, draw, figures)


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if (options.model is None) == (options.profile is None):
        parser.error("give a model directory, or --profile FILE for profiles measured earlier")
    given = [name for name in MEASURING if getattr(options, name) != parser.get_default(name)]
    if options.profile and given:
        parser.error(f"--{given[0].replace('_', '-')} is for measuring a model; --profile measures nothing")
    if options.model is not None and options.data is None:
        parser.error("--data FILE is needed: a text to measure the loss on, for each layer's rho")
    if options.gamma == 1:
        parser.error("--gamma 1 leaves RoPE's base as it is; set another factor, for example 2")


if __name__ == "__main__":
    main()
