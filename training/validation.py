"""The validation loss of a run."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farsight.configs.schema import JobConfig
from farsight.data.packing import IGNORE
from farsight.model.llama import Llama
from farsight.parallel.batch import model_inputs, sum_of_losses, to_device
from farsight.parallel.halo import Context
from farsight.parallel.meshes import ParallelDims
from farsight.parallel.parallelize import release_gathered
from farsight.parallel.pipeline import LossShare, Pipeline


@dataclass(frozen=True)
class Validator:
    """Measures the mean loss over held-out batches, the same ones each time and on any number of ranks."""

    config: JobConfig
    dims: ParallelDims
    batches: Iterable[tuple[dict[str, Tensor], Tensor]]
    loss_fn: LossShare
    stages: Pipeline | None
    around_forward: Callable[[], AbstractContextManager[Any]]
    device: torch.device

    @torch.no_grad()
    def loss(self, model_parts: list[Llama]) -> tuple[float, int]:
        """Returns the mean loss per held-out token, in nats, and the number of tokens; all ranks call it."""
        self.loss_fn.denominator = 1.0  # gives sums, in a pipeline too
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for part in model_parts:
            part.eval()
        context = Context.of(self.dims, self.config)
        for input_dict, labels in self.batches:
            with self.around_forward():
                inputs = model_inputs(self.config, context, to_device(input_dict, self.device), labels.to(self.device))
                if self.stages is None:
                    loss_sum, counts = model_parts[0](**inputs), True
                else:
                    loss_sum, counts = self.stages.evaluate(inputs), self.stages.has_last
            total += torch.stack([loss_sum.double(), counts * (inputs["labels"] != IGNORE).sum().double()])
        for part in model_parts:
            part.train()
            release_gathered(part)
        sum_of_losses(self.dims, total)
        return float(total[0] / total[1]), int(total[1])
