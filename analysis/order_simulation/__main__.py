"""Simulates how many positions a stack of top-1 attention layers keeps apart, given the heads' windows (SCOPE, appendix A.3).

    farsight order-simulation --json F --picture F
    farsight order-simulation --lengths 32768 --heads 16 --gammas 1.5 1.8 2 4 8 --picture F

In each layer, every head adds one token, drawn uniformly from its window, to each token's own. A layer is then an integer matrix M
with H + 1 entries per row, and the last token's state after l layers is v = e M_1 … M_l: how often each token of the sequence
occurs in it. Tokens that occur equally often can be exchanged without changing the state. The reported ratio is the number of
distinct values in v, including 0, divided by T; 1 means order awareness of the whole sequence (lemma A.1).

Windows of the H heads, in tokens:
    scope      2, 4, 8 … 2^H, but at most T
    uniform    ⌈T / i⌉ for head i = 1 … H, as the paper defines it (in fact a harmonic series)
    nope-1     T, but 1 for one head
    nope       T
    gamma=G    ⌈G^i⌉, but at most T, for each G of --gammas

H is the smallest number with 2^H ≥ T. The captions of the paper's Figure 10 have one head more; use --heads for that.
"""

import argparse
from collections.abc import Sequence

from farsight.cli import bounded, command, positive
from farsight.outputs import add_output_options, check_outputs, write_outputs


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="farsight order-simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--lengths", type=positive, nargs="+", default=[512, 4096], metavar="T", help="sequence lengths (512 4096)"
    )
    parser.add_argument("--layers", type=positive, default=10, metavar="N", help="layers to stack (%(default)s)")
    parser.add_argument("--trials", type=positive, default=10, metavar="N", help="trials to average (%(default)s)")
    parser.add_argument(
        "--heads", type=positive, metavar="H", help="heads at every length (default: log2 T, rounded up)"
    )
    parser.add_argument(
        "--gammas", type=bounded(float, above=1), nargs="+", default=[], metavar="G", help="growth factors to try too"
    )
    parser.add_argument("--seed", type=bounded(int, least=0), default=0, help="random seed (%(default)s)")
    add_output_options(parser)
    options = parser.parse_args(arguments)
    check_outputs(parser, options)

    from farsight.analysis.order_simulation.picture import draw
    from farsight.analysis.order_simulation.simulate import simulate
    from farsight.analysis.order_simulation.table import table

    settings = {key: getattr(options, key) for key in ("lengths", "layers", "trials", "heads", "gammas", "seed")}
    results = simulate(**settings)
    print(table(results))
    figures = {"tool": "analysis.order_simulation", "model": None, **settings, "configurations": results}
    write_outputs(options, figures, lambda path: draw(results, path))


if __name__ == "__main__":
    main()
