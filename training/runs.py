"""Models named on a command line: resolves each path to a model, its weights and its training runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from farsight.checkpoints.load import read_model_config
from farsight.checkpoints.model_dir.api import is_adapter
from farsight.checkpoints.steps import complete_steps
from farsight.configs.load import load_config, read_toml
from farsight.configs.shipped import find_config, shipped_configs
from farsight.errors import ConfigError
from farsight.model.build import ModelConfig
from farsight.outputs import short_names
from farsight.remote import shown
from farsight.training.metrics_file import read_metrics
from farsight.training.run_folder import is_run
from farsight.training.run_store import checkpoints_of
from farsight.training.stages import read_config


@dataclass(frozen=True)
class Run:
    """A run folder with at least one logged step: a whole training run, or a stage of a recipe."""

    name: str
    folder: Path
    seq_len: int
    steps: int


@dataclass(frozen=True)
class NamedModel:
    """A model named on the command line, with its weights and training runs."""

    name: str
    """Short name, unique among the models named."""
    number: int
    """Its place on the command line, which sets its colour."""
    path: Path
    """The path as given."""
    config: ModelConfig
    weights: Path | None
    """Model directory, adapter or checkpoint; None if there is none yet."""
    runs: tuple[Run, ...]
    """Runs that trained it, in order."""

    @property
    def places(self) -> tuple[Path, ...]:
        """Folders that may hold results, or that results may name as their model."""
        stage = self.runs[-1].folder if self.runs else None
        return tuple(dict.fromkeys(place for place in (self.path, stage, self.weights) if place is not None))


def find_models(paths: Sequence[Path]) -> list[NamedModel]:
    """Finds the model at each path.

    A path may be a run folder, a recipe's root, a model directory, an adapter, a checkpoint, or a config file.

    Raises:
        ConfigError: a path is none of these, or is named twice.
    """
    paths = [
        find_config(path) if path.suffix == ".toml" or (path.name in shipped_configs() and not path.exists()) else path
        for path in paths
    ]
    for number, path in enumerate(paths):
        if path.resolve() in [other.resolve() for other in paths[:number]]:
            raise ConfigError(f"{path} is named twice; name each model once.")
    names = short_names([shown(path.with_suffix("") if path.is_file() else path) for path in paths])
    return [_find(path, name, number) for number, (path, name) in enumerate(zip(paths, names, strict=True))]


def _find(path: Path, name: str, number: int) -> NamedModel:
    if path.is_file():
        return NamedModel(name, number, path, read_config(path), None, ())
    if not path.is_dir():
        raise ConfigError(f"{path} does not exist.")
    runs = _runs(path)
    if not runs and not is_run(path):
        try:
            return NamedModel(name, number, path, read_model_config(path), path, ())
        except ConfigError as error:
            raise ConfigError(f"{error} Nor is it a run folder (metrics.jsonl) or a recipe's (with stages).") from None
    weights = next((found for run in reversed(runs) if (found := _weights(run.folder)) is not None), None)
    if weights is not None:
        return NamedModel(name, number, path, read_model_config(weights), weights, runs)
    file = (runs[-1].folder if runs else path) / "config.toml"
    if "base_model" in read_toml(file):
        raise ConfigError(f"{path} has no checkpoint of its adapter yet: wait for the first, or name another run.")
    config = ModelConfig.from_job(load_config(["--job.config_file", str(file)]))
    return NamedModel(name, number, path, config, None, runs)


def _runs(path: Path) -> tuple[Run, ...]:
    if is_run(path):
        folders = [path]
    else:
        folders = _in_order([f for f in path.iterdir() if (f / "stage.toml").is_file() and is_run(f)])
    return tuple(_run(folder) for folder in folders if any("loss" in row for row in read_metrics(folder)))


def _in_order(stages: Sequence[Path]) -> list[Path]:
    """A recipe's stages in order: each after the one that it took its weights from."""
    configs = {stage: read_toml(stage / "config.toml") for stage in stages}

    def before(stage: Path) -> int:
        start = configs[stage]["checkpoint"].get("initial_load_path", "")
        others = [o for o in stages if o != stage and Path(start).is_relative_to(configs[o]["job"]["dump_folder"])]
        return 1 + before(others[0]) if others else 0

    return sorted(stages, key=before)


def _run(folder: Path) -> Run:
    training = read_toml(folder / "config.toml")["training"]
    return Run(folder.resolve().name, folder, training["seq_len"], training["steps"])


def _weights(folder: Path) -> Path | None:
    """A run's weights: its model directory, its adapter, or its newest checkpoint."""
    if (folder / "model" / "config.json").is_file():
        return folder / "model"
    if is_adapter(folder / "adapter"):
        return folder / "adapter"
    checkpoints = checkpoints_of(folder)
    steps = complete_steps(checkpoints)
    return checkpoints / f"step-{steps[-1]}" if steps else None
