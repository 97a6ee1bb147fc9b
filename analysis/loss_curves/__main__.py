"""Training and held-out losses of several runs over their training tokens, side by side (as in SCOPE's Figure 15).

    farsight loss-curves runs/nano_nope runs/nano_uniform_alibi runs/nano_alibi runs/nano_scope --picture F --json F

Takes run folders and recipe folders, whose stages are joined; runs may still be in progress. Lines are training losses, each point
the mean of --smooth logged steps; markers are losses on held-out documents.
"""

from pathlib import Path

from farsight.cli import command, new_parser, positive
from farsight.outputs import add_output_options, write_figures, write_picture


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight loss-curves", __doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--smooth", type=positive, default=5, metavar="N", help="logged steps per point (%(default)s)")
    add_output_options(parser)
    options = parser.parse_args(arguments)

    from farsight.analysis.loss_curves.curves import read_losses, table
    from farsight.analysis.loss_curves.picture import draw
    from farsight.training.runs import find_models

    curves = [read_losses(model) for model in find_models(options.runs)]
    print(table(curves))
    of_each = {
        str(run): {"tool": "analysis.loss_curves", "model": str(run), **curve}
        for run, curve in zip(options.runs, curves, strict=True)
    }
    write_figures(options.json, of_each)
    write_picture(options.picture, draw, curves, options.smooth)


if __name__ == "__main__":
    main()
