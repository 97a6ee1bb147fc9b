"""Pipeline parallelism: the model is cut into stages, and micro-batches pass through them on a schedule.

The schedules are PyTorch's (`torch.distributed.pipelining`). Two things are our own: stages are cut by cost
(`parallel/stages.py`), and the last stage returns the sum of losses itself, since every stage is given labels, positions and
document starts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
    get_schedule_class,
)
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import build_pipeline_schedule, pipeline_module_split
from torchtitan.protocols.train_spec import ParallelizeFunction

from farsight.configs.schema import JobConfig
from farsight.errors import ConfigError
from farsight.model.build import ModelConfig
from farsight.parallel.stages import layers_of_stages, stage_costs


class LossShare:
    """The loss function that the engine calls: turns a sum of losses into its share of the global mean.

    The model has already summed the losses. `denominator` is set before each step to the tokens of the global batch.
    """

    def __init__(self) -> None:
        self.denominator: float | Tensor = 1.0

    def __call__(self, loss_sum: Tensor, labels: Tensor | None = None) -> Tensor:
        return loss_sum / self.denominator


@dataclass(frozen=True)
class Pipeline:
    """A rank's stages and their schedule."""

    schedule: _PipelineSchedule
    has_first: bool
    has_last: bool

    def train(self, inputs: dict[str, Any]) -> Tensor:
        """Forward and backward pass of a batch, by micro-batches: its loss, or 0 on ranks without the last stage.

        Args:
            inputs: from `batch.model_inputs`.
        """
        return self._run(self.schedule.step, inputs)

    def evaluate(self, inputs: dict[str, Any]) -> Tensor:
        """The loss of a batch, which must have the shape of the training batches."""
        with _forward_only(self.schedule):
            return self._run(self.schedule.eval, inputs)

    def _run(self, run: Callable[..., Any], inputs: dict[str, Any]) -> Tensor:
        """Positional arguments reach only the first stage, keyword arguments every stage."""
        named = {name: x for name, x in inputs.items() if name != "tokens"}
        losses: list[Tensor] = []
        run(
            *([inputs["tokens"]] if self.has_first else []),
            **named,
            target=inputs["labels"] if self.has_last else None,
            losses=losses if self.has_last else None,
            return_outputs=False,
        )
        return torch.stack(losses).sum() if losses else torch.zeros((), device=inputs["labels"].device)


@contextmanager
def _forward_only(schedule: _PipelineSchedule) -> Iterator[None]:
    """Removes the backward actions from a schedule: PyTorch's `eval` does not if a rank holds several stages."""
    if not isinstance(schedule, _PipelineScheduleRuntime):
        yield
        return
    forward = {"FORWARD", "SEND_F", "RECV_F", "UNSHARD", "RESHARD"}
    whole = schedule.pipeline_order_with_comms
    schedule.pipeline_order_with_comms = {
        rank: [action for action in actions if action.computation_type.name in forward]
        for rank, actions in whole.items()
    }
    try:
        yield
    finally:
        schedule.pipeline_order_with_comms = whole


def pipeline(
    model: nn.Module,
    dims: ParallelDims,
    config: JobConfig,
    device: torch.device,
    model_args: Any,
    parallelize: ParallelizeFunction,
    loss_fn: LossShare,
) -> tuple[_PipelineSchedule, list[nn.Module], bool, bool]:
    """Cuts the model into stages and parallelises this rank's; torchtitan's signature.

    Returns:
        The schedule, the rank's parts of the model, and whether the first and the last stage are among them.

    Raises:
        ConfigError: a number of stages or micro-batches that the schedule does not support.
    """
    names = modules_of_stages(config)
    stages, parts = pipeline_module_split(
        model, dims.get_mesh("pp"), config.parallelism.pipeline_parallel_schedule, device, names
    )
    for stage, part in zip(stages, parts, strict=True):
        stage.submod = parallelize(part, dims, config)  # type: ignore[arg-type]  # our config is a subclass
    try:
        schedule = build_pipeline_schedule(config, stages, loss_fn)  # type: ignore[arg-type]  # the same
    except ValueError as error:
        raise ConfigError(f"parallelism.pipeline_parallel_schedule: {error}") from error
    return schedule, parts, any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)


def modules_of_stages(config: JobConfig) -> list[list[str]]:
    """Names of the modules that each stage holds: the embedding is in the first, norm and head in the last.

    Raises:
        ConfigError: more stages than layers.
    """
    names = [[f"layers.{layer}" for layer in run] for run in layers_by_stage(config)]
    names[0].insert(0, "tok_embeddings")
    names[-1] += ["norm", "output"]
    return names


def layers_by_stage(config: JobConfig) -> tuple[range, ...]:
    """The layers of each pipeline stage of a config.

    Raises:
        ConfigError: more stages than layers.
    """
    layers, embedding, head = stage_costs(ModelConfig.from_job(config), config.training.seq_len)
    try:
        return layers_of_stages(layers, stage_count(config), embedding, head)
    except ValueError as error:
        degree = config.parallelism.pipeline_parallel_degree
        raise ConfigError(f"parallelism.pipeline_parallel_degree = {degree}: {error}.") from error


def stage_count(config: JobConfig) -> int:
    """Number of stages, over all ranks."""
    p = config.parallelism
    single = issubclass(get_schedule_class(p.pipeline_parallel_schedule), PipelineScheduleSingle)
    return p.pipeline_parallel_degree * (p.pipeline_parallel_stages_per_rank or (1 if single else 2))
