"""The validation loss of a run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torchtitan.components.loss import IGNORE_INDEX

from farsight.configs.schema import JobConfig
from farsight.data.loader import build_validation_loader
from farsight.parallel.batch import model_inputs, sum_of_losses
from farsight.parallel.halo import Context
from farsight.parallel.parallelize import release_gathered
from farsight.parallel.pipeline import LossShare, Pipeline
from farsight.training.metrics import RunMetrics


@dataclass
class Validator:
    """Measures the mean loss over held-out batches, the same ones each time and on any number of ranks."""

    job_config: JobConfig
    dp_world_size: int
    dp_rank: int
    tokenizer: Any
    parallel_dims: Any
    metrics_processor: RunMetrics
    validation_context: Any
    maybe_enable_amp: Any
    loss_fn: LossShare
    pp_schedule: Any = None
    pp_has_first_stage: bool | None = None
    pp_has_last_stage: bool | None = None
    build_batches: Callable[..., Any] = build_validation_loader
    batches: Any = field(init=False)

    def __post_init__(self) -> None:
        self.batches = self.build_batches(self.job_config, self.tokenizer, self.dp_rank, self.dp_world_size)

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> float:
        """Reports and returns the mean loss per held-out token, in nats; all ranks call it."""
        device = self.metrics_processor.device
        self.loss_fn.denominator = 1.0  # gives sums, in a pipeline too
        total = torch.zeros(2, dtype=torch.float64, device=device)
        for part in model_parts:
            part.eval()
        context = Context.of(self.parallel_dims, self.job_config)
        stages = None
        if self.pp_schedule is not None:
            stages = Pipeline(self.pp_schedule, bool(self.pp_has_first_stage), bool(self.pp_has_last_stage))
        for input_dict, labels in self.batches:
            on_device = {name: x.to(device) for name, x in input_dict.items()}
            with self.validation_context(), self.maybe_enable_amp:
                inputs = model_inputs(self.job_config, context, on_device, labels.to(device))
                if stages is None:
                    loss_sum, counts = model_parts[0](**inputs), True
                else:
                    loss_sum, counts = stages.evaluate(inputs), stages.has_last
            total += torch.stack([loss_sum.double(), counts * (inputs["labels"] != IGNORE_INDEX).sum().double()])
        for part in model_parts:
            part.train()
            release_gathered(part)
        sum_of_losses(self.parallel_dims, total)
        loss = float(total[0] / total[1])
        self.metrics_processor.log_validation(step, loss, int(total[1]))
        return loss
