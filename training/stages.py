"""Reads a recipe: turns `[recipe]` and `[[stages]]` of a TOML file into one complete config per stage."""

import dataclasses
import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from farsight.checkpoints.load import read_model_config
from farsight.configs.check import check_store
from farsight.configs.load import build_config, load_config, merge, parse_options, pop_tiny, read_toml
from farsight.configs.schema import JobConfig, NoRotary, Rotary
from farsight.configs.shipped import CONFIGS, find_config
from farsight.configs.typed import from_dict
from farsight.errors import ConfigError
from farsight.model.build import ModelConfig, trained_layers
from farsight.ranges import Count, Size
from farsight.remote import local, shown
from farsight.stores import StorePath, is_remote
from farsight.training.start import lasp_warning, model_at, other_theta, rotary_of, sets_theta, theta_of
from farsight.training.tokenizer import tokenizer_of

logger = logging.getLogger("farsight")


CARRY_EXCLUDES: list[Literal["optimizer", "dataloader", "train_state"]] = ["dataloader", "train_state"]
"""State not carried over with the optimizer: each stage has its own data order, and its own step count and with it schedule."""


@dataclass(frozen=True)
class Recipe:
    """`[recipe]`: settings that belong to no single stage."""

    name: str = ""
    """The run folder is `folder`/`name`. Empty: the file's name."""
    folder: str = "runs"
    """The folder that holds the run folder: "runs" and the name "story" give runs/story. s3://bucket/runs keeps the checkpoints on that
    store, and a copy of the other files, which lie in runs/story here."""
    gpus: Size = 1
    """GPUs that batch sizes and layouts are written for. On others each stage fits itself to them, with the same losses."""
    start: str = ""
    """Model directory, hf://ORG/NAME or checkpoint that the first stage starts from; empty starts from random weights."""
    perplexity_lengths: tuple[Size, ...] = (1, 2, 4)
    """Measure perplexity after each stage at these multiples of its sequence length; empty measures none."""
    perplexity_data: str = ""
    """File to measure every stage's perplexity on: of a plain text, windows side by side; of documents (.jsonl, .parquet), the last
    256 tokens of each that is long enough. Empty takes held-out documents of each stage's own data that pass its filters."""
    perplexity_tokens: Count = 2**20
    """Tokens to read at the longest length; 0 reads the whole file."""


@dataclass(frozen=True)
class Stage:
    """One stage with its complete config."""

    name: str
    optimizer: Literal["reset", "carry"]
    """Start with a fresh optimizer, or carry over the moments of the stage before."""
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
        overrides: sections applied to every stage; `recipe` changes the recipe itself, `tiny` takes its small form.

    Raises:
        ConfigError: the file is not a recipe, or a stage's settings can't be used.
    """
    overrides = dict(overrides)
    values = read_toml(path, pop_tiny(overrides))
    own = {"recipe": values.pop("recipe", {})}
    recipe = from_dict(Recipe, merge(own, {"recipe": overrides.pop("recipe", {})})["recipe"], "recipe")
    recipe = dataclasses.replace(recipe, name=recipe.name or path.stem)
    if recipe.name in (".", "..") or Path(recipe.name).name != recipe.name or "\\" in recipe.name:
        raise ConfigError(
            f"recipe.name = {recipe.name!r} must be the name of one folder; set recipe.folder for where it lies."
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
        raise ConfigError(f"{path}: stages need distinct names, these are {', '.join(names)}.")
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
        for section, key in (("job", "dump_folder"), ("job", "store"), ("checkpoint", "initial_load_path")):
            if key in values.get(section, {}):
                raise ConfigError(
                    f"{section}.{key} is the recipe's to set; use recipe.folder, recipe.name, recipe.start."
                )
        if last is not None:
            values = _with_theta(values, shared, merge(entry, overrides), last.config.position.rotary)
        config: JobConfig = build_config(values)
        if last is None and recipe.start:
            _compare_theta(values, config, recipe.start)
        if last is not None:
            warning = lasp_warning(config, ModelConfig.from_job(last.config), f"stage {last.name}")
        else:
            warning = lasp_warning(
                config, model_at(local(recipe.start, weights=False)) if recipe.start else None, recipe.start
            )
        if warning:
            logger.warning(f"{name or f'stage {number}'}: {warning}")
        if optimizer == "carry" and last is not None:
            before, now = trained_layers(last.config), trained_layers(config)
            if before is not None and not (now is not None and {*now} <= {*before}):
                raise ConfigError(
                    f"optimizer_state = 'carry', but the optimizer of the stage before only has layers "
                    f"{last.config.training.layers}, and here training.layers = {config.training.layers!r}; use 'reset'."
                )
    except ConfigError as error:
        raise ConfigError(f"stage {number} ({name or 'unnamed'}): {error}") from error
    name = name or f"{number + 1}-{config.training.seq_len}"
    if not re.fullmatch(r"[\w.-]+", name) or name in (".", ".."):
        raise ConfigError(
            f"stage {number}: name = {name!r} must be a folder name of letters, digits, '_', '.' and '-'."
        )
    root = Path("runs" if is_remote(recipe.folder) else recipe.folder) / recipe.name
    config.job.dump_folder = str(root / name)
    if is_remote(recipe.folder):
        config.job.store = str(recipe_store(recipe) / name)
        check_store(config.job)
    config.job.description = f"{recipe.name}, stage {number + 1}: {name}"
    if not config.checkpoint.enable or config.checkpoint.load_only:
        raise ConfigError(
            "checkpoint.enable = false and checkpoint.load_only can't be used in a recipe: stages pass on checkpoints."
        )
    if recipe.start and not config.tokenizer.path and config.tokenizer.kind != "bytes":
        weights = local(recipe.start, weights=False)
        if not weights.is_dir():
            raise ConfigError(no_start(recipe.start))
        config.tokenizer = dataclasses.replace(config.tokenizer, path=shown(tokenizer_of(weights)))
    if not config.tokenizer.path and config.tokenizer.kind != "bytes":
        config.tokenizer = dataclasses.replace(config.tokenizer, path=str(root / "tokenizer"))
    start = config.checkpoint
    if last is None:
        start.initial_load_path = recipe.start or None
    elif optimizer == "reset":
        start.initial_load_path = str(last.model_dir)
    else:
        start.initial_load_path = str(last.config.checkpoint_folder / f"step-{last.config.training.steps}")
        start.initial_load_model_only = False
        start.exclude_from_loading = CARRY_EXCLUDES
    return Stage(name, optimizer, config)


def recipe_store(recipe: Recipe) -> StorePath:
    """The recipe's folder on the store that `recipe.folder` names."""
    return StorePath(recipe.folder) / recipe.name


