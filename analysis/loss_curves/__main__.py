"""Training and held-out losses of several runs over their training tokens, side by side (as in SCOPE's Figure 15).

    farsight loss-curves runs/nano_nope runs/nano_uniform_alibi runs/nano_alibi runs/nano_scope --picture F --json F

Takes run folders and recipe folders, whose stages are joined; runs may still be in progress. Lines are training losses, each point
the mean of --smooth logged steps; markers are losses on held-out documents.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from farsight.cli import command, positive
from farsight.outputs import add_output_options, check_outputs, of_models, write_outputs


@command
def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="farsight loss-curves", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--smooth", type=positive, default=5, metavar="N", help="logged steps per point (%(default)s)")
    add_output_options(parser)
    options = parser.parse_args(arguments)
    check_outputs(parser, options)

    from farsight.analysis.loss_curves.curves import read_losses, table
    from farsight.analysis.loss_curves.picture import draw
    from farsight.training.runs import find_models

    curves = [read_losses(model) for model in find_models(options.runs)]
    print(table(curves))
    of_each = {
        str(run): {"tool": "analysis.loss_curves", "model": str(run), **curve}
        for run, curve in zip(options.runs, curves, strict=True)
    }
    write_outputs(options, of_models(of_each), lambda path: draw(curves, path, options.smooth))


if __name__ == "__main__":
    main()
