"""Measures how position shows in the queries and keys of a model's heads: principal components, drift, bias strength.

    farsight geometry MODEL_DIR --data FILE --json F --picture F.png
    farsight geometry captured/ --picture F.png          # a folder that farsight capture wrote

Bias strength is how much the score q·k of the mean query grows for each token by which a key comes later: positive values mean
recency, negative ones primacy. It is measured along a, the direction in which queries and keys together drift with position.
query_bias is measured along the keys' own drift instead, for heads whose queries and keys drift in different directions.
These are scores before the division by √head_dim. ALiBi is not included: it takes off its slope times √head_dim per token of
distance.

A head with a limited scope only chooses among keys within it; its bias between keys further apart has no effect.

Heads are classified by their first principal component: r_q and r_k, the correlations of queries and of keys with position
along it, count as position above 0.7 and as content below 0.3.
"""

from pathlib import Path

from farsight.analysis.capture.options import SEQUENCES, add_capture_options
from farsight.analysis.sequences import add_text_options
from farsight.cli import command, new_parser, positive
from farsight.inference.model_options import add_model_options
from farsight.outputs import add_output_options, write_json, write_picture


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight geometry", __doc__)
    add = parser.add_argument
    add("model", type=Path, help="model directory, adapter or checkpoint; or a capture")
    add_text_options(parser, SEQUENCES, optional="required for a model, not for a capture")
    add_capture_options(parser)
    add("--components", type=positive, default=4, metavar="N", help="principal components to report (%(default)s)")
    add_model_options(parser, foreign=True)
    add_output_options(parser)
    options = parser.parse_args(arguments)

    from farsight.analysis.capture.from_options import captured_or_capture, settings_of
    from farsight.analysis.geometry.measure import measure
    from farsight.analysis.geometry.picture import draw
    from farsight.analysis.geometry.table import table

    samples = captured_or_capture(options.model, options)
    figures = {
        "tool": "analysis.geometry",
        **settings_of(options.model, options, samples),
        "components": options.components,
        **measure(samples, options.components),
    }
    print(table(figures))
    write_json(options.json, figures, allow_nan=False)
    write_picture(options.picture, draw, figures, samples)


if __name__ == "__main__":
    main()
