"""Measures how position shows in the queries and keys of a model's heads: principal components, drift, bias strength.

    farsight geometry MODEL_DIR --data FILE --json F --picture F.png
    farsight geometry captured/ --picture F.png          # a folder that farsight capture wrote
    farsight geometry ONE_DIR OTHER_DIR --data FILE --length 131072 --json F --picture F.png
    farsight geometry runs/X --data FILE --json F --picture F.png    # all checkpoints of a run or recipe
    farsight geometry stage1/ stage2/ extended/ --checkpoints --data FILE --picture F.png

Bias strength is how much the score q·k of the mean query grows for each token by which a key comes later: positive values mean
recency, negative ones primacy. It is measured along a, the direction in which queries and keys together drift with position.
query_bias is measured along the keys' own drift instead, for heads whose queries and keys drift in different directions.
These are scores before the division by √head_dim. ALiBi is not included: it takes off its slope times √head_dim per token of
distance.

A head with a limited scope only chooses among keys within it; its bias between keys further apart has no effect.

Heads are classified by their first principal component: r_q and r_k, the correlations of queries and of keys with position
along it, count as position above 0.7 and as content below 0.3.

Several models are shown side by side. A run folder, or a recipe's folder with its stages, gives a line per checkpoint: what bias
strength consists of, the separation of queries and keys, and the classes over training. --checkpoints does the same for model
directories that are checkpoints of one training.
"""

import argparse
from typing import TYPE_CHECKING, Any

from farsight.analysis.capture.options import SEQUENCES, add_capture_options, add_models_argument, check_models
from farsight.analysis.sequences import add_text_options
from farsight.cli import command, new_parser, positive
from farsight.inference.model_options import add_model_options
from farsight.outputs import add_output_options, write_figures, write_picture

if TYPE_CHECKING:
    from farsight.analysis.capture.samples import Samples


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight geometry", __doc__)
    add = parser.add_argument
    add_models_argument(parser)
    add_text_options(parser, SEQUENCES, optional="required for a model, not for a capture")
    add_capture_options(parser)
    add("--components", type=positive, default=4, metavar="N", help="principal components to report (%(default)s)")
    add_model_options(parser)
    add_output_options(parser)
    options = parser.parse_args(arguments)
    check_models(parser, options)

    from farsight.analysis.capture.from_options import captured_or_capture
    from farsight.analysis.checkpoints import measure_each
    from farsight.analysis.geometry.measure import measure_model, measure_training
    from farsight.analysis.geometry.models_picture import draw_models, draw_trainings
    from farsight.analysis.geometry.picture import draw
    from farsight.analysis.geometry.table import models_table, table, training_table

    last: list[Samples] = []

    def of_model(own: argparse.Namespace) -> dict[str, Any]:
        samples = captured_or_capture(own.model, own)
        last[:] = [samples]  # the picture of one model shows some of them
        return measure_model(samples, own)

    results = measure_each(options, of_model, measure_training)
    write_figures(options.json, results, allow_nan=False)
    found = list(results.values())
    if "checkpoints" in found[0]:
        print("\n\n".join(map(training_table, found)))
        write_picture(options.picture, draw_trainings, found)
    elif len(found) == 1:
        print(table(found[0]))
        write_picture(options.picture, draw, found[0], *last)
    else:
        print(models_table(results))
        write_picture(options.picture, draw_models, results)


if __name__ == "__main__":
    main()
