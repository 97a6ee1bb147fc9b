"""Runs a recipe: training stages in order, each from the last one's weights.

    farsight recipe configs/recipes/X.toml              run it, or go on where it stopped
    farsight recipe configs/recipes/X.toml --dry-run    check every stage and print the plan
    farsight recipe configs/recipes/X.toml --nproc 8    every stage under torchrun with 8 processes
    farsight recipe X.toml --torchrun "--nnodes 4 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500"
                                                                on each of several nodes with a shared file system

A recipe is a config file with `[recipe]` and `[[stages]]`: the sections outside the stages are shared, and a stage
holds what it sets differently. Every stage is a run folder `runs/<recipe>/<stage>/` that ends with a `model/`
directory. A finished stage is skipped; one that was interrupted goes on from its newest checkpoint. Options of the
form --section.key value change all stages, and --recipe.key value the recipe.
"""

import sys

from farsight import process
from farsight.training.stages import Recipe, Stage, load_recipe

if __name__ == "__main__":
    process.begin(process.BETWEEN_STEPS)

import argparse
import ctypes
import logging
import os
import shlex
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

from farsight import cli
from farsight.checkpoints.steps import complete_steps
from farsight.configs.load import ConfigError, parse_options, to_toml
from farsight.data.tokenizers.tokenizer import load_tokenizer
from farsight.files import write_text
from farsight.launch.recipe_check import check_stages, missing
from farsight.launch.recipe_plan import plan_text
from farsight.launch.summary import report, write_held_out
from farsight.training.tokenizer import prepare_tokenizer

logger = logging.getLogger("farsight")


def run_recipe(recipe: Recipe, stages: list[Stage], launcher: list[str]) -> int:
    """Runs the stages that are not finished and reports on all; returns the first exit status that is not 0."""
    root = stages[0].folder.parent
    _refuse_stale(stages)
    prepare_tokenizer(stages[0].config, root / "tokenizer")
    load_tokenizer(stages[0].config.tokenizer)  # refused here, before data are read
    data = Path(recipe.perplexity_data) if recipe.perplexity_data else None
    if recipe.perplexity_lengths and data is None:
        if not recipe.perplexity_tokens:
            raise ConfigError(
                "recipe.perplexity_tokens = 0 needs recipe.perplexity_data; held-out documents have no end."
            )
        data = write_held_out(stages[0].config, root / "held_out.txt", recipe.perplexity_tokens)
    for number, stage in enumerate(stages):
        label = f"stage {number + 1}/{len(stages)}: {stage.name}"
        if stage.finished:
            logger.info(f"{label} is finished")
            settings = stage.folder / "stage.toml"
            if settings.is_file() and settings.read_text(encoding="utf-8") != to_toml(stage.config):
                logger.warning(
                    f"its settings have changed since; to train it again, remove {stage.folder} and the stages after it"
                )
        else:
            t = stage.config.training
            logger.info(f"\n{label}: {t.steps:,} steps of {t.seq_len:,} tokens")
            status = _run(stage, launcher)
            if status:
                return _stopped(status, label, stage)
        report(recipe, stages[: number + 1], root, data)
    return 0


def _refuse_stale(stages: list[Stage]) -> None:
    """Refuses a stage to train whose followers are finished: they started from weights that are no longer there.

    Raises:
        ConfigError: naming them.
    """
    first = next((number for number, stage in enumerate(stages) if not stage.finished), len(stages))
    if stale := [stage for stage in stages[first:] if stage.finished]:
        names, folders = (
            ", ".join(str(what) for what in found) for found in zip(*((s.name, s.folder) for s in stale), strict=True)
        )
        raise ConfigError(
            f"stage {stages[first].name} is not finished, but {names} after it started from an earlier one: remove {folders} "
            "to train all of them, or put the earlier stage back."
        )


