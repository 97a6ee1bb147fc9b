"""Trains and fine-tunes models, on one process or under torchrun: `farsight train`, `farsight finetune`.

This file picks what to train, gives the trainer its hooks, and says how the run ended. `training/trainer.py` has the training
step and the loop. Libraries are imported where they are used: `--help` and a refused config need none of them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from farsight import cli, process
from farsight.configs.check_finetuning import NOT_FOR_FINETUNING
from farsight.configs.finetuning import FinetuneConfig
from farsight.configs.help import help_text
from farsight.configs.load import load_config
from farsight.configs.schema import JobConfig
from farsight.configs.shipped import CONFIGS
from farsight.errors import ConfigError, GateError, Interrupted, NonFiniteError, SaveError

if TYPE_CHECKING:
    from farsight.training.run_store import RunStore
    from farsight.training.trainer import Trainer

logger = logging.getLogger("farsight")

PRETRAIN_HELP = """\
Trains a model from a TOML config, on one process or under torchrun.

    farsight train                                              the quickstart recipe, on a CPU in a few minutes
    farsight train --job.config_file X.toml [--section.key value …]
    farsight torchrun --nproc_per_node 8 -m farsight.train --job.config_file X.toml
    farsight train --help [section …]                           every option, or those of some sections

  --dry-run    set everything up, and stop before the first step
  --open-data  read some documents of every data source, and stop; with --dry-run, set everything up after it
  --tiny       lay the config's [tiny] table over it

In a checkout, `python train.py …` and `torchrun … train.py …` do the same. A shipped config may be named without its path
(`--job.config_file tiny`). N in an option's name is an item of a list that the config file has, from 0.
"""
FINETUNE_HELP = """\
Fine-tunes adapters on a base model: LoRA or QLoRA, and GARFA.

    farsight finetune                                           QLoRA and GARFA on the quickstart's model, in minutes
    farsight finetune --job.config_file X.toml [--section.key value …]
    farsight finetune --help [section …]                        every option, or those of some sections

  --dry-run    load everything, show what would train and the memory it takes, and stop
  --inspect N  show N rows of data as the model reads them, with the tokens that are trained on, and stop

In a checkout, `python train.py finetune …` does the same. A shipped config may be named without its path
(`--job.config_file llama3.1_8b_qlora_garfa`). N in an option's name is an item of a list that the config file has, from 0.
"""


@dataclass
class Work:
    """A parsed and checked command line, and the trainer that it leads to."""

    config: JobConfig
    build: Callable[[], Trainer]
    dry_run: bool = False
    """Set everything up, but do not train."""
    out_of_memory: Callable[[BaseException, Trainer | None], str] = lambda error, trainer: (
        f"{error}\n`farsight plan` with this config shows what takes the memory, and what to lower."
    )
    """Returns the message for a GPU that ran out of memory."""
    trainer: Trainer | None = None
    """Set by `run` once it is built."""
    store: RunStore | None = None
    """Set by `run` on rank 0 if the config names one."""

    def end(self, status: int, sentence: str) -> None:
        """Notes in the run's metrics how it ended, if it began, and copies them to its store."""
        if self.trainer is not None:
            self.trainer.metrics.log_end(self.trainer.step, status, sentence)
        if self.store is not None:
            self.store.close()


def take_flag(arguments: list[str], flag: str) -> tuple[list[str], bool]:
    """The other arguments, and whether the flag is among them."""
    rest = [argument for argument in arguments if argument.replace("_", "-") != flag]
    return rest, len(rest) < len(arguments)


def take_inspect(arguments: list[str]) -> tuple[list[str], int]:
    """The other arguments, and N of `--inspect N`, or 0 without it.

    Raises:
        ConfigError: N is not a positive number.
    """
    rest, inspect = [], 0
    given = iter(arguments)
    for argument in given:
        name, _, value = argument.partition("=")
        if name == "--inspect":
            value = value or next(given, "")
            if not value.isdigit() or not int(value):
                raise ConfigError(f"--inspect{value and f' {value}'}: say how many rows to show, such as --inspect 3.")
            inspect = int(value)
        else:
            rest.append(argument)
    return rest, inspect


