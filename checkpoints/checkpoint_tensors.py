"""The parameters of a training checkpoint, one at a time, whatever layout wrote it."""

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from farsight.checkpoints.cards.model import CONFIG
from farsight.checkpoints.dcp import Reader, load
from farsight.checkpoints.intact.check import refuse_damaged
from farsight.configs.load import ConfigError
from farsight.model.build import ModelConfig, build_model


def parameter_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Shape of each parameter of the model, by its name."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in build_model(config).named_parameters()}


def checkpoint_tensors(checkpoint: Path, config: ModelConfig, verify: bool = True) -> dict[str, Tensor]:
    """The parameters as the checkpoint holds them, on the meta device.

    Args:
        verify: compare all files with their checksums first; else look at sizes.

    Raises:
        ConfigError: a checkpoint that is damaged, that lacks parameters, or that has them in another shape.
    """
    refuse_damaged(checkpoint, verify)
    _reader.cache_clear()
    metadata = _reader(checkpoint).read_metadata().state_dict_metadata
    tensors = {}
    for name, shape in parameter_shapes(config).items():
        entry = metadata.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise ConfigError(f"{checkpoint} lacks {name}, which its {CONFIG} asks for.")
        if entry.size != shape:
            raise ConfigError(f"{checkpoint}: {name} has shape {tuple(entry.size)}, not {tuple(shape)}.")
        tensors[name] = torch.empty(shape, dtype=entry.properties.dtype, device="meta")
    return tensors


def read_tensor(checkpoint: Path, tensors: dict[str, Tensor], name: str) -> Tensor:
    """One of `checkpoint_tensors`, with its values."""
    tensor = torch.empty_like(tensors[name], device="cpu")
    load({name: tensor}, _reader(checkpoint), no_dist=True)
    return tensor


@lru_cache(maxsize=2)
def _reader(checkpoint: Path) -> Reader:
    """Kept from tensor to tensor, so that `.metadata` is read once; two, for what reads two checkpoints by turns."""
    return Reader(checkpoint)
