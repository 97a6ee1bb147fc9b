"""Builds a run's optimizers by `optimizer.kind`, and says how many bytes of state they keep."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from farsight.configs.finetuning import FinetuneConfig
from farsight.configs.schema import JobConfig
from farsight.model.llama import unwrapped
from farsight.parallel.meshes import ParallelDims
from farsight.parallel.zero import ZeroOptimizer
from farsight.training.optimizers.adam import Bitsandbytes, TorchAdam, TorchaoAdamW8bit
from farsight.training.optimizers.container import Group, Kind, Optimizers
from farsight.training.optimizers.muon import MuonKind
from farsight.training.schedule import garfa_schedule, schedule

GARFA = "garfa.raw"
"""Suffix of GARFA's parameter names."""

KINDS: dict[str, Callable[[Any, ParallelDims], Kind]] = {
    "adamw": lambda settings, dims: TorchAdam(settings),
    "adam": lambda settings, dims: TorchAdam(settings),
    "adamw8bit": lambda settings, dims: TorchaoAdamW8bit(settings),
    "muon": lambda settings, dims: MuonKind(settings, dims.shards()),
    "paged_adamw": lambda settings, dims: Bitsandbytes(settings),
    "paged_adamw8bit": lambda settings, dims: Bitsandbytes(settings),
}


def build_optimizers(config: JobConfig, parts: Sequence[nn.Module], dims: ParallelDims) -> "Optimizers | ZeroOptimizer":
    """Builds the optimizers that `optimizer.kind` and `engine` ask for.

    Args:
        parts: the model, or a rank's stages of it, parallelised.
    """
    groups = parameter_groups(config, parts)
    optimizers = Optimizers(KINDS[config.optimizer.kind](config.optimizer, dims), groups)
    if config.engine == "pytorch":
        return optimizers
    (model,), (optimizer,) = parts, optimizers.optimizers
    return ZeroOptimizer(config, model, optimizer)


def trained_parameters(*parts: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters, by their names in the model as it was built, without wrappers."""
    return {unwrapped(name): p for part in parts for name, p in part.named_parameters() if p.requires_grad}


def parameter_groups(config: JobConfig, parts: Sequence[nn.Module]) -> list[Group]:
    """Trained parameters by learning rate: GARFA's factors have one of their own. An empty group is left out."""
    trained, o = trained_parameters(*parts), config.optimizer
    garfa = (
        {name: p for name, p in trained.items() if name.endswith(GARFA)} if isinstance(config, FinetuneConfig) else {}
    )
    rest = {name: p for name, p in trained.items() if name not in garfa}
    groups = [Group(rest, o.lr, o.weight_decay, schedule(config))] if rest else []
    if garfa:
        assert isinstance(config, FinetuneConfig)
        groups.append(Group(garfa, config.garfa.lr, config.garfa.weight_decay, garfa_schedule(config)))
    return groups
