"""Shows which layers carry a long context, by grafting layers of a long-context model onto a short-context one (LASP, Figure 4).

    farsight graft-sweep --base SHORT --long LONG --data BOOKS.jsonl --lengths 1024 8192 --picture graft.png --json F
    farsight graft-sweep --base SHORT --long LONG --data FILE --lengths 4096 --depths 0 2 4 8 --passkey 20

Two models of one lineage are grafted in memory at every depth l (Algorithm 1). B-Front takes the embedding and layers 0 … l − 1
from the base model, and the other layers, norm and head from the long one; L-Front is the reverse. Each graft and both original
models are measured: perplexity by length, as in farsight perplexity (on the last 256 tokens of consecutive windows), and with
--passkey N the share of N passkeys found, at depths spread evenly over the context (as in farsight needle).

farsight graft writes a single graft as a model directory. As there, models with tied embeddings are refused if their embeddings
differ; with --untie, grafts get the one model's embedding and the other's head.
"""

import argparse
from pathlib import Path

from farsight.cli import bounded, command, positive
from farsight.inference.model_options import add_model_options
from farsight.outputs import add_output_options, check_outputs, write_outputs


@command
def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="farsight graft-sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, required=True, metavar="SHORT", help="the short-context model")
    parser.add_argument(
        "--long", type=Path, required=True, metavar="LONG", help="the model trained further on long contexts"
    )
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="FILE", help="UTF-8 text, or .jsonl")
    parser.add_argument(
        "--lengths", type=positive, nargs="+", required=True, metavar="L", help="window lengths in tokens"
    )
    parser.add_argument(
        "--depths",
        type=bounded(int, least=0),
        nargs="+",
        metavar="l",
        help="number of front layers (default: 0 to all)",
    )
    parser.add_argument(
        "--windows", type=bounded(int, least=0), default=0, help="at most this many windows per length (default: all)"
    )
    parser.add_argument("--untie", action="store_true", help="if tied embeddings differ, give grafts both")
    parser.add_argument("--passkey", type=positive, metavar="N", help="also look for N passkeys per length")
    parser.add_argument(
        "--passkey-length",
        type=positive,
        nargs="+",
        metavar="L",
        help="prompt lengths for passkeys, in tokens (default: --lengths)",
    )
    parser.add_argument(
        "--seed", type=bounded(int, least=0), default=0, help="random seed of the passkeys (%(default)s)"
    )
    add_model_options(parser)
    add_output_options(parser)
    options = parser.parse_args(arguments)
    if options.passkey_length and not options.passkey:
        parser.error("--passkey-length needs --passkey N, how many to look for")
    check_outputs(parser, options)

    from farsight.analysis.graft_sweep.picture import draw
    from farsight.analysis.graft_sweep.sweep import measure_models
    from farsight.analysis.graft_sweep.table import table

    figures = measure_models(options)
    print(table(figures))
    write_outputs(options, figures, lambda path: draw(figures, path))


if __name__ == "__main__":
    main()
