"""LoRA on our model, through PEFT's own layers, so that DoRA, rsLoRA and rank patterns come with it."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farsight.configs.finetuning import Base, Lora, Projection
from farsight.errors import ConfigError
from farsight.model.llama import Llama, name_seed

N = TypeVar("N", int, float)

ADAPTER = "default"
"""PEFT's name for an unnamed adapter."""
MODULES: dict[Projection, str] = {
    "q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo",
    "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2",
}  # fmt: skip
"""Hugging Face's names for a block's linear layers, and ours."""
ATTENTION: tuple[Projection, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Those in `self_attn`; the others are in `mlp`."""


def add_lora(model: Llama, lora: Lora, layers: Sequence[int], base: Base) -> None:
    """Puts LoRA on linear layers of some blocks, and freezes everything else.

    Called on the meta device, after `quantize_linears`. LoRA's own weights are fp32, whatever the dtype of the base.

    Raises:
        ValueError: a rank below 1.
        ConfigError: as `by_linear`.
    """
    from peft import LoraConfig, inject_adapter_in_model

    ranks = [lora.rank, *lora.rank_pattern.values()]
    if min(ranks) < 1:
        raise ValueError(f"lora.rank and rank_pattern must be at least 1, not {min(ranks)}")
    inject_adapter_in_model(
        LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # type: ignore[arg-type]  # PEFT declares int, but only divides it by the rank
            lora_dropout=lora.dropout,
            target_modules=[MODULES[name] for name in lora.modules],
            layers_to_transform=list(layers),
            layers_pattern="layers",
            use_dora=lora.dora,
            use_rslora=lora.rslora,
            rank_pattern=as_pattern(by_linear(lora.rank_pattern, lora, layers), our_linear),
            alpha_pattern=as_pattern(by_linear(lora.alpha_pattern, lora, layers), our_linear),
        ),
        model,
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_lora(name))
        if is_lora(name):
            parameter.data = parameter.data.float()
    for module in lora_layers(model).values():
        # Under autocast the products are computed in bf16: casting their input to fp32 first would only cost memory.
        module.cast_input_dtype_enabled = base.dtype == "float32"


def by_linear(pattern: Mapping[str, N], lora: Lora, layers: Sequence[int]) -> dict[tuple[int, Projection], N]:
    """The values that `rank_pattern` or `alpha_pattern` gives to linear layers, by layer and module; only those it matches.

    PEFT's own function decides, on the names of a `transformers` Llama, so that plain `peft` gets the same result.

    Raises:
        ConfigError: a key that is not a valid regular expression, or that decides for no layer that LoRA is on.
    """
    if not (pattern and layers):
        return {}
    from peft.utils.other import get_pattern_key

    try:
        keys = {
            (layer, module): get_pattern_key([*pattern], hf_linear(layer, module))
            for layer in layers
            for module in lora.modules
        }
    except re.error as error:
        raise ConfigError(f"lora: a key of {dict(pattern)} is not a valid regular expression: {error}") from error
    if unused := [key for key in pattern if key not in keys.values()]:
        raise ConfigError(
            f"lora: pattern {unused[0]!r} applies to none of LoRA's layers: it matches none of them, or an earlier pattern takes "
            f"precedence. It has to match the end of a name such as {hf_linear(layers[0], lora.modules[0])}, from a dot on."
        )
    return {linear: pattern[key] for linear, key in keys.items() if key in pattern}


def as_pattern(values: Mapping[tuple[int, Projection], N], name: Callable[[int, Projection], str]) -> dict[str, N]:
    """A pattern for PEFT that names each layer in full: PEFT sorts saved patterns, and this one is valid in any order."""
    names: dict[N, list[str]] = {}
    for linear, value in values.items():
        names.setdefault(value, []).append(re.escape(name(*linear)))
    return {"|".join(full_names): value for value, full_names in names.items()}


def hf_linear(layer: int, module: Projection) -> str:
    """The name of a linear layer in a `transformers` Llama."""
    return f"model.layers.{layer}.{'self_attn' if module in ATTENTION else 'mlp'}.{module}"


def our_linear(layer: int, module: Projection) -> str:
    """The name of the same layer in our model."""
    return f"layers.{layer}.{'attention' if module in ATTENTION else 'feed_forward'}.{MODULES[module]}"


def is_lora(name: str) -> bool:
    """Whether a parameter of that name belongs to LoRA."""
    return ".lora_" in name


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """PEFT's layers by name."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def initial_lora(name: str, shape: Sequence[int], seed: int, base_weight: Tensor | None) -> Tensor:
    """The initial value of a LoRA weight, fp32: A uniform, B zero, so that the adapter changes nothing at first.

    A depends only on the seed and its name, so it is the same in every parallel layout. As PEFT's default: Kaiming
    uniform initialisation with a = sqrt(5), which is ±1/sqrt(fan in).

    Args:
        base_weight: [out, in], the adapted weight, dequantised; used by DoRA, whose magnitudes are the norms of its rows.
    """
    if ".lora_B." in name:
        return torch.zeros(*shape)
    if ".lora_magnitude_vector." in name:
        assert base_weight is not None
        return torch.linalg.vector_norm(base_weight.float(), dim=1)
    generator = torch.Generator().manual_seed(name_seed(seed, name))
    return torch.empty(*shape).uniform_(-1, 1, generator=generator) / math.sqrt(shape[1])


def merged_weight(weight: Tensor, tensors: dict[str, Tensor], scaling: float) -> Tensor:
    """W + scaling·B·A; with DoRA's magnitudes m, row by row, m · (W + scaling·B·A) / ‖W + scaling·B·A‖. fp32 [out, in].

    Args:
        weight: W [out, in], dequantised.
        tensors: "A" [rank, in], "B" [out, rank], and with DoRA "magnitude" [out].
    """
    merged = weight.float() + scaling * (tensors["B"].float() @ tensors["A"].float())
    if "magnitude" in tensors:
        merged = F.normalize(merged, dim=1) * tensors["magnitude"].float()[:, None]
    return merged
