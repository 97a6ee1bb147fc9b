"""Saves and loads, in place, tensors that are sharded over the ranks as runs of consecutive elements.

ZeRO shards parameters and optimizer state that way. DCP handles rectangles: a run of a matrix's elements is up to three.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Rectangle = tuple[torch.Size, torch.Size]
"""Offsets and sizes."""


def rectangles(shape: torch.Size, start: int, length: int) -> list[Rectangle]:
    """The rectangles that hold elements [start, start + length) of a vector or matrix, in the order of the elements."""
    assert 1 <= len(shape) <= 2, shape
    if len(shape) == 1:
        return [(torch.Size([start]), torch.Size([length]))] if length else []
    columns, found = shape[1], []
    while length:
        row, column = divmod(start, columns)
        rows = length // columns if column == 0 else 0
        size = (rows, columns) if rows else (1, min(length, columns - column))
        found.append((torch.Size([row, column]), torch.Size(size)))
        start, length = start + size[0] * size[1], length - size[0] * size[1]
    return found


class TensorShard(Tensor):
    """The part of a tensor that this rank holds, for DCP, which asks such objects for their chunks; it can't be computed with.

    Args:
        held: the elements from `start` on, flat, any dtype; loading writes into it.
        shape: shape of the whole tensor.
    """

    chunks: dict[torch.Size, Tensor]
    """Views of `held`, by their offsets in the whole tensor."""

    @staticmethod
    def __new__(cls, held: Tensor, shape: torch.Size, start: int) -> "TensorShard":
        part = Tensor._make_wrapper_subclass(cls, shape, dtype=held.dtype, device=held.device)  # type: ignore[attr-defined]  # what torch's own subclasses call
        part.chunks, at = {}, 0
        for offsets, sizes in rectangles(shape, start, held.numel()):
            part.chunks[offsets] = held[at : at + sizes.numel()].view(sizes)
            at += sizes.numel()
        return part

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # as torch's own subclasses have it
        raise NotImplementedError(f"{func}: the rest of the tensor is on other ranks")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, chunk.size()) for offsets, chunk in self.chunks.items()]

    def __create_write_items__(self, fqn: str, whole: Tensor) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, whole.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.chunks[index.offset]
