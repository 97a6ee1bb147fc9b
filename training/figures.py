"""The figures of an optimizer step: summed over ranks in one exchange, and read by the host once."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

SAVE, READ, STOP = 1, 2, 4
"""Requests of ranks in a step, as the terms of one sum: rank 0 alone asks to save, and to read what an evaluation beside the run has
found; a rank that was told to stop asks to stop."""


class OnTheWay:
    """Numbers that are copied to the host while it goes on.

    Args:
        numbers: a tensor on any device.
    """

    def __init__(self, numbers: Tensor) -> None:
        self.host, self.copied = numbers, None
        if numbers.device.type != "cpu":
            pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)  # else the copy would wait
            self.host = pinned.copy_(numbers, non_blocking=True)
            self.copied = torch.Event(numbers.device)
            self.copied.record()

    def read(self) -> list[float]:
        """The numbers, once they have been copied."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.host.tolist()


@dataclass
class StepFigures:
    """A step whose figures may still be on their way from the device."""

    step: int
    lr: float
    losses: list[Tensor]
    """Of this rank's micro-batches, as shares of the global batch's mean, in nats."""
    micro_batches: list[Any]
    """On the device; for inspection, if the loss is not finite."""
    exchanged: OnTheWay
    """Loss in nats per token, what ranks ask for, and the squared gradient norms of the groups that are clipped together; sums
    over all ranks."""
    engine_norm: float | None = field(default=None)
    """DeepSpeed's gradient norm."""

    @cached_property
    def numbers(self) -> list[float]:
        """`exchanged`, read."""
        return self.exchanged.read()

    @property
    def loss(self) -> float:
        """Mean over the global batch's tokens, in nats."""
        return self.numbers[0]

    @property
    def stopping(self) -> bool:
        """True if any rank was told to stop before the step ended."""
        return self.numbers[1] >= STOP

    @property
    def saving(self) -> bool:
        """True if rank 0 found a save to be due by its clock."""
        return bool(int(self.numbers[1]) & SAVE)

    @property
    def reading(self) -> bool:
        """True if rank 0 found an evaluation beside the run to have ended."""
        return bool(int(self.numbers[1]) & READ)

    @property
    def grad_norm(self) -> float:
        """Norm of all gradients before clipping; NaN if the loss is not finite."""
        if not math.isfinite(self.loss):
            return math.nan
        return math.sqrt(sum(self.numbers[2:])) if self.engine_norm is None else self.engine_norm
