"""Gathers sharded tensors to rank 0, one at a time."""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from farsight.parallel.parts import TensorShard
from farsight.parallel.ranks import file_group

Place = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a part in its whole tensor."""


@torch.no_grad()
def gathered(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields the whole tensors of all ranks by name, on the host of rank 0; on the others nothing. All ranks exhaust it.

    Layouts need not be known: a part that several ranks hold comes from the lowest of them.

    Args:
        state: tensors of which this rank holds all or a part, by name: plain ones, DTensors or `TensorShard`.
    """
    rank, group = dist.get_rank(), file_group()
    parts = {name: parts_of(tensor) for name, tensor in state.items()}
    own = {name: (state[name].shape, state[name].dtype, [*places]) for name, places in parts.items()}
    everyone = [own] * dist.get_world_size()
    if len(everyone) > 1:
        dist.all_gather_object(everyone, own, group=group)
    for name in sorted({name for entries in everyone for name in entries}):
        holders = [(holder, entries[name]) for holder, entries in enumerate(everyone) if name in entries]
        _, (shape, dtype, _) = holders[0]
        whole = torch.empty(shape, dtype=dtype) if rank == 0 else None
        taken: set[Place] = set()
        for holder, (_, _, places) in holders:
            for offsets, sizes in [place for place in places if place not in taken]:
                taken.add((offsets, sizes))
                if rank not in (0, holder):
                    continue
                if rank == holder:
                    part = parts[name][offsets, sizes].detach().cpu().contiguous()
                else:
                    part = torch.empty(sizes, dtype=dtype)
                if holder and rank == holder:
                    dist.send(part, 0, group=group)
                elif holder:
                    dist.recv(part, holder, group=group)
                if whole is not None:
                    whole[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))] = part
        if whole is not None:
            yield name, whole


def parts_of(tensor: Tensor) -> dict[Place, Tensor]:
    """The parts of a tensor that this rank holds, by their places."""
    if isinstance(tensor, TensorShard):
        return {(tuple(offsets), tuple(part.shape)): part for offsets, part in tensor.chunks.items()}
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        return {(tuple(chunk.offsets), tuple(chunk.sizes)): local for chunk in tensor.__create_chunk_list__()}
    return {((0,) * tensor.dim(), tuple(tensor.shape)): tensor}
