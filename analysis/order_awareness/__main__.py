"""Measures how far back a model can tell the order of tokens: Definition 2.1 of SCOPE, on a real model.

    farsight order-awareness MODEL_DIR --data FILE --json F --picture F
    farsight order-awareness MODEL_DIR --data FILE --length 4096 --permutations 16

For t = 2, 4, 8 … up to the length, the last t tokens of a sequence are permuted, and the last position's hidden state is compared
with the original one after each block: ‖f(x) − f(πx)‖ / ‖f(x)‖. There are three kinds of permutations:
1. Random ones of all t tokens. Nearly all of them change the last token itself, which any model notices.
2. Random ones that keep the last token in place. They test whether the model knows the order of what came before. They also move
   nearby tokens, so a model that sees only those notices as well.
3. Exchanges of the two tokens furthest back.
The horizon is the largest t such that, for it and every smaller t, all permutations of kinds 2 and 3 changed the state by more
than --tolerance. Permutations that leave the sequence unchanged, because tokens are equal, are redrawn; a t without any other
permutation is skipped.

The model runs in double precision, since the effect of order in an untrained model is below the rounding error of single
precision. A horizon means that order is in the state. It doesn't mean that the model uses it, or that 16 bits would preserve it.
"""

from farsight.analysis.order_awareness.options import PERMUTATIONS, SEQUENCES, TOLERANCE
from farsight.analysis.sequences import add_text_options
from farsight.cli import above_zero, command, model_path, new_parser, positive
from farsight.inference.model_options import add_model_options
from farsight.outputs import add_output_options, write_json, write_picture


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight order-awareness", __doc__)
    parser.add_argument("model", type=model_path, help="model directory, adapter or checkpoint")
    add_text_options(parser, SEQUENCES)
    parser.add_argument(
        "--permutations",
        type=positive,
        default=PERMUTATIONS,
        metavar="N",
        help="permutations of each random kind, per span and sequence (%(default)s)",
    )
    parser.add_argument(
        "--tolerance",
        type=above_zero,
        default=TOLERANCE,
        metavar="X",
        help="relative change that counts as noticed (%(default)g)",
    )
    add_model_options(parser)
    add_output_options(parser)
    options = parser.parse_args(arguments)
    if options.dtype is not None:
        parser.error(f"--dtype {options.dtype}: the model always runs in double precision here; leave it out")

    from farsight.analysis.order_awareness.measure import measure_model
    from farsight.analysis.order_awareness.picture import draw
    from farsight.analysis.order_awareness.table import table

    figures = measure_model(options)
    print(table(figures))
    write_json(options.json, figures)
    write_picture(options.picture, draw, figures)


if __name__ == "__main__":
    main()
