"""The memory that a run's phases take on its device, recorded so that an out-of-memory error can say what grew."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

Phase = Literal["loading", "forward", "backward", "optimizer"]


@dataclass(frozen=True)
class MemoryMarks:
    """Bytes that torch had allocated on the device; 0 where a run did not get that far."""

    base: int = 0
    """After loading: the base and what is trained."""
    after_optimizer: int = 0
    """After the first step, without activations: gradients and moments are there too."""
    at_failure: int = 0
    """Before what failed was let go of."""
    phase: Phase = "forward"


class MemoryRecorder:
    """Keeps the marks of a run. Without an accelerator all of them are 0."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.phase: Phase = "loading"
        self.base = self.after_optimizer = self.at_failure = 0

    def loaded(self) -> None:
        """To be called once the model is on the device."""
        self.base = self._allocated()

    def stepped(self) -> None:
        """To be called after each optimizer step; the first one counts."""
        self.after_optimizer = self.after_optimizer or self._allocated()

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Around a phase; of the one that fails, the memory is read before it is let go of."""
        self.phase = phase
        try:
            yield
        except torch.OutOfMemoryError:
            self.at_failure = self._allocated()
            raise

    @property
    def marks(self) -> MemoryMarks:
        return MemoryMarks(self.base, self.after_optimizer, self.at_failure, self.phase)

    def _allocated(self) -> int:
        return 0 if self.device.type == "cpu" else torch.accelerator.memory_allocated(self.device)
