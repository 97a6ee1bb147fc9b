"""One page about one or several models: training, evaluations, and the cost of serving them.

    farsight report runs/quickstart --out report.html
    farsight report runs/scope runs/rope/128k/model configs/recipes/scope_llama3_8b.toml --out report.html
    farsight report runs/scope runs/rope --measure --data BOOKS.jsonl --lengths 4096 16384 --out report.html

Takes run folders, recipes' folders, model directories, adapters, checkpoints, and config files (for which it shows only positions
and cost). The page is a single file: it loads nothing and runs no script. Figures come from the runs' metrics.jsonl, from
recipes' summary.json, and from JSON files that our tools wrote into the evals/ and analysis/ folders of a run or model, or that
--results names. For evaluations that are missing, it shows the command that measures them. --measure runs farsight perplexity and
farsight needle where a model has no result, and keeps the results in its evals/. farsight inside makes the same page, and measures
what is in a model.
"""

import shlex
import sys
from pathlib import Path

from farsight.cli import command, model_path, new_parser, positive
from farsight.outputs import add_json_option, output_file, write_json


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight report", __doc__)
    add = parser.add_argument
    add("models", type=model_path, nargs="+", metavar="RUN_OR_MODEL")
    add("--out", type=output_file, required=True, metavar="FILE", help="the page to write (.html)")
    add("--results", type=Path, nargs="+", default=[], metavar="FILE", help="JSON files of our tools")
    add(
        "--lengths", type=positive, nargs="+", default=[], metavar="L",
        help="context lengths to measure at (default: 1, 2 and 4 times each model's trained length), and to add to the 1k to 128k of the cost",
    )  # fmt: skip
    add("--measure", action="store_true", help="measure perplexity and needles where a result is missing")
    add("--data", type=Path, nargs="+", default=[], metavar="FILE", help="text to measure perplexity on")
    add_json_option(parser, "the report's own figures")
    options = parser.parse_args(arguments)
    if options.measure and not options.data:
        parser.error("--measure needs --data FILE, the text to measure perplexity on")

    from farsight.reports.build import EVALUATIONS, figures, write_report
    from farsight.training.runs import find_models

    models = find_models(options.models)
    made_by = shlex.join(["farsight", "report", *(sys.argv[1:] if arguments is None else arguments)])
    _, costs = write_report(models, options, EVALUATIONS, made_by, options.lengths)
    write_json(options.json, figures(models, costs))


if __name__ == "__main__":
    main()
