"""Attention plasticity: how far into the context the query still decides which keys a head prefers (thesis, section 4.4).

    farsight plasticity MODEL_DIR --data FILE --json F --picture F.png
    farsight plasticity captured/ --covariance full --picture F.png
    farsight plasticity MODEL_DIR --data FILE --needle needle.json --picture F.png
    farsight plasticity runs/X --data FILE --json F --picture F.png

Two keys compete for a random query. If it prefers the first with probability p, the pair's plasticity is 4 p (1 − p): 1 if the
query alone decides, 0 if the keys alone do. A head's profile is the mean over pairs of earlier keys, for the queries of each
bucket of positions. It is computed in closed form, for Gaussian queries whose mean drifts with position, and also by counting
over the bucket's own queries. From it come AP overall, AP of the first and of the last 20 % of positions, their difference
AP_drop (the thesis's target is below 0.10), a table by layer, and a map by the distances between the keys and to the query.

MODEL_DIR is any model directory (including those written by transformers), an adapter, a checkpoint, or a folder that farsight
capture wrote. A run folder, or a recipe's folder with its stages, gives one row per checkpoint instead: bias strength and
plasticity over training, each checkpoint at its stage's length unless --length is given.

For a head with a limited scope, only keys within it compete. If the scope doesn't reach back to an earlier bucket, the head is
not measurable at this bucket width: it is listed and left out of all means. docs/analysis/plasticity.md has the equations.
"""

from pathlib import Path
from typing import get_args

from farsight.analysis.capture.options import SEQUENCES, add_capture_options, is_capture
from farsight.analysis.plasticity.options import DRAWS, Covariance, Pairs
from farsight.analysis.sequences import add_text_options
from farsight.cli import command, new_parser, positive
from farsight.inference.model_options import add_model_options
from farsight.outputs import add_output_options, write_json, write_picture


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight plasticity", __doc__)
    parser.add_argument("model", type=Path, help="model directory, adapter, checkpoint, capture, or run folder")
    add_text_options(parser, SEQUENCES, optional="required for a model, not for a capture")
    parser.add_argument(
        "--covariance",
        choices=get_args(Covariance),
        default="diagonal",
        help="covariance of the queries: equation 4.12's diagonal (default), or the full matrix",
    )
    parser.add_argument(
        "--pairs",
        choices=get_args(Pairs),
        default="pooled",
        help="keys of all earlier buckets (default; section 4.4.5), or of a random prefix of one sequence (definition 4.3)",
    )
    parser.add_argument("--draws", type=positive, default=DRAWS, help="pairs of keys to draw per bucket (%(default)s)")
    parser.add_argument(
        "--needle",
        type=Path,
        metavar="F",
        help="this model's JSON from farsight needle or farsight perplexity, to show by length beside plasticity",
    )
    add_capture_options(parser)
    add_model_options(parser, foreign=True)
    add_output_options(parser)
    options = parser.parse_args(arguments)
    if not is_capture(options.model) and options.data is None:
        parser.error(f"{options.model} is not a capture; to capture the model there, add --data FILE")
    if not options.model.is_dir():
        parser.error(
            f"{options.model} is not a folder; name a model directory, a checkpoint, a capture or a run folder"
        )

    from farsight.analysis.plasticity.checkpoints import find_checkpoints
    from farsight.analysis.plasticity.measure import measure_model, measure_training
    from farsight.analysis.plasticity.picture import draw, draw_training
    from farsight.analysis.plasticity.table import table, training_table

    checkpoints = find_checkpoints(options.model)
    if checkpoints:
        if options.needle:
            parser.error("--needle is for one model; name a model directory or a checkpoint in place of a run folder")
        figures = measure_training(checkpoints, options)
    else:
        figures = measure_model(options)
    print(training_table(figures["checkpoints"]) if checkpoints else table(figures))
    write_json(options.json, figures)
    write_picture(options.picture, draw_training if checkpoints else draw, figures)


if __name__ == "__main__":
    main()
