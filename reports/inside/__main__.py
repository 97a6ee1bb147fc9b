"""One page about the inside of a model, or of several side by side, and the same figures as CSV.

    farsight inside MODEL_DIR --measure --data FILE --out inside.html --csv inside/
    farsight inside runs/scope runs/rope --out inside.html
    farsight inside runs/rope --results graft.json --out inside.html

Takes what farsight report takes except config files: run folders, recipes' folders, model directories, adapters, checkpoints. The
page is a single file that loads nothing and runs no script. Its figures come from JSON files of farsight plasticity, farsight geometry,
farsight layers, farsight layer-probes, farsight probes, farsight order-awareness and farsight graft-sweep, in the analysis/ folder of
a run or model or named by --results. For figures that are missing, it shows the command that measures them. --measure runs these
tools on --data where a model has no result (all but graft-sweep, which takes two models), and keeps the results in its analysis/.
"""

import shlex
import sys
from pathlib import Path

from farsight.cli import command, new_parser, positive
from farsight.outputs import output_file


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight inside", __doc__)
    add = parser.add_argument
    add("models", type=Path, nargs="+", metavar="RUN_OR_MODEL")
    add("--out", type=output_file, required=True, metavar="FILE", help="the page to write (.html)")
    add("--csv", type=Path, metavar="FOLDER", help="write the figures as CSV here too")
    add("--results", type=Path, nargs="+", default=[], metavar="FILE", help="JSON files of our tools")
    add("--measure", action="store_true", help="run the tools for results that are missing")
    add("--data", type=Path, metavar="FILE", help="text to measure on")
    add("--length", type=positive, metavar="L", help="tokens in a sequence (default: each model's trained length)")
    add("--device", help="to measure on (default: the accelerator if there is one, else cpu)")
    options = parser.parse_args(arguments)
    if options.measure and not options.data:
        parser.error("--measure needs --data FILE, the text to measure on")

    from farsight.reports.inside.build import write_report

    write_report(options, shlex.join(["farsight", "inside", *(sys.argv[1:] if arguments is None else arguments)]))


if __name__ == "__main__":
    main()
