"""The optimizers of a run: what they step, at which learning rate, and their state in checkpoints."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farsight.training.optimizers.eight_bits import dequantised, is_quantised, quantise
from farsight.training.schedule import Rate


@dataclass(frozen=True)
class Group:
    """Parameters with a learning rate of their own."""

    parameters: dict[str, nn.Parameter]
    """By their names in the model as it was built, without wrappers."""
    lr: float
    """Peak learning rate."""
    weight_decay: float
    rate: Rate


class Kind(Protocol):
    """Builds optimizers of one kind, and knows the state that they keep."""

    @property
    def can_skip(self) -> bool:
        """True if the optimizers skip a step when a flag on the device is set, the `found_inf` of PyTorch's fused ones."""
        ...

    def build(self, groups: Sequence[Group]) -> list[Optimizer]:
        """The optimizers that step the groups between them; see `param_groups` for their settings."""
        ...

    def new_state(self, optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
        """The state that the first step would make for a parameter."""
        ...


def param_groups(groups: Sequence[Group], keep: Any = lambda name, parameter: True) -> list[dict[str, Any]]:
    """The groups as torch's optimizers take them; empty ones are left out.

    Args:
        keep: which parameters, by name and value.
    """
    kept = [(group, [p for name, p in group.parameters.items() if keep(name, p)]) for group in groups]
    return [
        {"params": p, "lr": group.lr, "weight_decay": group.weight_decay, "peak": group.lr, "rate": group.rate}
        for group, p in kept
        if p
    ]


def set_rates(optimizers: Sequence[Optimizer], step: int) -> float:
    """Sets the learning rates of a step, counted from 0; returns the first group's."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group in groups:
        lr = group["peak"] * group["rate"](step)
        if isinstance(group["lr"], Tensor):  # torchao's compiled steps would compile again for another number
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
    return groups[0]["peak"] * groups[0]["rate"](step)


class Optimizers:
    """The optimizers that step a rank's parameters; one state dict for all of them.

    State is named after the parameters, so that it resumes under every layout, and loaded in place. Settings such as the
    learning rate are the config's, not the checkpoint's.
    """

    def __init__(self, kind: Kind, groups: Sequence[Group]) -> None:
        self.kind, self.optimizers = kind, kind.build(groups)
        self.can_skip = kind.can_skip
        self.names = {id(p): name for group in groups for name, p in group.parameters.items()}

    def step(self, skip: Tensor | None = None) -> None:
        """Steps all parameters that have gradients.

        Args:
            skip: if the optimizers `can_skip`, an fp32 scalar on the device; nothing changes where it is 1.
        """
        for optimizer in self.optimizers:
            if skip is not None:
                optimizer.found_inf = skip  # type: ignore[attr-defined]  # read by fused steps, as GradScaler sets it
            optimizer.step()

    def zero_grad(self) -> None:
        """Frees the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """`state.<parameter>.<key>` of everything: tensors to be saved, or to be loaded into. Quantised ones are in fp32."""
        return {
            name: dequantised(value) if isinstance(value, Tensor) and is_quantised(value) else value
            for name, _, _, value in self._items()
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over what was not loaded in place: numbers, and tensors that have to be quantised again."""
        for name, state, key, value in self._items():
            if not isinstance(value, Tensor):
                state[key] = state_dict[name]
            elif is_quantised(value):
                quantise(value, state_dict[name])

    def _items(self) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
        """Names in a state dict, with the state, key and value that they stand for; makes state that does not exist yet."""
        for optimizer in self.optimizers:
            for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
                if not optimizer.state[parameter]:
                    optimizer.state[parameter] = self.kind.new_state(optimizer, parameter)
                state = optimizer.state[parameter]
                for key, value in [*state.items()]:
                    yield f"state.{self.names[id(parameter)]}.{key}", state, key, value
