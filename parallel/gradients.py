"""Clipping by the global gradient norm, across all shards."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from farsight.parallel.meshes import ParallelDims


def clip_gradients(parameters: Iterable[Tensor], max_norm: float, dims: ParallelDims) -> float:
    """Scales gradients, in place, so that their global norm is at most `max_norm`; returns the norm before clipping.

    The trainer calls it between the last backward pass of a step and the optimizer.

    Squares are summed in fp64: a CPU's fp32 sum over one large tensor is off in the fourth digit, and by how much depends
    on how the tensor is sharded. It takes an fp64 copy of one gradient at a time.
    """
    parameters = list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    # Norms of sharded tensors are partial sums: they are reduced together, not one by one.
    total = torch.linalg.vector_norm(torch.stack(norms))
    if isinstance(total, DTensor):
        total = total.full_tensor()
    if (stages := dims.mesh("pp")) is not None:
        squared = total**2
        dist.all_reduce(squared, group=stages.get_group())
        total = squared.sqrt()
    # In the gradients' own precision, so that one launch scales them all.
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total.float(), foreach=True)
    return float(total)
