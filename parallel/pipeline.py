"""Pipeline parallelism: the model is cut into stages, and micro-batches pass through them on a schedule.

The schedules are PyTorch's (`torch.distributed.pipelining`). Two things are our own: stages are cut by cost
(`parallel/stages.py`), and the last stage returns the sum of losses itself, since every stage is given labels, positions and
document starts.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleZBVZeroBubble,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from farsight.configs.schema import JobConfig
from farsight.errors import ConfigError
from farsight.model.build import ModelConfig
from farsight.model.llama import Llama
from farsight.parallel.meshes import ParallelDims
from farsight.parallel.parallelize import parallelize
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
    stages: Sequence[PipelineStage]
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
            loss = self._run(self.schedule.eval, inputs)
        # PyTorch 2.11 keeps the buffers of the first batch. Those made for an evaluation ask for no gradients.
        for info in itertools.chain(*(infos for stage in self.stages for infos in stage.args_recv_info.values())):
            if isinstance(buffer := getattr(info, "buffer", None), Tensor):
                buffer.requires_grad_()
        return loss

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
    model: Llama, dims: ParallelDims, config: JobConfig, device: torch.device, loss_fn: LossShare
) -> tuple[Pipeline, list[Llama]]:
    """Cuts the model into stages and parallelises this rank's; also returns them, in the order of the stages.

    Args:
        model: the whole model, on the meta device.

    Raises:
        ConfigError: a number of stages or micro-batches that the schedule does not support, or a schedule that PyTorch does not.
    """
    name = config.parallelism.pipeline_parallel_schedule
    if name.endswith("ZeroBubble") and torch.__version__ < "2.13":
        # It computes the gradients of weights by themselves, which fails in 2.11 below an autograd.Function, such as SwiGLU's.
        raise ConfigError(
            f'parallelism.pipeline_parallel_schedule = "{name}" needs PyTorch 2.13, and this is {torch.__version__}: use "Interleaved1F1B".'
        )
    kind, mesh = get_schedule_class(name), dims.need("pp")
    names = modules_of_stages(config)
    stages, parts = [], []
    for number in stages_of_rank(mesh.get_local_rank(), mesh.size(), len(names), folded=kind is ScheduleZBVZeroBubble):
        part = _only(copy.deepcopy(model), {*names[number]})
        parallelize(part, dims, config)
        stages.append(PipelineStage(part, number, len(names), device, group=mesh.get_group()))
        parts.append(part)
    micro_batches = config.training.local_batch_size // config.parallelism.pipeline_parallel_microbatch_size
    try:
        schedule = kind(
            stages[0] if issubclass(kind, PipelineScheduleSingle) else stages,  # type: ignore[arg-type]  # one or all, by kind
            n_microbatches=micro_batches,
            loss_fn=loss_fn,
            scale_grads=False,  # the loss is already a share of the global batch's
        )
    except ValueError as error:
        raise ConfigError(f"parallelism.pipeline_parallel_schedule: {error}") from error
    has_first, has_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    return Pipeline(schedule, stages, has_first, has_last), parts


def stages_of_rank(rank: int, ranks: int, stages: int, folded: bool) -> tuple[int, ...]:
    """The numbers of the stages that a rank holds.

    Args:
        folded: the stages go to the last rank and back, as in the ZBV schedule; otherwise they start again at the first.
    """
    return (rank, stages - 1 - rank) if folded else tuple(range(rank, stages, ranks))


def _only(model: Llama, names: set[str]) -> Llama:
    """The model with only the named modules, in place."""
    for name, module in [*model.named_children()]:
        if isinstance(module, nn.ModuleDict):
            for key in [*module]:
                if f"{name}.{key}" not in names:
                    del module[key]
        elif name not in names:
            setattr(model, name, None)
    return model


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
