"""Runs lm-evaluation-harness 0.4.13 on a model.

    farsight harness MODEL_DIR --tasks scope_nlu --json F
    farsight harness MODEL_DIR OTHER_DIR --tasks longbench_en --max-length 32768 --truncate middle
    farsight harness MODEL_DIR --tasks ruler --lengths 4096 16384 --limit 50
    farsight harness MODEL_DIR --tasks piqa garfa_six/mmlu --data piqa=piqa.jsonl --data-dir mmlu_rows/

Takes model directories of every kind, adapters and checkpoints, and --extend. Needs the extra `eval` (`pip install '.[eval]'`).

Groups, with the papers' shots and metrics: scope_nlu (SCOPE, Table 6), garfa_six (GARFA, section 4), longbench (six
categories; SCOPE, Table 2), longbench_en (its sixteen English data sets; RiPRA, Table 15), ruler (thirteen tasks at each of
--lengths). GROUP/TASK names one task of a group. Any other name is a task or group of lm-eval's own: `lm-eval ls tasks` lists them.

Texts longer than --max-length (default: the trained length) are cut, and their number is printed. Data sets come from the
Hugging Face Hub; without a network, --data and --data-dir take their rows from files (docs/evaluation/evaluate.md).
"""

import logging
from argparse import Namespace
from pathlib import Path

from farsight.cli import command, model_path, natural, new_parser, positive
from farsight.evals.harness.table import table
from farsight.evals.harness.tasks import RULER_LENGTHS, named_groups
from farsight.inference.model_options import add_model_options
from farsight.outputs import add_json_option, output_file, write_figures
from farsight.remote import shown


def read_options(arguments: list[str] | None = None) -> Namespace:
    """Parses the command line."""
    parser = new_parser("farsight harness", __doc__)
    add = parser.add_argument
    add("model_dir", type=model_path, nargs="+")
    add("--tasks", nargs="+", required=True, metavar="NAME", help="groups and tasks")
    add("--limit", type=positive, help="most questions of each task and length, for a quick test")
    add("--shots", type=natural, help="examples before each question, for tasks outside the groups above")
    add("--lengths", type=positive, nargs="+", help="of RULER's prompts (4096)")
    add("--data", nargs="+", action="extend", default=[], metavar="TASK=FILE", help="rows of a task")
    add("--data-dir", type=Path, metavar="DIR", help="folder with TASK.jsonl and TASK.fewshot.jsonl")
    add("--include-path", type=Path, metavar="DIR", help="folder of your own tasks, as lm-eval's YAML")
    add("--max-length", type=positive, help="most tokens in a text (default: the trained length, or --lengths)")
    add("--truncate", choices=["left", "middle"], default="left", help="where a longer one is cut")
    add("--batch-size", type=positive, default=8, help="texts read together (%(default)s)")
    add("--bos", choices=["auto", "yes", "no"], default="auto", help="start with bos (auto: as the tokenizer does)")
    add("--chat", action="store_true", help="format prompts with the tokenizer's chat template")
    add("--run-code", action="store_true", help="run programs that the model writes (HumanEval+)")
    add(
        "--cache",
        type=output_file,
        metavar="FILE",
        help="lm-eval's cache of answers (SQLite, pickled: only your own), for one "
        "--max-length, --truncate, --bos, --extend, --scope-max and --quantization: it does not tell them apart",
    )
    add_json_option(parser)
    add_model_options(parser, foreign=True)
    options = parser.parse_args(arguments)
    if options.shots is not None and all(name.partition("/")[0] in named_groups() for name in options.tasks):
        parser.error("--shots: these tasks have the shots of their group; name them as lm-eval does, without GROUP/")
    if options.lengths and not any(name.partition("/")[0] == "ruler" for name in options.tasks):
        parser.error("--lengths is for RULER's prompts, and --tasks names none; --max-length cuts texts")
    options.lengths = options.lengths or list(RULER_LENGTHS)
    if options.cache and len(options.model_dir) > 1:
        parser.error("--cache: answers of several models can't share one; measure them one by one")
    return options


@command
def main(arguments: list[str] | None = None) -> None:
    options = read_options(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)

    from farsight.evals.harness.run import measure, read_tasks
    from farsight.inference.loading import load

    tasks = {folder: read_tasks(folder, options) for folder in options.model_dir}
    results = {shown(folder): measure(load(folder, options), options, tasks[folder]) for folder in options.model_dir}
    for folder, figures in results.items():
        if len(results) > 1:
            print(folder)
        print(table(figures))
        if figures["truncated"]:
            print(
                f"{figures['truncated']} texts were cut to {figures['max_length']:,} tokens: --max-length reads more."
            )
    write_figures(options.json, results)


if __name__ == "__main__":
    main()
