"""Merges an adapter into its base."""

import tempfile
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from farsight.checkpoints.adapter.config import read_adapter
from farsight.checkpoints.model_dir.api import check_model_out, write_model_dir
from farsight.checkpoints.model_dir.safetensors_files import TensorReader
from farsight.data.tokenizers.tokenizer import load_tokenizer_dir
from farsight.errors import ConfigError
from farsight.model.adapt.lora import ADAPTER, merged_weight
from farsight.model.adapt.quantized import dequantize
from farsight.model.build import build_model
from farsight.remote import local

Into = Literal["dequantized", "original"]


def merge_adapter(
    directory: Path,
    out: Path,
    base: Path | None = None,
    into: Into = "dequantized",
    dtype: torch.dtype | None = None,
    drop_garfa: bool = False,
    device: torch.device | str = "cpu",
    other_base: bool = False,
) -> None:
    """Writes the merged model directory atomically; an older model directory of ours is replaced.

    Args:
        base: the base's directory, instead of the one recorded in training.
        into: the weights that LoRA is added to: as training kept them, or the base's own.
        dtype: dtype of the weights written; None takes that of training.
        drop_garfa: leave out GARFA, including the base's own, which gives another model.
        device: where weights are quantised; bitsandbytes' rounding may differ between devices.
        other_base: accept a base that the adapter was not trained on.

    Raises:
        ConfigError: an adapter or base that doesn't fit, or weights that are not finite.
        UserError: as `check_model_out`.
    """
    check_model_out(out)
    adapter = read_adapter(directory)
    if out.resolve() in (directory.resolve(), local(base or adapter.base.path).resolve()):
        raise ConfigError(f"{out} is the adapter or its base; name a new folder.")
    whole = adapter.config().position.garfa
    has_garfa = whole is not None and bool(whole.layers)
    if drop_garfa and not has_garfa:
        raise ConfigError(f"--drop-garfa: {directory} has no GARFA, nor has its base; leave it out.")
    config, read_base = adapter.config(garfa=not drop_garfa), TensorReader(adapter.base_files(base, other_base))
    lora: dict[str, dict[str, Tensor]] = {}
    for name, tensor in adapter.lora_tensors.items():
        linear, _, part = name.removesuffix(f".{ADAPTER}.weight").partition(".lora_")
        lora.setdefault(linear, {})["magnitude" if part == "magnitude_vector" else part] = tensor

    def read(name: str) -> Tensor:
        if name in adapter.layer_tensors:
            return adapter.layer_tensors[name]
        weight = read_base(name)
        if into == "dequantized":
            quantized = name.startswith("layers.") and weight.dim() == 2
            kept = getattr(torch, adapter.base.dtype)
            weight = dequantize(weight.to(device), adapter.base).cpu() if quantized else weight.to(kept)
        linear = name.removesuffix(".weight")
        return merged_weight(weight, lora[linear], adapter.scaling(linear)) if linear in lora else weight

    with torch.device("meta"):
        tensors = dict(build_model(config).named_parameters())
    # Written in the order of the base's files, so that each is opened once.
    order = sorted(tensors, key=read_base.files.__getitem__)
    history = [dict(entry) for entry in adapter.history]
    if history:
        garfa = {True: "dropped", False: "kept"}[drop_garfa] if has_garfa else "none"
        history[-1]["merged"] = {"into": into, "garfa": garfa}
    with tempfile.TemporaryDirectory() as tokenizer:
        load_tokenizer_dir(directory).save(tokenizer)
        write_model_dir(
            out, config, {name: tensors[name] for name in order}, read, Path(tokenizer),
            dtype or getattr(torch, adapter.base.dtype), history=history,
        )  # fmt: skip
    read_base.close()