def _run(stage: Stage, launcher: list[str]) -> int:
    stage.folder.mkdir(parents=True, exist_ok=True)
    path = stage.folder / "stage.toml"
    write_text(path, to_toml(stage.config))
    train = str(Path(__file__).parent.parent / "train.py")
    return wait_for([*launcher, train, "--job.config_file", str(path)])


def _stopped(status: int, label: str, stage: Stage) -> int:
    """Says how a stage ended that is not finished; returns the exit status, of a signal 128 and its number."""
    steps = complete_steps(stage.folder / stage.config.checkpoint.folder)
    goes_on = f"the same command goes on from {f'step {steps[-1]}' if steps else 'its start'}"
    if status == process.EXIT_INTERRUPTED:
        return status  # it has said so itself
    if status > 0:
        logger.error(f"{label} ended with status {status}, for the reason above; once that is put right, {goes_on}")
        return status
    logger.error(f"{label} {process.killed_by(-status)}; {goes_on}")
    return process.EXIT_INTERRUPTED if -status in process.TO_STOP else 128 - status


def wait_for(command: list[str]) -> int:
    """Runs a command to its end and passes on the signal to stop; returns its exit status."""
    # torchrun gives workers 30 s to end after a signal, which is less than a large model takes to save.
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3600", **os.environ}
    child: subprocess.Popen | None = None
    asked: list[int] = []

    def forward(number: int, frame: Any) -> None:
        asked.append(number)
        if child is not None:
            child.send_signal(number)

    # The stage saves and stops; then this process returns its status. A terminal's Ctrl-C reaches both anyway.
    with process.signals_to({signal.SIGTERM: forward, signal.SIGINT: signal.SIG_IGN}):
        child = subprocess.Popen(command, env=environment, preexec_fn=partial(_end_with, os.getpid()))
        for number in asked:  # while it was being started
            child.send_signal(number)
        return child.wait()


def _end_with(parent: int) -> None:
    """Has Linux send this process SIGTERM when its parent dies, so that a killed recipe leaves no stage behind; and a
    terminal's Ctrl-C ends it, which its parent ignores meanwhile."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
        if os.getppid() != parent:  # it died before that
            os.kill(os.getpid(), signal.SIGTERM)


@cli.command
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="farsight recipe", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path, help="TOML file with [[stages]]")
    parser.add_argument("--dry-run", action="store_true", help="check every stage and print the plan, run nothing")
    parser.add_argument(
        "--nproc",
        type=cli.bounded(int, least=1),
        help="processes on this machine (default: 1; the recipe's GPUs in a dry run)",
    )
    parser.add_argument("--torchrun", metavar="ARGS", help="arguments for torchrun, instead of --nproc")
    parser.add_argument(
        "--launcher", metavar="COMMAND", help="start ranks with this before train.py, instead; launch/slurm.sh does"
    )
    options, rest = parser.parse_known_args(arguments)
    if not logging.getLogger().handlers:
        logging.basicConfig(format="%(message)s", level=logging.INFO)
    launcher = shlex.split(options.launcher) if options.launcher else [sys.executable]
    if options.torchrun or (options.nproc or 1) > 1:
        given = options.torchrun or f"--standalone --nproc_per_node {options.nproc}"
        launcher += ["-m", "farsight", "torchrun", *shlex.split(given)]
    if options.launcher and (options.torchrun or options.nproc):
        parser.error("--launcher starts all ranks itself: leave out --nproc and --torchrun")
    recipe, stages = load_recipe(options.recipe, parse_options(rest))
    if options.dry_run:
        processes = recipe.gpus if options.nproc is None else options.nproc
        check_stages(stages, processes)
        print(plan_text(stages, processes), flush=True)
    else:
        check_stages(stages, None if options.torchrun or options.launcher else options.nproc or 1)
    if wrong := missing(recipe, stages):
        raise ConfigError("\n".join(["The recipe can't run yet:", *wrong]))
    return 0 if options.dry_run else run_recipe(recipe, stages, launcher)


if __name__ == "__main__":
    sys.exit(main())
