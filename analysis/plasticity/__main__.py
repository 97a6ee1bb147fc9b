"""Attention plasticity: how far into the context the query still decides which keys a head prefers (thesis, section 4.4).

    farsight plasticity MODEL_DIR --data FILE --json F --picture F.png
    farsight plasticity captured/ --covariance full --picture F.png
    farsight plasticity MODEL_DIR --data FILE --needle needle.json --picture F.png
    farsight plasticity runs/X --data FILE --json F --picture F.png
    farsight plasticity stage1/ stage2/ extended/ --checkpoints --data FILE --picture F.png
    farsight plasticity ONE_DIR OTHER_DIR --data FILE --length 131072 --json F --picture F.png

Two keys compete for a random query. If it prefers the first with probability p, the pair's plasticity is 4 p (1 − p): 1 if the
query alone decides, 0 if the keys alone do. A head's profile is the mean over pairs of earlier keys, for the queries of each
bucket of positions. It is computed in closed form, for Gaussian queries whose mean drifts with position, and also by counting
over the bucket's own queries. From it come AP overall, AP of the first and of the last 20 % of positions, their difference
AP_drop (the thesis's target is below 0.10), a table by layer, and a map by the distances between the keys and to the query.

MODEL_DIR is any model directory (including those written by transformers), an adapter, a checkpoint, or a folder that farsight
capture wrote. Several of them are shown side by side. A run folder, or a recipe's folder with its stages, gives one row per
checkpoint instead: bias strength, what it consists of, and plasticity over training, each checkpoint at its stage's length unless
--length is given. --checkpoints does the same for model directories that are checkpoints of one training.

For a head with a limited scope, only keys within it compete. If the scope doesn't reach back to an earlier bucket, the head is
not measurable at this bucket width: it is listed and left out of all means. docs/analysis/plasticity.md has the equations.
"""

from pathlib import Path
from typing import get_args

from farsight.analysis.capture.options import SEQUENCES, add_capture_options, add_models_argument, check_models
from farsight.analysis.plasticity.options import DRAWS, Covariance, Pairs
from farsight.analysis.sequences import add_text_options
from farsight.cli import command, new_parser, positive
from farsight.errors import ConfigError
from farsight.inference.model_options import add_model_options
from farsight.outputs import add_output_options, write_figures, write_picture


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight plasticity", __doc__)
    add_models_argument(parser)
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
    add_model_options(parser)
    add_output_options(parser)
    options = parser.parse_args(arguments)
    check_models(parser, options)

    from farsight.analysis.checkpoints import measure_each
    from farsight.analysis.plasticity.measure import measure_model, measure_training
    from farsight.analysis.plasticity.picture import draw, draw_models, draw_trainings
    from farsight.analysis.plasticity.table import models_table, table, training_table

    if options.needle and len(options.models) > 1:
        raise ConfigError("--needle is for one model: measure each with its own file.")
    results = measure_each(options, measure_model, measure_training)
    write_figures(options.json, results)
    found = list(results.values())
    if "checkpoints" in found[0]:
        print("\n\n".join(training_table(figures) for figures in found))
        write_picture(options.picture, draw_trainings, found)
    elif len(found) == 1:
        print(table(found[0]))
        write_picture(options.picture, draw, found[0])
    else:
        print(models_table(results))
        write_picture(options.picture, draw_models, results)


if __name__ == "__main__":
    main()
