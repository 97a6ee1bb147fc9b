"""Shows which layers carry a long context, by grafting layers of a long-context model onto a short-context one (LASP, Figure 4).

    farsight graft-sweep --base SHORT --long LONG --data BOOKS.jsonl --lengths 1024 8192 --picture graft.png --json F
    farsight graft-sweep --base SHORT --long LONG --data FILE --lengths 4096 --depths 0 2 4 8 --passkey 20

Two models of one lineage are grafted in memory at every depth l (Algorithm 1). B-Front takes the embedding and layers 0 … l − 1
from the base model, and the other layers, norm and head from the long one; L-Front is the reverse. Each graft and both original
models are measured: perplexity by length, as in farsight perplexity (on the last 256 tokens of consecutive windows), and with
--passkey N the share of N passkeys found, at depths spread evenly over the context (as in farsight needle).

farsight graft writes a single graft as a model directory. As there, models with tied embeddings are refused if their embeddings
differ; with --untie, grafts get the one model's embedding and the other's head.

Each layer keeps its model's RoPE, or with --rope long all have that of LONG, and BASE is measured with it too ("with long embedding", the
paper's Table 1). --extend scales the layers of both models, or those of BASE alone where LONG's are scaled already, as Llama 3.1's are.
"""

from pathlib import Path

from farsight.cli import command, model_path, natural, new_parser, positive
from farsight.inference.model_options import add_model_options
from farsight.outputs import add_output_options, write_json, write_picture


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight graft-sweep", __doc__)
    add = parser.add_argument
    add("--base", type=model_path, required=True, metavar="SHORT", help="the short-context model")
    add("--long", type=model_path, required=True, metavar="LONG", help="the model trained further on long contexts")
    add("--data", type=Path, nargs="+", required=True, metavar="FILE", help="UTF-8 text, or .jsonl")
    add("--lengths", type=positive, nargs="+", required=True, metavar="L", help="window lengths in tokens")
    add("--depths", type=natural, nargs="+", metavar="l", help="number of front layers (default: 0 to all)")
    add("--windows", type=natural, default=0, help="at most this many windows per length (default: all)")
    add("--untie", action="store_true", help="if tied embeddings differ, give grafts both")
    add(
        "--rope",
        choices=("base", "long"),
        help="give all layers, and both models alone, this one's RoPE (default: each its own)",
    )
    add("--passkey", type=positive, metavar="N", help="also look for N passkeys per length")
    add(
        "--passkey-length",
        type=positive,
        nargs="+",
        metavar="L",
        help="prompt lengths for passkeys, in tokens (default: --lengths)",
    )
    add("--seed", type=natural, default=0, help="random seed of the passkeys (%(default)s)")
    add_model_options(parser)
    add_output_options(parser)
    options = parser.parse_args(arguments)
    if options.passkey_length and not options.passkey:
        parser.error("--passkey-length needs --passkey N, how many to look for")

    from farsight.analysis.graft_sweep.picture import draw
    from farsight.analysis.graft_sweep.sweep import measure_models
    from farsight.analysis.graft_sweep.table import table

    figures = measure_models(options)
    print(table(figures))
    write_json(options.json, figures)
    write_picture(options.picture, draw, figures)


if __name__ == "__main__":
    main()
