"""A rank's part of a batch, and sums over the ranks that hold the others."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torchtitan.distributed import ParallelDims

from configs.schema import JobConfig
from parallel.halo import Context


def model_inputs(
    config: JobConfig, context: Context | None, input_dict: dict[str, Tensor], labels: Tensor
) -> dict[str, Any]:
    """What the model is given of a batch: under context parallelism the rank's tokens, and all document starts."""
    inputs = {"tokens": input_dict["input"], "positions": input_dict["positions"], "labels": labels}
    if context is not None:
        inputs["positions"] = inputs["positions"].expand(labels.shape)
        inputs = {name: context.own(x) for name, x in inputs.items()}
    return {**inputs, "document_starts": input_dict["document_starts"] if config.data.mask_documents else None}


def sum_of_losses(dims: ParallelDims, value: Tensor) -> Tensor:
    """Sum over the ranks that hold different rows, or different tokens of them."""
    if dims.dp_cp_enabled:
        dist.all_reduce(value, group=dims.get_mesh("loss").get_group())
    return value
