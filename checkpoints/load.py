"""Loads a model from a model directory, a training checkpoint, or an adapter directory; the format is detected.

    model, config = load_model(Path("runs/my_run/model"))

Model directories keep safetensors (`model_dir/`), checkpoints torch's distributed format (`checkpoint_tensors.py`), and
adapters what fine-tuning learned beside a base (`adapter/`).
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from farsight.checkpoints.adapter.config import read_adapter
from farsight.checkpoints.adapter.load import load_adapter
from farsight.checkpoints.checkpoint_tensors import checkpoint_tensors, read_tensor
from farsight.checkpoints.intact.check import is_complete
from farsight.checkpoints.model_dir.api import check_tensors, is_adapter, read_config
from farsight.checkpoints.model_dir.safetensors_files import Stored, TensorReader
from farsight.configs.finetuning import Base
from farsight.errors import ConfigError
from farsight.model.adapt.quantized import fill, is_quantized, quantize_linears, unpack_parameters
from farsight.model.build import ModelConfig, build_model
from farsight.model.llama import Llama, copy_whole
from farsight.progress import progress


def read_model_config(directory: Path) -> ModelConfig:
    """The config of the model in a model directory, checkpoint or adapter directory; no weights are read.

    Raises:
        ConfigError: no such directory, or a model that can't be built here.
    """
    return read_adapter(directory).config() if is_adapter(directory) else read_config(directory)


def load_model(
    directory: Path,
    length: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    config: ModelConfig | None = None,
    divide: Callable[[Llama], None] | None = None,
    stored: Base | None = None,
    tensors: Iterator[tuple[str, Tensor]] | None = None,
) -> tuple[Llama, ModelConfig]:
    """Builds the model of a model directory, checkpoint or adapter directory and reads its weights, one tensor at a time.

    Args:
        length: sequence length to set positions for; None takes the trained length.
        config: replaces the directory's own, to run the weights with other positions.
        divide: shards the parameters over several ranks, on the meta device; each rank reads its own part.
        stored: quantises the blocks' linear layers as a base of fine-tuning; not for adapters, whose base is kept as in training.
        tensors: the parameters by our names, in place of those in the directory, which need not exist; goes with `config`.

    Returns:
        The model in evaluation mode, and its config.

    Raises:
        ConfigError: as `read_model_config` and `saved_tensors`; nothing is allocated before files and config agree.
    """
    if tensors is None and is_adapter(directory):
        if divide is not None:
            raise ConfigError(f"{directory} is an adapter; merge it first, to divide its model over several processes.")
        if stored is not None:
            raise ConfigError(
                f"{directory} is an adapter, whose base is kept as in training: leave out --quantization."
            )
        return load_adapter(directory, device=device, dtype=dtype, length=length, config=config)
    config = config or read_model_config(directory)
    tensors = tensors or saved_tensors(directory, config)
    with torch.device("meta"):
        model = build_model(config, length)
    if divide is not None:
        divide(model)
    for parameter in model.parameters():  # not model.to(dtype): frequencies and slopes stay in fp32
        parameter.data = parameter.data.to(dtype)
    if stored is not None:
        with torch.device("meta"):
            quantize_linears(model, stored)
            unpack_parameters(model)
    model.to_empty(device=device)
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    with torch.no_grad():
        for name, tensor in progress(tensors, total=len(parameters), desc="load", unit="tensor"):
            module = modules[name.rpartition(".")[0]]
            if stored is not None and is_quantized(module):
                fill(module, tensor, stored)
            else:
                copy_whole(parameters[name], tensor)
    model.set_position(model.positions, model.length)
    return model.eval(), config


def saved_tensors(directory: Path, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a model directory or checkpoint, by our names, one at a time.

    Raises:
        ConfigError: as `check_tensors`, or `checkpoint_tensors`.
    """
    if is_complete(directory):
        tensors = checkpoint_tensors(directory, config)
        return ((name, read_tensor(directory, tensors, name)) for name in tensors)
    return _read_in_order(check_tensors(directory, config))


def _read_in_order(files: Mapping[str, Stored]) -> Iterator[tuple[str, Tensor]]:
    """Tensors by our names, one file after the other."""
    read = TensorReader(files)
    for name in sorted(files, key=files.__getitem__):
        yield name, read(name)
    read.close()