def pretrain(arguments: list[str]) -> Work | None:
    """Prepares one stage of pre-training; returns None if only data was to be read (--open-data)."""
    arguments, dry_run = take_flag(arguments, "--dry-run")
    arguments, only_data = take_flag(arguments, "--open-data")
    config: JobConfig = load_config(arguments)
    if only_data:
        from farsight.launch.open_data import open_data

        table, problems = open_data([("run", config)])
        print(table, flush=True)
        if problems:
            raise ConfigError("\n".join(["The data can't be read yet:", *problems]))
        if not dry_run:
            return None

    from farsight.analysis.plasticity.live import PlasticityMetrics
    from farsight.evals.live import LiveEvaluations
    from farsight.model.build import ModelConfig, trained_layers
    from farsight.model.position.layers import describe
    from farsight.parallel.pipeline import layers_by_stage
    from farsight.training.start import report_length, report_theta
    from farsight.training.trainer import Trainer

    layers, trained = ModelConfig.from_job(config).layers(), trained_layers(config)
    if config.parallelism.pipeline_parallel_degree > 1:
        layers_by_stage(config)
    report_theta(config, arguments)
    report_length(config)
    evaluations = LiveEvaluations(config)

    def build() -> Trainer:
        trainer = Trainer(config, PlasticityMetrics, evaluations)
        logger.info(describe(layers))
        if trained is not None:
            logger.info(f"training only layers {config.training.layers}: {trainer.trained_parameters:,} parameters")
        return trainer

    return Work(config, build, dry_run)


def finetune(arguments: list[str]) -> Work | None:
    """Prepares fine-tuning; returns None if only rows were to be shown (--inspect)."""
    from farsight.data.instructions.view import show_rows
    from farsight.evals.live import LiveEvaluations
    from farsight.launch.plan.out_of_memory import explain_out_of_memory
    from farsight.launch.plan.text import summary
    from farsight.training.finetune.model import load_finetune_config
    from farsight.training.finetune.trainer import Finetuner

    arguments, dry_run = take_flag(arguments, "--dry-run")
    arguments, inspect = take_inspect(arguments)
    config = load_finetune_config(arguments)
    if inspect:
        print(show_rows(config, inspect))
        return None
    ranks = process.ranks().world_size
    logger.info(summary(config, ranks))

    def explain(error: BaseException, trainer: Any) -> str:
        return explain_out_of_memory(error, config, trainer and trainer.memory.marks, ranks=ranks)

    evaluations = LiveEvaluations(config)
    return Work(config, lambda: Finetuner(config, evaluations), dry_run, explain)


def run(work: Work) -> None:
    """Builds the trainer and trains.

    Raises:
        ConfigError: the processes do not fit the layout, or the run folder is in use.
        NonFiniteError, SaveError, GateError, Interrupted, torch.OutOfMemoryError: how training can end early.
    """
    import torch
    import torch.distributed as dist

    from farsight.parallel.device import import_deepspeed
    from farsight.parallel.float8 import check_float8
    from farsight.training.hangs.read import LAST_PHASE
    from farsight.training.ranks import check_layout
    from farsight.training.run_folder import lock_run_folder
    from farsight.training.run_store import open_run_store
    from farsight.training.trackers.trackers import check_trackers

    config, trainer, together = work.config, None, False
    # Refuse an impossible layout before processes connect.
    check_layout(config, process.ranks().world_size)
    if config.engine == "deepspeed":
        import_deepspeed()
    check_float8(config)
    check_trackers(config)
    if process.ranks().rank == 0:
        lock_run_folder(Path(config.job.dump_folder))
        work.store = open_run_store(config.job, config.checkpoint.folder)
    try:
        work.trainer = trainer = work.build()
        if work.store is not None:
            trainer.copy_up = work.store.push
        if work.dry_run:
            logger.info(f"dry run: everything is ready for {config.training.steps:,} steps")
        else:
            trainer.metrics.describe = partial(_describe, config)
            trainer.train()
        together = True
    except (NonFiniteError, SaveError, GateError, Interrupted):
        together = True
        raise
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(work.out_of_memory(error, trainer)) from error
    finally:
        if trainer is not None:
            if together:
                trainer.watch.at(trainer.step, LAST_PHASE)
            trainer.close()
        # After an error on only this rank, the others are inside a collective: destroying the process group could hang.
        if together and dist.is_initialized():
            dist.destroy_process_group()


