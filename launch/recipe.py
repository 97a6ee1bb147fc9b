"""Runs a recipe: training stages in order, each from the last one's weights.

    farsight recipe X.toml              run it, or go on where it stopped
    farsight recipe X.toml --dry-run    check every stage and print the plan
    farsight recipe X.toml --nproc 8    every stage under torchrun with 8 processes
    farsight recipe scope_llama3_8b --tiny      a shipped recipe by name, in its small form
    farsight recipe X.toml --torchrun "--nnodes 4 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500"
                                        on each of several nodes with a shared file system

A recipe is a config file with `[recipe]` and `[[stages]]`: the sections outside the stages are shared, and a stage
holds what it sets differently. Every stage is a run folder `runs/<recipe>/<stage>/` that ends with a `model/`
directory. A finished stage is skipped; one that was interrupted goes on from its newest checkpoint. Options of the
form --section.key value change all stages, and --recipe.key value the recipe.
"""

import sys

from farsight import process

if __name__ == "__main__":
    process.begin(process.BETWEEN_STEPS)

import argparse
import ctypes
import dataclasses
import logging
import os
import re
import shlex
import signal
import subprocess
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from farsight import cli
from farsight.checkpoints.steps import complete_steps
from farsight.configs.load import (
    ConfigError,
    build_config,
    find_config,
    from_dict,
    merge,
    parse_options,
    pop_tiny,
    read_toml,
    to_toml,
)
from farsight.configs.schema import JobConfig, NoRotary, Rotary
from farsight.data.tokenizers.tokenizer import load_tokenizer
from farsight.files import write_text
from farsight.launch.recipe_check import check_stages, missing, no_start
from farsight.launch.recipe_plan import plan_text
from farsight.launch.summary import report, write_held_out
from farsight.model.build import trained_layers
from farsight.ranges import Count, Size
from farsight.training.start import other_theta, rotary_of, theta_of
from farsight.training.tokenizer import prepare_tokenizer, tokenizer_of

logger = logging.getLogger("farsight")

CARRY_EXCLUDES = ["dataloader", "lr_scheduler", "train_state"]
"""What a stage does not take over with the optimizer: its data order, schedule and step count are its own."""


@dataclass(frozen=True)
class Recipe:
    """`[recipe]`: what belongs to no single stage."""

    name: str = ""
    """The run folder is `folder`/`name`. Empty: the file's name."""
    folder: str = "runs"
    """The folder above the run folder: "runs" and the name "story" give runs/story."""
    gpus: Size = 1
    """GPUs that batch sizes and layouts are planned for. Any number that divides the batches gives the same losses."""
    start: str = ""
    """Model directory or checkpoint that the first stage starts from; empty starts from random weights."""
    perplexity_lengths: tuple[Size, ...] = (1, 2, 4)
    """Perplexity after each stage, at these multiples of its sequence length; empty measures none."""
    perplexity_data: str = ""
    """Text file to measure it on; empty takes held-out documents of the data."""
    perplexity_tokens: Count = 2**20
    """Tokens of it that are read, the same ones at every length; 0 takes the whole file."""


@dataclass(frozen=True)
class Stage:
    """One stage with everything resolved."""

    name: str
    optimizer: Literal["reset", "carry"]
    """Start with a fresh optimizer, or take over the last stage's moments."""
    config: JobConfig
    folder: Path = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.config.job.dump_folder))

    @property
    def model_dir(self) -> Path:
        return self.folder / "model"

    @property
    def finished(self) -> bool:
        return (self.model_dir / "config.json").is_file()


def load_recipe(path: Path, overrides: dict[str, Any]) -> tuple[Recipe, list[Stage]]:
    """Reads a recipe and builds each stage's config.

    Args:
        overrides: sections laid over every stage; `recipe` changes the recipe itself, `tiny` takes its small form.

    Raises:
        ConfigError: the file is not a recipe, or a stage can't be used.
    """
    overrides = dict(overrides)
    values = read_toml(path, pop_tiny(overrides))
    own = {"recipe": values.pop("recipe", {})}
    recipe = from_dict(Recipe, merge(own, {"recipe": overrides.pop("recipe", {})})["recipe"], "recipe")
    recipe = dataclasses.replace(recipe, name=recipe.name or path.stem)
    if recipe.name in (".", "..") or Path(recipe.name).name != recipe.name or "\\" in recipe.name:
        raise ConfigError(
            f"recipe.name = {recipe.name!r} must be the name of one folder; recipe.folder says where it lies."
        )
    entries = values.pop("stages", None)
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path} has no [[stages]]; a single run is `python train.py --job.config_file {path}`.")
    stages: list[Stage] = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise ConfigError(f"{path}: stage {number} = {entry!r} must be a table, [[stages]].")
        stages.append(_stage(recipe, number, dict(entry), values, overrides, stages[-1] if stages else None))
    names = [stage.name for stage in stages]
    if len(set(names)) < len(names):
        raise ConfigError(f"{path}: stages need names of their own, these are {', '.join(names)}.")
    return recipe, stages


