"""Clipping by the global gradient norm, across all shards."""

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from farsight.parallel.meshes import ParallelDims


def squared_norm(parameters: Iterable[Tensor], dims: ParallelDims) -> Tensor:
    """This rank's share of the squared norm of all gradients, an fp64 scalar: the sum over all ranks is the square.

    Squares are summed in fp64: a CPU's fp32 sum over one large tensor is off in the fourth digit, and by how much depends
    on how the tensor is sharded.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for gradient in (p.grad for p in parameters if p.grad is not None):
        shards = 1
        if isinstance(gradient, DTensor):
            placed = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
            shards = prod(size for size, placement in placed if not placement.is_replicate())
            gradient = gradient.to_local()
        # So many ranks of a pipeline stage hold the same elements.
        by_copies.setdefault(dims.world_size // dims.pp // shards, []).append(gradient)
    shares = [
        torch.stack(torch._foreach_norm(gradients, dtype=torch.float64)).square().sum() / copies
        for copies, gradients in by_copies.items()
    ]
    return torch.stack(shares).sum() if shares else torch.zeros((), dtype=torch.float64)


def clip_gradients(parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scales gradients, in place, so that their global norm is at most `max_norm`; nothing is read on the host.

    Args:
        norm: their norm over all ranks, a scalar on their device.
    """
    # In the gradients' own precision, so that one launch scales them all.
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm.float(), foreach=True)