def _with_theta(values: dict[str, Any], shared: dict[str, Any], own: dict[str, Any], before: Rotary) -> dict[str, Any]:
    """Gives a stage that names no RoPE base that of the stage before it.

    A base in the shared settings counts as named, unless the stage has another kind of RoPE than they have.
    """
    common, named, rotary = rotary_of(shared), rotary_of(own), rotary_of(values)
    for_all = "theta" in rotary and named.get("kind", common.get("kind")) == common.get("kind")
    if "theta" in named or for_all or isinstance(before, NoRotary) or rotary.get("kind") == "none":
        return values
    position = values.get("position", {})
    if not isinstance(position, dict):  # refused later, when the settings are checked
        return values
    return {**values, "position": {**position, "rotary": {**rotary, "theta": before.theta}}}


def _compare_theta(values: dict[str, Any], config: JobConfig, start: str) -> None:
    """Warns if the first stage's RoPE base differs from that of its weights, though no setting names it."""
    theirs, ours = theta_of(local(start, weights=False)), config.position.rotary
    if (
        "theta" not in rotary_of(values)
        and theirs is not None
        and not isinstance(ours, NoRotary)
        and not sets_theta(config.position)
        and theirs != ours.theta
    ):
        logger.warning(other_theta(start, theirs, ours.theta))


def no_start(start: str) -> str:
    """The message for missing weights to start from; if a shipped recipe makes them, with its command."""
    for path in sorted(CONFIGS.rglob("*.toml")):
        if path.stem in Path(start).parts:
            with suppress(ConfigError):  # not a recipe
                for tiny in (False, True):
                    if any(Path(start).is_relative_to(s.folder) for s in load_recipe(path, {"tiny": tiny})[1]):
                        command = f"farsight recipe {path.stem}{' --tiny' * tiny}"
                        return f"recipe.start = {start!r} does not exist yet: run {command} first."
    return f"recipe.start = {start!r} does not exist: name a model directory, a checkpoint, or hf://ORG/NAME."


def read_config(path: Path, stage: str | None = None, options: Sequence[str] = ()) -> ModelConfig:
    """The model of a config file, of a recipe's stage (the last one when None) or of a model directory.

    Args:
        options: command-line options over a config file or recipe.

    Raises:
        ConfigError: the path is none of these, there is no such stage, or options for a model directory.
    """
    if not path.is_dir():
        return ModelConfig.from_job(read_job(path, options, stage))
    if given := [f"--stage {stage}"] * (stage is not None) + [*options]:
        raise ConfigError(f"{path} is a model directory, and {given[0]} is for configs and recipes: leave it out.")
    return read_model_config(path)


def read_job(path: Path, options: Sequence[str] = (), stage: str | None = None) -> JobConfig:
    """The settings of a config file or of a recipe's stage (the last one when None), with command-line options over them.

    Raises:
        ConfigError: no such file or stage, or settings that can't be used.
    """
    path = find_config(path)
    if "stages" not in read_toml(path):
        if stage is not None:
            raise ConfigError(f"{path} is not a recipe: it has no stage {stage!r}.")
        return load_config(["--job.config_file", str(path), *options])
    stages = {s.name: s.config for s in load_recipe(path, parse_options(list(options)))[1]}
    if stage is not None and stage not in stages:
        raise ConfigError(f"{path} has no stage {stage!r}; it has {', '.join(stages)}.")
    return stages[stage or next(reversed(stages))]