def _stage(
    recipe: Recipe,
    number: int,
    entry: dict[str, Any],
    shared: dict[str, Any],
    overrides: dict[str, Any],
    last: Stage | None,
) -> Stage:
    name, optimizer = entry.pop("name", ""), entry.pop("optimizer_state", "reset")
    try:
        if optimizer not in ("reset", "carry"):
            raise ConfigError(f"optimizer_state = {optimizer!r} must be 'reset' or 'carry'.")
        if last is None and optimizer == "carry":
            raise ConfigError("optimizer_state = 'carry' on the first stage, which has none to carry over.")
        values = merge(merge(shared, entry), overrides)
        for section, key in (("job", "dump_folder"), ("checkpoint", "initial_load_path")):
            if key in values.get(section, {}):
                raise ConfigError(
                    f"{section}.{key} is the recipe's to set; use recipe.folder, recipe.name, recipe.start."
                )
        if last is not None:
            values = _with_theta(values, shared, merge(entry, overrides), last.config.position.rotary)
        config: JobConfig = build_config(values)
        if last is None and recipe.start:
            _compare_theta(values, config, recipe.start)
        if optimizer == "carry" and last is not None:
            before, now = trained_layers(last.config), trained_layers(config)
            if before is not None and not (now is not None and {*now} <= {*before}):
                raise ConfigError(
                    f"optimizer_state = 'carry', but the last stage's optimizer knows layers {last.config.training.layers} "
                    f"alone, and here training.layers = {config.training.layers!r}; use 'reset'."
                )
    except ConfigError as error:
        raise ConfigError(f"stage {number} ({name or 'unnamed'}): {error}") from error
    name = name or f"{number + 1}-{config.training.seq_len}"
    if not re.fullmatch(r"[\w.-]+", name) or name in (".", ".."):
        raise ConfigError(
            f"stage {number}: name = {name!r} must be a folder's name of letters, digits, '_', '.' and '-'."
        )
    root = Path(recipe.folder) / recipe.name
    config.job.dump_folder = str(root / name)
    config.job.description = f"{recipe.name}, stage {number + 1}: {name}"
    if not config.checkpoint.enable or config.checkpoint.load_only:
        raise ConfigError("checkpoint.enable = false or load_only: a stage hands its checkpoint on to the next.")
    if recipe.start and not config.tokenizer.path and config.tokenizer.kind != "bytes":
        if not Path(recipe.start).is_dir():
            raise ConfigError(no_start(recipe.start))
        config.tokenizer = dataclasses.replace(config.tokenizer, path=str(tokenizer_of(Path(recipe.start))))
    if not config.tokenizer.path and config.tokenizer.kind != "bytes":
        config.tokenizer = dataclasses.replace(config.tokenizer, path=str(root / "tokenizer"))
    start = config.checkpoint
    if last is None:
        start.initial_load_path = recipe.start or None
    elif optimizer == "reset":
        start.initial_load_path = str(last.model_dir)
    else:
        start.initial_load_path = str(last.folder / start.folder / f"step-{last.config.training.steps}")
        start.initial_load_model_only = False
        start.exclude_from_loading = CARRY_EXCLUDES
    return Stage(name, optimizer, config)


def _with_theta(values: dict[str, Any], shared: dict[str, Any], own: dict[str, Any], before: Rotary) -> dict[str, Any]:
    """A stage that names no RoPE base goes on with that of the stage before it; one that all stages share is for their kind
    of RoPE."""
    common, named, rotary = rotary_of(shared), rotary_of(own), rotary_of(values)
    for_all = "theta" in rotary and named.get("kind", common.get("kind")) == common.get("kind")
    if "theta" in named or for_all or isinstance(before, NoRotary) or rotary.get("kind") == "none":
        return values
    position = values.get("position", {})
    if not isinstance(position, dict):  # which is refused when the settings are checked
        return values
    return {**values, "position": {**position, "rotary": {**rotary, "theta": before.theta}}}


def _compare_theta(values: dict[str, Any], config: JobConfig, start: str) -> None:
    """Warns of a first stage that turns with another base than its weights though nothing asks for it."""
    theirs, ours = theta_of(Path(start)), config.position.rotary
    if (
        "theta" not in rotary_of(values)
        and theirs is not None
        and not isinstance(ours, NoRotary)
        and theirs != ours.theta
    ):
        logger.warning(other_theta(start, theirs, ours.theta))


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
    parser.add_argument("recipe", type=Path, help="TOML file with [[stages]], or a shipped recipe's name")
    parser.add_argument("--tiny", action="store_true", help="its small form, which trains on a CPU in a minute")
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
    overrides = {**parse_options(rest), "tiny": options.tiny}
    recipe, stages = load_recipe(find_config(options.recipe), overrides)
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
