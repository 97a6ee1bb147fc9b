"""Perplexity by context length.

    farsight perplexity MODEL_DIR --data FILE --lengths 1024 4096 --json F
    torchrun --nproc_per_node 8 -m farsight perplexity MODEL_DIR OTHER_DIR --data BOOKS.jsonl --lengths 4096 131072 \\
        --documents --picture perplexity.png

A document is a line of a .jsonl file, a row of a .parquet file (its "text", or the field named by --field), or any other file
as a whole. Documents are tokenised without special tokens and cut into non-overlapping windows of each length, from their first
token; an incomplete last window is dropped. Only the last 256 tokens of a window count, so every target has at least
length − 256 tokens before it: the figure is exp of their mean negative log-likelihood.
With --documents, documents shorter than the longest length are left out, and the same final 256 tokens of each other one are
predicted from contexts of each length (SCOPE 4.3).
With --sliding STRIDE, windows of each length move over every document by STRIDE tokens, the last one up to its end, and every
token counts once: all tokens of a document's first window, and of each later window those that the one before has not seen,
which therefore have at least length − STRIDE tokens before them.
--buckets N also gives the perplexity of all of a window's tokens by their position in it: in N parts of equal size and, for
the picture, in N parts of equal ratio.
--extend yarn:4 scales the RoPE of a model that was trained without scaling, as the baseline for longer contexts; RiPRA and others
need no retraining either (docs/inference/extensions.md).
Past the trained length, a model with scopes is measured as it was trained ("trained") and with scopes that grow with
the length ("length").
"""

from argparse import Namespace
from pathlib import Path

from farsight.cli import bounded, command, model_path, natural, new_parser
from farsight.inference.model_options import add_model_options
from farsight.outputs import add_output_options, write_figures, write_picture
from farsight.remote import shown


def read_options(arguments: list[str] | None = None) -> Namespace:
    """Parses the command line."""
    parser = new_parser("farsight perplexity", __doc__)
    add = parser.add_argument
    add("model_dir", type=model_path, nargs="+", help="model directories, adapters or checkpoints")
    add(
        "--data",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="UTF-8 text, .jsonl or .parquet; .gz or .zst too",
    )
    add("--field", help="key of the text in .jsonl, column in .parquet (text)")
    add("--lengths", type=bounded(int, least=2), nargs="+", required=True, help="window lengths in tokens")
    add("--windows", type=natural, default=0, help="most windows of each length (default: all)")
    add("--documents", action="store_true", help="the same final 256 tokens of every long document")
    add("--sliding", type=natural, default=0, metavar="STRIDE", help="all tokens, from windows that overlap")
    add("--buckets", type=natural, default=0, metavar="N", help="also by position, in N parts")
    add_model_options(parser, foreign=True)
    add_output_options(parser)
    options = parser.parse_args(arguments)

    from farsight.data.texts import has_fields

    if options.sliding and (options.documents or options.buckets):
        parser.error("--sliding can't be combined with --documents or --buckets, whose windows do not overlap")
    if options.field and not any(has_fields(path) for path in options.data):
        parser.error("--field goes with .jsonl or .parquet files: other texts are whole files")
    return options


@command
def main(arguments: list[str] | None = None) -> None:
    options = read_options(arguments)

    from farsight.evals.perplexity.measure import measure, table
    from farsight.evals.perplexity.picture import draw
    from farsight.evals.ranks import sharing_processes
    from farsight.inference.loading import load

    with sharing_processes() as (rank, world):
        results = {shown(folder): measure(load(folder, options), options, rank, world) for folder in options.model_dir}
    if rank:
        return
    for folder, figures in results.items():
        if len(results) > 1:
            print(folder)
        print(table(figures, figures["trained_length"]))
    if len({figures["tokens"] for figures in results.values()}) > 1:
        print("The models' tokenizers differ: perplexities are per token and cannot be compared.")
    write_figures(options.json, results)
    write_picture(options.picture, draw, results)


if __name__ == "__main__":
    main()
