"""Runs the stages of a recipe in order, each from the weights of the one before, and reports on them."""

import logging
import tomllib
from collections.abc import Sequence
from contextlib import suppress

from farsight import process
from farsight.checkpoints.steps import complete_steps
from farsight.configs.schema import JobConfig
from farsight.configs.typed import to_toml
from farsight.data.tokenizers.tokenizer import load_tokenizer
from farsight.errors import ConfigError, SaveError
from farsight.files import write_text
from farsight.launch.children import train_script, wait_for
from farsight.launch.plan.fit import BATCH, LAYOUT
from farsight.launch.recipe.held_out import texts_of
from farsight.launch.recipe.summary import report
from farsight.launch.recipe.tracked import track_summary
from farsight.stores import is_remote
from farsight.training.run_store import RunStore
from farsight.training.stages import Recipe, Stage, recipe_store
from farsight.training.tokenizer import prepare_tokenizer
from farsight.training.trackers.trackers import check_trackers

logger = logging.getLogger("farsight")


def run_recipe(recipe: Recipe, stages: list[Stage], launcher: list[str]) -> int:
    """Runs the stages that are not finished, and reports on all.

    Args:
        launcher: command that runs Python, alone or under torchrun; `train.py` and its options are appended.

    Returns:
        The exit status: 0, or that of the stage that failed.

    Raises:
        ConfigError: settings that can't be used, or finished stages that no longer fit.
    """
    root = stages[0].folder.parent
    _refuse_stale(stages)
    for stage in stages:
        check_trackers(stage.config)
    prepare_tokenizer(stages[0].config, root / "tokenizer")
    load_tokenizer(stages[0].config.tokenizer)  # refuse a bad one before data is read
    texts = texts_of(recipe, stages)
    copies = _copies(recipe, stages)
    _copy_up(copies)  # so that another machine goes on with the same tokenizer
    for number, stage in enumerate(stages):
        label = f"stage {number + 1}/{len(stages)}: {stage.name}"
        if stage.finished:
            logger.info(f"{label} is finished")
            settings = stage.folder / "stage.toml"
            if settings.is_file() and _learns_otherwise(settings.read_text(encoding="utf-8"), stage.config):
                logger.warning(
                    f"its settings have changed since; to train it again, remove {stage.folder} and the stages after it"
                )
        else:
            t = stage.config.training
            logger.info(f"\n{label}: {t.steps:,} steps of {t.seq_len:,} tokens")
            status = _run(stage, launcher)
            if status:
                return _stopped(status, label, stage)
        report(recipe, stages[: number + 1], root, texts)
        track_summary(stage.folder, root)
        _copy_up(copies)
    return 0


def _copies(recipe: Recipe, stages: Sequence[Stage]) -> RunStore | None:
    """The store of a recipe's own files, if `recipe.folder` is on one; stages copy theirs up themselves."""
    if not is_remote(recipe.folder):
        return None
    return RunStore(stages[0].folder.parent, str(recipe_store(recipe)), {stage.name for stage in stages})


def _copy_up(copies: RunStore | None) -> None:
    """Copies a recipe's own files to its store, if it has one.

    Raises:
        ConfigError: a file can't be copied.
    """
    if copies is not None:
        try:
            copies.push()
        except SaveError as error:
            raise ConfigError(str(error)) from error


def fetch_finished(recipe: Recipe, stages: Sequence[Stage]) -> None:
    """Copies what another machine has finished of a recipe on a store: its own files, and those of whole stages.

    Raises:
        ConfigError: the store can't be read.
    """
    own = _copies(recipe, stages)
    if own is None:
        return
    try:
        own.pull(lambda name: name.partition("/")[0] not in own.kept)
        for stage in stages:
            there = RunStore(stage.folder, stage.config.job.store)
            if not stage.finished and (there.store / "model" / "config.json").is_file():
                there.pull(lambda name: not name.startswith(f"{stage.config.checkpoint.folder}/"))  # noqa: B023  used here
    except OSError as error:
        raise ConfigError(f"recipe.folder = {recipe.folder} can't be read: {error.strerror or error}.") from error


def _refuse_stale(stages: list[Stage]) -> None:
    """Refuses to train a stage if later ones are finished: these started from weights that no longer exist.

    Raises:
        ConfigError: naming the later stages.
    """
    first = next((number for number, stage in enumerate(stages) if not stage.finished), len(stages))
    if stale := [stage for stage in stages[first:] if stage.finished]:
        names, folders = (
            ", ".join(str(what) for what in found) for found in zip(*((s.name, s.folder) for s in stale), strict=True)
        )
        raise ConfigError(
            f"stage {stages[first].name} is not finished, but later ones are ({names}), from weights that are gone: remove "
            f"{folders} to train them again, or restore the earlier stage."
        )


def _learns_otherwise(trained: str, config: JobConfig) -> bool:
    """True if a stage would learn something else than under `trained`, the settings in its folder: layouts and evaluations do not
    matter."""
    try:
        both = tomllib.loads(trained), tomllib.loads(to_toml(config))
    except tomllib.TOMLDecodeError:  # edited by hand
        return True
    unset = any(values.get("training", {}).get("global_batch_size") == -1 for values in both)
    for values in both:
        for section, key in (name.split(".") for name in (*LAYOUT, *[BATCH] * unset)):
            values.get(section, {}).pop(key, None)
        values.pop("evaluations", None)
        values.get("checkpoint", {}).pop("keep_best", None)
    return both[0] != both[1]


def _run(stage: Stage, launcher: list[str]) -> int:
    stage.folder.mkdir(parents=True, exist_ok=True)
    path = stage.folder / "stage.toml"
    write_text(path, to_toml(stage.config))
    return wait_for([*launcher, *train_script(), "--job.config_file", str(path)])


def _stopped(status: int, label: str, stage: Stage) -> int:
    """Reports how a stage ended early; returns the exit status, which is 128 plus the number for most signals."""
    if status == process.EXIT_INTERRUPTED:
        return status  # the stage has reported it
    rest = "the same command continues"
    with suppress(OSError):  # a store that can't be reached may be why the stage has ended
        steps = complete_steps(stage.config.checkpoint_folder)
        rest += f" from {f'step {steps[-1]}' if steps else 'its start'}"
    if status > 0:
        logger.error(f"{label} ended with status {status}, for the reason above; once that is fixed, {rest}")
        return status
    logger.error(f"{label} {process.killed_by(-status)}; {rest}")
    return process.EXIT_INTERRUPTED if -status in process.TO_STOP else 128 - status
