"""Fine-tuning's optimizer, with separate groups for adapters and GARFA, and their learning-rate schedules."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer

from farsight.configs.finetuning import FinetuneConfig
from farsight.model.adapt.layers import adapted
from farsight.model.llama import unwrapped
from farsight.parallel.zero import ZeroOptimizer

GARFA = "garfa.raw"
"""Suffix of GARFA's parameter names."""


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters, by their names in the model as it was built, without wrappers."""
    return {unwrapped(name): p for name, p in model.named_parameters() if p.requires_grad}


def parameter_groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Trained parameters by group: "adapter" (LoRA's, or whole layers') and "garfa". An empty group is left out."""
    groups: dict[str, list[nn.Parameter]] = {"adapter": [], "garfa": []}
    for name, parameter in trained_parameters(model).items():
        groups["garfa" if name.endswith(GARFA) else "adapter"].append(parameter)
    return {name: group for name, group in groups.items() if group}


class FinetuneOptimizers(OptimizersContainer):
    """One optimizer of two groups, each with its own learning rate and weight decay."""

    def __init__(self, config: FinetuneConfig, model: nn.Module) -> None:
        o, self.model_parts = config.optimizer, [model]
        groups: list[dict[str, Any]] = [
            {"params": parameters, "lr": settings.lr, "weight_decay": settings.weight_decay}
            for name, parameters in parameter_groups(model).items()
            for settings in [config.garfa if name == "garfa" else o]
        ]
        self.optimizers = [
            _optimizer_class(config)(groups, betas=(o.beta1, o.beta2), eps=o.eps, **_implementation(config))
        ]
        self._post_init([p for group in groups for p in group["params"]], dict(self.optimizers[0].defaults))


class BitsandbytesOptimizers(FinetuneOptimizers):
    """bitsandbytes' optimizers, with flat state dicts: torch can't load their own, in which 8-bit moments are nested."""

    def state_dict(self) -> dict[str, Any]:
        """Moments, their quantisation state, and the groups' settings, by parameter."""
        found: dict[str, Any] = {}
        for name, parameter, group in self._parameters():
            found |= {f"state.{name}.{key}": value for key, value in self.optimizers[0].state[parameter].items()}
            found |= {f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets the values that are not tensors; tensors were loaded in place."""
        for name, parameter, group in self._parameters():
            own = self.optimizers[0].state[parameter]
            own.update({key: state_dict[f"state.{name}.{key}"] for key in own})
            group.update({key: state_dict[f"param_groups.{name}.{key}"] for key in group if key != "params"})

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
        """Yields each parameter with its name and group, after making the state that a first step would make."""
        optimizer: Any = self.optimizers[0]
        if not optimizer.initialized:
            optimizer.check_overrides()
            optimizer.initialized = True
        names = {id(parameter): name for name, parameter in trained_parameters(self.model_parts[0]).items()}
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if not optimizer.state[parameter]:
                    optimizer.init_state(group, parameter, number, place)
                yield names[id(parameter)], parameter, group


def build_optimizers(config: FinetuneConfig, model: nn.Module) -> OptimizersContainer:
    """Builds the optimizer that `optimizer.name` and `engine` ask for."""
    if config.optimizer.name not in ("AdamW", "Adam"):
        return BitsandbytesOptimizers(config, model)
    plain = FinetuneOptimizers(config, model)
    return plain if config.engine == "torchtitan" else ZeroOptimizer(config, plain)


def _optimizer_class(config: FinetuneConfig) -> Callable[..., torch.optim.Optimizer]:
    name = config.optimizer.name
    if name in ("AdamW", "Adam"):
        return getattr(torch.optim, name)
    import bitsandbytes as bnb

    return getattr(bnb.optim, name)


def _implementation(config: FinetuneConfig) -> dict[str, Any]:
    """Options of torch's optimizers that bitsandbytes' lack."""
    if config.optimizer.name not in ("AdamW", "Adam"):
        return {}
    kind = config.optimizer.implementation
    return {"fused": kind == "fused", "foreach": kind == "foreach"}


def build_schedules(config: FinetuneConfig, optimizers: OptimizersContainer) -> LRSchedulersContainer:
    """Builds the learning-rate schedule of each parameter group."""
    s, g, steps = config.lr_scheduler, config.garfa, config.training.steps
    adapter = partial(rate, steps=steps, warmup=config.warmup_steps, decay=s.decay_type, least=s.min_lr_factor)
    garfa = partial(rate, steps=steps, warmup=round(g.warmup_ratio * steps), decay="cosine", least=g.min_lr_factor)
    layers = adapted(config)
    rates = [adapter] * bool(layers.lora or layers.whole) + [garfa] * bool(layers.garfa)
    return LRSchedulersContainer(optimizers, rates)  # type: ignore[arg-type]  # LambdaLR takes one for each group


def rate(step: int, *, steps: int, warmup: int, decay: str, least: float) -> float:
    """Learning rate as a share of its peak: rises linearly to 1 over the warm-up, then decays to `least`.

    Args:
        step: the step, from 0.
        steps, warmup: steps of the run, and of the warm-up.
        decay: shape of the decay: "linear", "sqrt" or "cosine".
        least: value at the end of the run.
    """
    if step < warmup:
        return (step + 1) / warmup
    left = 1 - (step - warmup) / max(1, steps - warmup)
    match decay:
        case "linear":
            shape = left
        case "sqrt":
            shape = 1 - math.sqrt(1 - left)
        case _:
            shape = 0.5 * (1 + math.cos(math.pi * (1 - left)))
    return least + (1 - least) * shape
