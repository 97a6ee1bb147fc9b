"""Reads the parameters of a training checkpoint one at a time, whatever parallel layout wrote it."""

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from farsight.checkpoints.cards.model import CONFIG
from farsight.checkpoints.dcp import Reader, load
from farsight.checkpoints.intact.check import refuse_damaged
from farsight.errors import ConfigError
from farsight.model.build import ModelConfig, build_model


def parameter_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Shape of each parameter of a model, by name."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in build_model(config).named_parameters()}


def checkpoint_tensors(checkpoint: Path, config: ModelConfig, verify: bool = True) -> dict[str, Tensor]:
    """The checkpoint's parameters on the meta device: names, shapes and dtypes.

    Args:
        verify: compare all files with their checksums first; otherwise check sizes.

    Raises:
        ConfigError: the checkpoint is damaged, or a parameter is missing or has another shape.
    """
    refuse_damaged(checkpoint, verify)
    _reader.cache_clear()
    metadata = _reader(checkpoint).read_metadata().state_dict_metadata
    tensors = {}
    for name, shape in parameter_shapes(config).items():
        entry = metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise ConfigError(f"{checkpoint} lacks {name}, which its {CONFIG} requires.")
        if entry.size != shape:
            raise ConfigError(f"{checkpoint}: {name} has shape {tuple(entry.size)}, not {tuple(shape)}.")
        tensors[name] = torch.empty(shape, dtype=entry.properties.dtype, device="meta")
    return tensors


def read_tensor(checkpoint: Path, tensors: dict[str, Tensor], name: str) -> Tensor:
    """Reads one of `checkpoint_tensors`."""
    tensor = torch.empty_like(tensors[name], device="cpu")
    load({name: tensor}, _reader(checkpoint))
    return tensor


@lru_cache(maxsize=2)
def _reader(checkpoint: Path) -> Reader:
    """Cached, so that `.metadata` is read once; two entries, for grafts, which read two checkpoints by turns."""
    return Reader(checkpoint)
