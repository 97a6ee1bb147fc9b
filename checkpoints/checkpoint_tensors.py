"""The parameters of a training checkpoint, one at a time, whatever layout wrote it."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from checkpoints.card import CONFIG
from configs.load import ConfigError
from model.build import ModelConfig, build_model


def parameter_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Shape of each parameter of the model, by its name."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in build_model(config).named_parameters()}


def checkpoint_tensors(checkpoint: Path, config: ModelConfig) -> dict[str, Tensor]:
    """The parameters as the checkpoint holds them, on the meta device.

    Raises:
        ConfigError: parameters that it lacks, or of another shape.
    """
    metadata: dict[str, Any] = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {}
    for name, shape in parameter_shapes(config).items():
        if name not in metadata:
            raise ConfigError(f"{checkpoint} lacks {name}, which its {CONFIG} asks for.")
        if metadata[name].size != shape:
            raise ConfigError(f"{checkpoint}: {name} has shape {tuple(metadata[name].size)}, not {tuple(shape)}.")
        tensors[name] = torch.empty(shape, dtype=metadata[name].properties.dtype, device="meta")
    return tensors


def read_tensor(checkpoint: Path, tensors: dict[str, Tensor], name: str) -> Tensor:
    """One of `checkpoint_tensors`, with its values."""
    tensor = torch.empty_like(tensors[name], device="cpu")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant here
        dcp.load({name: tensor}, checkpoint_id=checkpoint, no_dist=True)
    return tensor
