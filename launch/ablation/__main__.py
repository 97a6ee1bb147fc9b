"""Runs an ablation: fine-tunes each config, evaluates the untuned base and every result, and prints how they compare.

    farsight ablation configs/finetune/ablation_*.toml --evaluations configs/finetune/evaluations/paper.toml
    farsight ablation configs/finetune/ablation_*.toml --tiny --out runs/tiny_ablation --dry-run

An experiment is named by the end of its file's name: ablation_a.toml is A. Each has a folder in --out with its run, the merged
model in model/, and its evaluations. Finished work is not repeated, and an interrupted run continues from its checkpoint. If a
run or an evaluation fails, it is reported, the others continue, and the exit status is 1. Options of the form --section.key
value change all experiments.

Every run measures its held-out loss itself. Before the first step that is the quantised base's loss, unless garfa.init = "paper"
has changed the model. --evaluations names a TOML file with further evaluations, each a command that writes a JSON file. For the
base, {model} is its own directory, which is not quantised:

    [[evaluations]]
    name = "perplexity, 1,024 tokens"
    command = "farsight perplexity {model} --data books.txt --lengths 1024 --json {json}"
    value = "lengths.1024"          # keys that lead to the figure in the JSON file
    better = "lower"                # "higher" is the default
    percent = false                 # true: a share of 1, shown in percent and included in the mean
"""

import logging
import sys
from pathlib import Path

from farsight import process
from farsight.cli import command, new_parser
from farsight.launch.children import Stopped
from farsight.outputs import add_json_option

logger = logging.getLogger("farsight")


@command
def main(arguments: list[str] | None = None) -> int:
    parser = new_parser("farsight ablation", __doc__, allow_abbrev=False)
    add = parser.add_argument
    add("configs", type=Path, nargs="+", help="TOML files of `train.py finetune`")
    add("--tiny", action="store_true", help="the configs' small form: the quickstart's model, 40 steps")
    add("--evaluations", type=Path, metavar="FILE", help="TOML file with [[evaluations]]")
    add("--out", type=Path, default=Path("runs/ablation"), help="output folder (default: %(default)s)")
    add_json_option(parser)
    add("--dry-run", action="store_true", help="check the configs and print the commands, but run nothing")
    options, rest = parser.parse_known_args(arguments)
    rest += ["--tiny"] * options.tiny
    logging.basicConfig(format="%(message)s", level=logging.INFO)

    from farsight.launch.ablation.ablation import commands, read_experiments, report, run
    from farsight.launch.ablation.evaluations import read_evaluations

    experiments = read_experiments(options.configs, rest, options.out)
    evaluations = read_evaluations(options.evaluations)
    if options.dry_run:
        print(commands(experiments, evaluations, options.out))
        return 0
    try:
        outcome = run(experiments, evaluations, options.out)
    except Stopped:
        logger.error("stopped; the same command continues from here")
        return process.EXIT_INTERRUPTED
    report(outcome, {e.name: (e.better, e.percent) for e in evaluations}, options.out, options.json)
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    process.begin(process.BETWEEN_STEPS)
    sys.exit(main())
