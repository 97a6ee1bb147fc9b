"""Runs a recipe: training stages in order, each from the weights of the one before.

    farsight recipe X.toml              run it, or continue where it stopped
    farsight recipe X.toml --dry-run    check every stage and print the plan
    farsight recipe X.toml --dry-run --open-data
                                        and open every data source, and read some documents of each
    farsight recipe X.toml --nproc 8    every stage under torchrun with 8 processes
    farsight recipe X.toml --dry-run --nproc 64 --gpu a100-80g
                                        the plan on 64 of these GPUs
    farsight recipe scope_llama3_8b --tiny      a shipped recipe by name, in its small form
    farsight recipe X.toml --torchrun "--nnodes 4 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500"
                                        on each of several nodes with a shared file system

Each stage fits itself to the GPUs at hand and says how: the local batch, then how many GPUs share a sequence, then recomputation, so that
it runs and fits their memory. Sequences per step, lengths and schedule stay, and options that you give stay too.

A recipe is a config file with `[recipe]` and `[[stages]]`: sections outside the stages are shared, and a stage has only
the settings that differ. Every stage has a run folder `runs/<recipe>/<stage>/`, which ends with a `model/` directory. A
finished stage is skipped; an interrupted one continues from its newest checkpoint. Options of the form --section.key
value change all stages, and --recipe.key value changes the recipe.
"""

import logging
import shlex
import sys
from pathlib import Path

from farsight import process
from farsight.cli import command, new_parser, positive, refuse_name
from farsight.configs.load import named_options, parse_options
from farsight.configs.shipped import find_config
from farsight.errors import ConfigError
from farsight.launch.plan.hardware import ANY, GPUS


@command
def main(arguments: list[str] | None = None) -> int:
    parser = new_parser("farsight recipe", __doc__)
    add = parser.add_argument
    add("recipe", type=Path, help="TOML file with [[stages]], or a shipped recipe's name")
    add("--tiny", action="store_true", help="train its small form, a minute on a CPU")
    add("--dry-run", action="store_true", help="check every stage and print the plan, but run nothing")
    add("--open-data", action="store_true", help="with --dry-run: read some documents of every data source")
    add("--nproc", type=positive, help="processes on this machine (default: 1; the recipe's GPUs in a dry run)")
    add(
        "--gpu",
        metavar="KIND",
        help=f"kind of GPU whose memory to fit, or {ANY} to leave memory out (default: this machine's; {', '.join(GPUS)})",
    )
    add("--torchrun", metavar="ARGS", help="arguments for torchrun, instead of --nproc")
    add(
        "--launcher",
        metavar="COMMAND",
        help="command to start ranks with, before train.py, instead; launch/slurm.sh uses it",
    )
    options, rest = parser.parse_known_args(arguments)
    refuse_name(parser, rest, "--gpus", "--nproc")
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    launcher = shlex.split(options.launcher) if options.launcher else [sys.executable]
    if options.torchrun or (options.nproc or 1) > 1:
        given = options.torchrun or f"--standalone --nproc_per_node {options.nproc}"
        launcher += ["-m", "farsight", "torchrun", *shlex.split(given)]
    if options.launcher and (options.torchrun or options.nproc):
        parser.error("--launcher starts all ranks itself: leave out --nproc and --torchrun")
    if options.open_data and not options.dry_run:
        parser.error("--open-data reads data without training: add --dry-run")

    from farsight.launch.recipe.check import check_stages, missing
    from farsight.launch.recipe.gpus import fit_stages, machine_of, ranks_of
    from farsight.launch.recipe.run import fetch_finished, run_recipe
    from farsight.launch.recipe.text import disk_warning, plan_text
    from farsight.training.stages import load_recipe

    overrides = {**parse_options(rest), "tiny": options.tiny}
    recipe, stages = load_recipe(find_config(options.recipe), overrides)
    check_stages(stages)
    if not options.dry_run:
        fetch_finished(recipe, stages)
    started = options.nproc or options.torchrun or options.launcher
    ranks = (
        ranks_of(options.nproc, options.torchrun, options.launcher) if started or not options.dry_run else recipe.gpus
    )
    if ranks is None and options.gpu:
        raise ConfigError(
            f"--gpu {options.gpu}: only the launcher knows the number of GPUs, so stages run as written, whatever their memory. Leave "
            "--gpu out, or fix the number of nodes in --torchrun."
        )
    said: list[str] = []
    if ranks is not None:
        stages, said = fit_stages(recipe, stages, ranks, machine_of(options.gpu), named_options(overrides))
    said += disk_warning(stages)
    if options.dry_run:
        print(plan_text(stages, ranks or recipe.gpus), *said, sep="\n", flush=True)
    else:
        for line in said:
            logging.getLogger("farsight").info(line)
    wrong = missing(recipe, stages)
    if options.open_data:
        from farsight.launch.open_data import open_data

        table, problems = open_data([(stage.name, stage.config) for stage in stages if not stage.finished])
        print(f"\n{table}", flush=True)
        wrong += [problem for problem in problems if problem not in wrong]
    if wrong:
        raise ConfigError("\n".join(["The recipe can't run yet:", *wrong]))
    return 0 if options.dry_run else run_recipe(recipe, stages, launcher)


if __name__ == "__main__":
    process.begin(process.BETWEEN_STEPS)
    sys.exit(main())
