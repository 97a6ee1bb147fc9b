"""A rank's part of a batch, and sums over the ranks that hold the rest."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from farsight.configs.schema import JobConfig
from farsight.kernels.scoped_attention import remember_documents
from farsight.parallel.halo import Context
from farsight.parallel.meshes import ParallelDims


def to_device(input_dict: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """A loader's tensors on a device. Kernels that need to know the documents on the host are told them."""
    on_device = {name: x.to(device, non_blocking=True) for name, x in input_dict.items()}
    remember_documents(on_device["document_starts"], input_dict["document_starts"])
    return on_device


def model_inputs(
    config: JobConfig, context: Context | None, input_dict: dict[str, Tensor], labels: Tensor
) -> dict[str, Any]:
    """The arguments of `Llama.forward` for a batch; under context parallelism the rank's tokens, but all document starts.

    Args:
        input_dict: "input" and "document_starts" [B, T], "positions" [B, T] or [1, T]; integers.
        labels: int64 [B, T].
    """
    inputs = {"tokens": input_dict["input"], "positions": input_dict["positions"], "labels": labels}
    if config.parallelism.pipeline_parallel_degree > 1:
        inputs["positions"] = inputs["positions"].expand(labels.shape)  # cut into micro-batches by rows
    if context is not None:
        inputs["positions"] = inputs["positions"].expand(labels.shape)
        inputs = {name: context.own(x) for name, x in inputs.items()}
    return {**inputs, "document_starts": input_dict["document_starts"] if config.data.mask_documents else None}


def sum_of_losses(dims: ParallelDims, value: Tensor) -> Tensor:
    """Sums a tensor, in place, over data, context and pipeline ranks; stages before the last contribute zeros."""
    for name in ("loss", "pp"):
        if (mesh := dims.mesh(name)) is not None:
            dist.all_reduce(value, group=mesh.get_group())
    return value
