"""Records device memory in each phase of a run, so that an out-of-memory error can say what grew."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

Phase = Literal["loading", "forward", "backward", "optimizer"]


@dataclass(frozen=True)
class MemoryMarks:
    """Bytes that torch had allocated on the device at points of a run; 0 if the run did not get that far."""

    base: int = 0
    """After loading: the base and the trained parameters."""
    after_optimizer: int = 0
    """After the first step, without activations: gradients and moments as well."""
    at_failure: int = 0
    """When memory ran out, before tensors were released."""
    phase: Phase = "forward"
    """The phase that ran last."""


class MemoryRecorder:
    """Takes the marks of a run. Without an accelerator all of them are 0."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.phase: Phase = "loading"
        self.base = self.after_optimizer = self.at_failure = 0

    def loaded(self) -> None:
        """Call this once the model is on the device."""
        self.base = self._allocated()

    def stepped(self) -> None:
        """Call this after each optimizer step; only the first one is recorded."""
        self.after_optimizer = self.after_optimizer or self._allocated()

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Marks a phase; if memory runs out in it, reads the memory before its tensors are released."""
        self.phase = phase
        try:
            yield
        except torch.OutOfMemoryError:
            self.at_failure = self._allocated()
            raise

    @property
    def marks(self) -> MemoryMarks:
        """The marks taken so far."""
        return MemoryMarks(self.base, self.after_optimizer, self.at_failure, self.phase)

    def _allocated(self) -> int:
        return 0 if self.device.type == "cpu" else torch.accelerator.memory_allocated(self.device)
