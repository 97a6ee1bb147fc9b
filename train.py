"""Farsight's entry: trains a model from a TOML config, on one process or under torchrun.

    python train.py                                             the quickstart recipe, on a CPU in a few minutes
    python train.py --job.config_file configs/X.toml [--section.key value …]
    torchrun --nproc_per_node 8 train.py --job.config_file configs/X.toml
    python train.py finetune                                    QLoRA and GARFA on the quickstart's model, in minutes too
    python train.py finetune --job.config_file configs/finetune/X.toml [--section.key value …] [--dry-run | --inspect 3]

`launch/trainer.py` has the training step and the loop, `launch/finetuner.py` what fine-tuning does otherwise.
"""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from checkpoints.manager import SaveError
from configs.finetuning import FinetuneConfig
from configs.help import help_text
from configs.load import ConfigError, load_config
from configs.schema import JobConfig
from data.sources import DataError
from launch.files import lock_run_folder
from launch.logs import start_logging
from launch.trainer import Interrupted, NonFiniteError, Trainer
from model.build import ModelConfig, trained_layers
from model.layers import describe
from parallel.device import check_float8, import_deepspeed
from parallel.pipeline import layers_by_stage

logger = logging.getLogger("farsight")

EXIT_CONFIG = 2
"""The configuration or the data can't be used."""
EXIT_NON_FINITE = 3
"""The loss or the gradients were not finite; the weights are those before the step."""
EXIT_SAVE = 4
"""A checkpoint could not be written; the newest complete one is kept."""
EXIT_MEMORY = 5
"""A GPU had too little memory."""
EXIT_INTERRUPTED = 75
"""SIGTERM or SIGINT: a checkpoint was saved, and the same command goes on from it."""


def pretrain(arguments: list[str]) -> int:
    """Runs one training stage; returns the exit status."""
    config: JobConfig = load_config(arguments)
    layers, trained = ModelConfig.from_job(config).layers(), trained_layers(config)
    if config.parallelism.pipeline_parallel_degree > 1:
        layers_by_stage(config)

    def build() -> Trainer:
        trainer = Trainer(config)
        logger.info(describe(layers))
        if trained is not None:
            logger.info(f"training layers {config.training.layers} alone: {trainer.trained_parameters:,} parameters")
        return trainer

    return run(config, build)


def finetune(arguments: list[str]) -> int:
    """Trains adapters beside a base model; returns the exit status."""
    # What pre-training does not need, bitsandbytes and PEFT among it, is imported here.
    from launch import finetune_report as report
    from launch.finetune import load_finetune_config
    from launch.finetuner import Finetuner

    options, dry_run, inspect = report.take_flags(arguments)
    config = load_finetune_config(options)
    if inspect:
        print(report.rows(config, inspect))
        return 0
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    logger.info(report.summary(config, ranks))

    def explain(error: BaseException, trainer: Any) -> str:
        return report.out_of_memory(config, ranks, error, trainer)

    return run(config, lambda: Finetuner(config), dry_run, explain)


def out_of_memory(error: BaseException, trainer: Trainer | None) -> str:
    return f"{error}\n`python -m launch.plan` with this config says what takes the memory, and what to lower."


def run(
    config: JobConfig,
    build: Callable[[], Trainer],
    dry_run: bool = False,
    explain: Callable[[BaseException, Trainer | None], str] = out_of_memory,
) -> int:
    """Builds a trainer and trains; returns the exit status.

    Args:
        dry_run: do everything but train.
        explain: what to say when a GPU's memory was not enough.
    """
    trainer: Trainer | None = None
    status = EXIT_CONFIG
    try:
        # What can't be is refused here, before processes connect.
        if config.engine == "deepspeed":
            import_deepspeed()
        check_float8(config)
        if os.environ.get("RANK", "0") == "0":
            lock_run_folder(Path(config.job.dump_folder))
        trainer = build()
        if dry_run:
            logger.info(f"dry run: everything is ready for {config.training.steps:,} steps")
        else:
            trainer.train()
        status = 0
    except (ConfigError, DataError) as error:
        logger.error(str(error))
    except NonFiniteError as error:
        logger.error(str(error))
        status = EXIT_NON_FINITE
    except SaveError as error:
        logger.error(str(error))
        status = EXIT_SAVE
    except torch.OutOfMemoryError as error:
        logger.error(explain(error, trainer))
        status = EXIT_MEMORY
    except Interrupted:
        assert trainer is not None
        goes_on = trainer.checkpointer.saved(trainer.step) is not None
        logger.info(
            f"stopped after step {trainer.step}; "
            + ("the same command goes on from there" if goes_on else "nothing was saved (see [checkpoint])")
        )
        status = EXIT_INTERRUPTED
    finally:
        if trainer is not None:
            if trainer.dataloader is not None:
                trainer.dataloader.close()  # type: ignore[attr-defined]  # its thread reads ahead
            trainer.close()
        # After an error on this rank alone, the others are inside a collective, and taking leave could wait for them.
        if status not in (EXIT_CONFIG, EXIT_MEMORY) and dist.is_initialized():
            dist.destroy_process_group()
    return status


def main(arguments: list[str]) -> int:
    command = arguments.pop(0) if arguments and not arguments[0].startswith("-") else "pretrain"
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        sections = [a for a in arguments if not a.startswith("-")]
        print(help_text(sections, FinetuneConfig if command == "finetune" else JobConfig))
        return 0
    start_logging()
    try:
        match command:
            case "pretrain" if not arguments:
                if os.environ.get("WORLD_SIZE", "1") != "1":
                    raise ConfigError("Under torchrun, name a config: --job.config_file configs/X.toml.")
                from launch.recipe import main as run_recipe

                return run_recipe([str(Path(__file__).parent / "configs" / "quickstart.toml")])
            case "pretrain":
                return pretrain(arguments)
            case "finetune":
                own = ["--job.config_file", str(Path(__file__).parent / "configs" / "finetune" / "quickstart.toml")]
                named = any(argument.startswith("--job.config_file") for argument in arguments)
                return finetune(arguments if named else own + arguments)
            case _:
                raise ConfigError(f"{command!r} is not a command; use pretrain (the default) or finetune.")
    except (ConfigError, DataError) as error:
        logger.error(str(error))
        return EXIT_CONFIG


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
