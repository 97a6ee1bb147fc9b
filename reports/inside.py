"""The page of farsight report, with what is missing about the inside of the models, and these figures as CSV.

    farsight inside MODEL_DIR --measure --data FILE --out inside.html --csv inside/
    farsight inside runs/scope runs/rope --out inside.html
    farsight inside runs/rope --results graft.json --out inside.html

Takes what farsight report takes except config files: run folders, recipes' folders, model directories, adapters, checkpoints. For
figures that are missing, the page shows the command that measures them: farsight plasticity, farsight geometry, farsight layers,
farsight layer-probes, farsight probes, farsight order-awareness. --measure runs these tools on --data where a model has no result,
and keeps the results in its analysis/. Those of farsight graft-sweep, which takes two models, belong there too, or are named by
--results.
"""

import shlex
import sys
from pathlib import Path

from farsight.cli import command, model_path, new_parser, positive
from farsight.outputs import output_file


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight inside", __doc__)
    add = parser.add_argument
    add("models", type=model_path, nargs="+", metavar="RUN_OR_MODEL")
    add("--out", type=output_file, required=True, metavar="FILE", help="the page to write (.html)")
    add("--csv", type=Path, metavar="FOLDER", help="write the figures as CSV here too")
    add("--results", type=Path, nargs="+", default=[], metavar="FILE", help="JSON files of our tools")
    add("--measure", action="store_true", help="run the tools for results that are missing")
    add("--data", type=Path, nargs=1, default=[], metavar="FILE", help="text to measure on")
    add("--length", type=positive, metavar="L", help="tokens in a sequence (default: each model's trained length)")
    add("--device", help="to measure on (default: the accelerator if there is one, else cpu)")
    options = parser.parse_args(arguments)
    if options.measure and not options.data:
        parser.error("--measure needs --data FILE, the text to measure on")

    from farsight.errors import ConfigError
    from farsight.reports.build import ANALYSES, write_report
    from farsight.reports.csv_file import write_csv
    from farsight.training.runs import find_models

    models = find_models(options.models)
    if bare := ", ".join(str(model.path) for model in models if model.weights is None):
        raise ConfigError(f"{bare}: no weights, so there is nothing to look into; farsight positions shows configs.")
    made_by = shlex.join(["farsight", "inside", *(sys.argv[1:] if arguments is None else arguments)])
    given = {"--length": options.length, "--device": options.device}
    more = [part for name, value in given.items() if value is not None for part in (name, str(value))]
    results, _ = write_report(models, options, ANALYSES, made_by, more=more)
    if options.csv:
        print("\n".join(map(str, write_csv(options.csv, results))))


if __name__ == "__main__":
    main()
