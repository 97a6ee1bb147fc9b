"""Reads the configs that a plan is asked for: one, a recipe's stages, or one of fine-tuning with its base's shapes."""

import dataclasses
from pathlib import Path

from farsight.checkpoints.load import read_model_config
from farsight.configs.finetuning import FinetuneConfig
from farsight.configs.load import load_config, parse_options, read_toml
from farsight.configs.schema import Architecture, JobConfig, Position
from farsight.data.tokenizers.tokenizer import load_tokenizer
from farsight.errors import ConfigError
from farsight.remote import local
from farsight.training.finetune.base import take_base
from farsight.training.stages import load_recipe
from farsight.training.start import names_theta
from farsight.training.tokenizer import chosen_tokenizer


def read_configs(path: Path, options: list[str], stage: str | None) -> tuple[int, dict[str, JobConfig]]:
    """Reads a config or recipe; returns the recipe's number of GPUs (1 for a config), and the configs by name.

    A config is of fine-tuning if its sections or its folder say so.

    Raises:
        ConfigError: settings that can't be used, or no such stage.
    """
    values = read_toml(path)
    if {"base_model", "lora", "garfa"} & values.keys() or "finetune" in path.resolve().parts:
        if stage is not None:
            raise ConfigError(f"--stage {stage}: {path} is a fine-tuning config and has no stages.")
        return 1, {path.stem: read_finetune_config(path, options)}
    if "stages" not in values:
        if stage is not None:
            raise ConfigError(f"{path} is not a recipe: it has no stage {stage!r}.")
        return 1, {path.stem: load_config(["--job.config_file", str(path), *options])}
    recipe, stages = load_recipe(path, parse_options(options))
    names = [s.name for s in stages]
    if stage is not None and stage not in names:
        raise ConfigError(f"{path} has no stage {stage!r}; it has {', '.join(names)}.")
    return recipe.gpus, {f"{recipe.name} {s.name}": s.config for s in stages if stage in (None, s.name)}


def read_finetune_config(path: Path, options: list[str]) -> FinetuneConfig:
    """Reads a config; the base's shapes and positions come from its directory, or from `model.flavor` if it does not exist.

    Raises:
        ConfigError: settings that can't be used, or a base of unknown shapes.
    """
    arguments = ["--job.config_file", str(path), *options]
    config = load_config(arguments, FinetuneConfig)
    directory = local(config.base_model.path, weights=False).expanduser()
    if config.base_model.path and (directory / "config.json").is_file():
        take_base(config, read_model_config(directory), names_theta(arguments))
    elif config.architecture == Architecture():
        raise ConfigError(
            f"base_model.path = {config.base_model.path!r} does not exist, so its shapes are unknown: name them for the plan, for "
            "example with --model.flavor llama3.1-8b (a file in configs/sizes/)."
        )
    config.position = config.position or Position()
    return config


def with_vocabulary(config: JobConfig) -> tuple[JobConfig, list[str]]:
    """Fills in the embedding's size if the config leaves it to the tokenizer; returns the config and notes on it."""
    if config.architecture.vocab_size:
        return config, []
    t = chosen_tokenizer(config)
    there = t.kind == "bytes" or (t.path and local(t.path, weights=False).expanduser().exists())
    trained = not there and t.kind in ("auto", "sentencepiece")
    size = t.vocab_size if trained else load_tokenizer(t).vocab_size
    rounded = -(-size // 64) * 64  # as train.py does
    config = dataclasses.replace(config, architecture=dataclasses.replace(config.architecture, vocab_size=rounded))
    return config, [f"vocabulary of {rounded:,}: tokenizer.vocab_size, as the tokenizer is not trained yet"] * trained