def _describe(config: JobConfig) -> dict[str, dict[str, Any]]:
    """The description of the run that trackers get; imported when there are any."""
    from farsight.launch.tracked import describe

    return describe(config, process.ranks().world_size)


class Ending(NamedTuple):
    """How this rank ends."""

    status: int
    sentence: str
    follows: bool = False
    """Another rank's failure is the cause."""
    said: bool = False
    """Another rank has logged the sentence."""


def ending(error: BaseException, run_folder: Path | None) -> Ending:
    """How an error ends the run."""
    match error:
        case Interrupted():
            return Ending(process.EXIT_INTERRUPTED, str(error))
        case KeyboardInterrupt():
            return Ending(process.EXIT_CTRL_C, "stopped at once; the same command continues from the newest checkpoint")
        case NonFiniteError():
            return Ending(process.EXIT_NON_FINITE, str(error))
        case SaveError():
            return Ending(process.EXIT_SAVE, str(error))
        case GateError():
            return Ending(process.EXIT_GATE, str(error))
    if type(error).__name__ == "OutOfMemoryError":
        return Ending(process.EXIT_MEMORY, str(error))
    if (sentence := cli.explain(error)) is not None:
        return Ending(process.EXIT_INPUT, sentence)

    from farsight.training.ranks import lost_rank

    if (lost := lost_rank(error)) is not None:
        return Ending(process.EXIT_UNEXPECTED, *lost)
    line = cli.report_unexpected(error, run_folder and run_folder / "errors")
    # The log already names the rank.
    return Ending(process.EXIT_UNEXPECTED, line.removeprefix(f"rank {process.ranks().rank}: "))


def leave(error: BaseException, work: Work | None) -> int:
    """Reports how the run ended, once for all ranks with the same message; returns the exit status."""
    status, sentence, follows, said = ending(error, Path(work.config.job.dump_folder) if work is not None else None)
    if work is not None:
        work.end(status, sentence)
    process.leave_note(status, sentence, follows)
    if status == process.EXIT_INTERRUPTED:
        logger.info(sentence)
    elif not said and not process.first_rank_says(sentence):
        logger.error(sentence)
    return status


def main(arguments: list[str]) -> int:
    command = arguments.pop(0) if arguments and not arguments[0].startswith("-") else "pretrain"
    if command in ("pretrain", "finetune") and {"-h", "--help"} & {*arguments}:
        return _help([a for a in arguments if not a.startswith("-")], command)

    work: Work | None = None
    try:
        from farsight.training.logs import start_logging

        start_logging()
        ranks = process.ranks()
        match command:
            case "pretrain" if not arguments:
                if ranks.world_size > 1:
                    raise ConfigError("Under torchrun, name a config: --job.config_file configs/X.toml.")
                from farsight.launch.recipe.__main__ import main as run_recipe

                return run_recipe([str(CONFIGS / "quickstart.toml")])
            case "pretrain":
                work = pretrain(arguments)
            case "finetune":
                own = ["--job.config_file", str(CONFIGS / "finetune" / "quickstart.toml")]
                named = any(argument.startswith("--job.config_file") for argument in arguments)
                work = finetune(arguments if named else own + arguments)
            case _:
                raise ConfigError(
                    f"{command!r} is not an option. To train a config: --job.config_file {command}; to fine-tune: finetune."
                )
        if work is not None:
            run(work)
            work.end(0, "finished")
        return 0
    except (Exception, KeyboardInterrupt) as error:
        return leave(error, work)


@cli.command
def _help(sections: list[str], command: str) -> int:
    if command == "finetune":
        print(FINETUNE_HELP + help_text(sections, FinetuneConfig, NOT_FOR_FINETUNING))
    else:
        print(PRETRAIN_HELP + help_text(sections))
    return 0


if __name__ == "__main__":
    process.begin(process.BETWEEN_STEPS if len(sys.argv) == 1 else process.BEFORE_TRAINING)
    sys.exit(main(sys.argv[1:]))
