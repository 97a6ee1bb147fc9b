"""Runs the stages of a recipe in order, each from the last one's weights, and reports on them."""

import logging
from pathlib import Path

from farsight import process
from farsight.checkpoints.steps import complete_steps
from farsight.configs.load import ConfigError, to_toml
from farsight.data.tokenizers.tokenizer import load_tokenizer
from farsight.files import write_text
from farsight.launch.children import train_script, wait_for
from farsight.launch.recipe.summary import report, write_held_out
from farsight.training.stages import Recipe, Stage
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
    return wait_for([*launcher, *train_script(), "--job.config_file", str(path)])


def _stopped(status: int, label: str, stage: Stage) -> int:
    """Says how a stage ended that is not finished; returns the exit status, of a signal 128 and its number."""
    steps = complete_steps(stage.folder / stage.config.checkpoint.folder)
    goes_on = f"the same command continues from {f'step {steps[-1]}' if steps else 'its start'}"
    if status == process.EXIT_INTERRUPTED:
        return status  # it has said so itself
    if status > 0:
        logger.error(f"{label} ended with status {status}, for the reason above; once that is put right, {goes_on}")
        return status
    logger.error(f"{label} {process.killed_by(-status)}; {goes_on}")
    return process.EXIT_INTERRUPTED if -status in process.TO_STOP else 128 - status
