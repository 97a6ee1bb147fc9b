"""Checks before a recipe runs: that its models are possible, and that its files and folders exist."""

import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from farsight.checkpoints.load import read_model_config
from farsight.checkpoints.resume import refuse_another_model, take_its_settings
from farsight.configs.evaluations import files_of, name_of
from farsight.configs.schema import HubSource, StdlibSource
from farsight.data.sources.build import open_sources
from farsight.data.tokenizers.tokenizer import load_tokenizer
from farsight.errors import ConfigError, DataError
from farsight.evals.live import LiveEvaluations
from farsight.model.build import ModelConfig, trained_layers
from farsight.remote import local
from farsight.training.run_folder import check_run_folder, is_run
from farsight.training.stages import Recipe, Stage, no_start


def check_stages(stages: Sequence[Stage]) -> None:
    """Refuses layers that a stage's model does not have, and figures that its evaluations do not have.

    Raises:
        ConfigError: naming the stage and what is wrong.
    """
    for stage in stages:
        try:
            ModelConfig.from_job(stage.config).layers()
            trained_layers(stage.config)
            LiveEvaluations(stage.config)
        except ConfigError as error:
            raise ConfigError(f"stage {stage.name}: {error}") from error


def missing(recipe: Recipe, stages: Sequence[Stage]) -> list[str]:
    """Lists what would stop the recipe later, one sentence for each problem."""
    root, wrong = stages[0].folder.parent, []
    if is_run(root):
        wrong.append(f"{root} is itself a run: set another recipe.name or recipe.folder.")
    if recipe.perplexity_lengths and recipe.perplexity_data and not Path(recipe.perplexity_data).is_file():
        wrong.append(f"recipe.perplexity_data = {recipe.perplexity_data!r} is not a file.")
    if recipe.start and not stages[0].finished:
        wrong += _wrong_start(local(recipe.start, weights=False), stages[0])
    found: dict[str, list[str]] = {}
    for stage in stages:
        for sentence in [] if stage.finished else _missing_of(stage, root / "tokenizer"):
            found.setdefault(sentence, []).append(stage.name)
    return wrong + [f"{', '.join(names)}: {sentence}" for sentence, names in found.items()]


def _wrong_start(start: Path, first: Stage) -> list[str]:
    if not start.is_dir():
        return [no_start(str(start))]
    try:
        theirs, ours = read_model_config(start), ModelConfig.from_job(first.config)
        if not ours.architecture.vocab_size:  # it will be the tokenizer's
            size = theirs.architecture.vocab_size
            ours = dataclasses.replace(ours, architecture=dataclasses.replace(ours.architecture, vocab_size=size))
        refuse_another_model(theirs, ours, f"recipe.start = {start}", take_its_settings(start))
    except ConfigError as error:
        return [str(error)]
    return []


def _missing_of(stage: Stage, trained_here: Path) -> Iterator[str]:
    config = stage.config
    local = tuple(source for source in config.data.sources if not isinstance(source, HubSource | StdlibSource))
    tokenizer = None
    for evaluation in config.evaluations:
        for path in files_of(evaluation):
            if not Path(path).exists():
                yield f"evaluation {name_of(evaluation)}: {path} does not exist."
    try:
        if Path(config.tokenizer.path) != trained_here:
            tokenizer = load_tokenizer(config.tokenizer)
    except DataError as error:
        yield str(error)
    try:
        check_run_folder(stage.folder)
        if local:
            open_sources(dataclasses.replace(config.data, sources=local), "train", tokenizer)
    except (ConfigError, DataError) as error:
        yield str(error)


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk that holds a folder, or will hold it."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
