"""Reads a model directory into a distributed state: each rank its part of every tensor, straight from safetensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future

from farsight.checkpoints.model_dir.safetensors_files import DTYPES, Stored, TensorReader


class SafetensorsReader(StorageReader):
    """Gives `torch.distributed.checkpoint.load` the tensors of a model directory by our names.

    Args:
        files: from `check_tensors`.
    """

    def __init__(self, files: Mapping[str, Stored]) -> None:
        self.files = files

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Shapes and dtypes, each tensor in one piece."""
        dtypes = {name: dtype for dtype, name in DTYPES.items()}
        read, found = TensorReader(self.files), {}
        for name in sorted(self.files, key=self.files.__getitem__):
            part = read.part(name)
            size = torch.Size(part.shape)
            whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            found[name] = TensorStorageMetadata(TensorProperties(dtype=dtypes[part.dtype]), size, [whole])
        read.close()
        return Metadata(dict(found))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what the plan asks for, one file after the other."""
        read = TensorReader(self.files)
        for item in sorted(plan.items, key=lambda item: self.files[item.storage_index.fqn]):
            spans = zip(item.storage_offsets, item.lengths, strict=True)
            values = read.part(item.storage_index.fqn)[tuple(slice(begin, begin + length) for begin, length in spans)]
            target = planner.resolve_tensor(item).detach()
            target.copy_(values)
            planner.commit_tensor(item, target)
        read.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing to reset."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """True if it is a folder."""
        return Path(checkpoint_id).is_dir()
