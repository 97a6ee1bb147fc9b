"""Loads a model from an adapter directory and its base."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from farsight.checkpoints.adapter.config import layer_numbers, read_adapter
from farsight.checkpoints.model_dir.safetensors_files import TensorReader
from farsight.model.adapt.lora import add_lora, lora_layers
from farsight.model.adapt.quantized import fill, is_quantized, quantize_linears, unpack_parameters
from farsight.model.build import ModelConfig, build_model
from farsight.model.llama import Llama
from farsight.progress import progress

_DTYPES: dict[torch.dtype, Literal["bfloat16", "float32"]] = {
    torch.bfloat16: "bfloat16", torch.float32: "float32",
}  # fmt: skip


def load_adapter(
    directory: Path,
    base: Path | None = None,
    device: torch.device | str = "cpu",
    garfa: bool = True,
    dtype: torch.dtype | None = None,
    length: int | None = None,
    config: ModelConfig | None = None,
    other_base: bool = False,
) -> tuple[Llama, ModelConfig]:
    """Builds the base as in training, quantised or not, and applies the adapter.

    Args:
        base: the base's directory, instead of the one recorded in training.
        garfa: False leaves out GARFA, including the base's own.
        dtype: compute dtype; None takes that of training. Before quantisation, weights are rounded as in training;
            weights dequantised from 4 bits are rounded to this dtype, so fp32 does not reproduce bf16's numbers.
        length: sequence length to set positions for; None takes the trained length.
        config: replaces the adapter's own, to run the weights with other positions.
        other_base: as in `Adapter.base_files`.

    Returns:
        The model in evaluation mode, and its config.

    Raises:
        ConfigError: as `read_adapter`, and for a base or tensors that do not fit.
    """
    adapter = read_adapter(directory)
    own = adapter.lora_tensors | adapter.layer_tensors
    config, read = config or adapter.config(garfa), TensorReader(adapter.base_files(base, other_base))
    trained = getattr(torch, adapter.base.dtype)
    kept = adapter.base if dtype is None else replace(adapter.base, dtype=_DTYPES[dtype])
    with torch.device("meta"):
        model = build_model(config, length)
        quantize_linears(model, kept)
        if adapter.lora is not None:
            add_lora(model, adapter.lora, layer_numbers(adapter.lora), kept)
        unpack_parameters(model)
    modules = dict(model.named_modules())
    model.to_empty(device=device)
    parameters = {name.replace(".base_layer.", "."): (name, p) for name, p in model.named_parameters()}
    order = sorted(
        parameters, key=lambda name: str(read.files[name].path) if name in read.files else ""
    )  # one file of the base after the other
    with torch.no_grad():
        for plain in progress(order, desc="load", unit="tensor"):
            name, parameter = parameters[plain]
            module = modules[name.rpartition(".")[0]]
            if plain in own:
                parameter.copy_(own[plain])
            elif is_quantized(module) and name.endswith(".weight"):
                # As in training: int8 quantises the weights as stored, 4 bits after rounding them.
                weight = read(plain)
                fill(module, weight if kept.quantization == "int8" else weight.to(trained), kept)
            else:
                parameter.copy_(read(plain).to(trained))
    read.close()
    for layer in lora_layers(model).values():
        # LoRA's weights stay in fp32, and there is no autocast here: inputs are cast to fp32, and outputs back.
        layer.cast_input_dtype_enabled = True
    model.set_position(model.positions, model.length)
    return model.eval().requires_grad_(False), config
