"""Base weights in 4 or 8 bits, in bitsandbytes' linear layers (QLoRA, Dettmers et al., 2023, section 3).

The layers are built on the meta device in their quantised shapes, so that an unquantised model never exists; `fill` then
quantises one weight at a time. Until then weights are plain parameters, because FSDP cannot shard bitsandbytes' own.
"""

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from farsight.configs.finetuning import Base
from farsight.model.llama import Llama, copy_whole

BLOCK = 64
"""Weights that share a scale in 4 bits."""
OUTLIER = 6.0
"""With an 8-bit base, inputs beyond this are multiplied in 16 bits (LLM.int8, Dettmers et al., 2022)."""


def quantize_linears(model: Llama, base: Base) -> None:
    """Replaces the blocks' linear layers with bitsandbytes' and casts all other weights to `base_model.dtype`.

    Called on the meta device. Norms, embedding and head have the dtype of the computation too: nothing is kept in fp32.
    """
    dtype = getattr(torch, base.dtype)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    if base.quantization == "none":
        return
    for name, linear in _linears(model):
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, _quantized(linear, base, dtype))
    # PEFT picks its layer classes by these flags.
    model.is_loaded_in_8bit = base.quantization == "int8"  # type: ignore[assignment]
    model.is_loaded_in_4bit = not model.is_loaded_in_8bit  # type: ignore[assignment]


def _linears(model: Llama) -> list[tuple[str, nn.Linear]]:
    return [(name, m) for name, m in model.named_modules() if name.startswith("layers.") and type(m) is nn.Linear]


def _quantized(linear: nn.Linear, base: Base, dtype: torch.dtype) -> nn.Module:
    import bitsandbytes as bnb

    rows, columns = linear.out_features, linear.in_features
    shapes: dict[str, Any] = {"input_features": columns, "output_features": rows, "bias": False, "device": "meta"}
    if base.quantization == "int8":
        # It warns at every call that bf16 is cast to fp16, which is how LLM.int8 works.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        eight = bnb.nn.Linear8bitLt(**shapes, has_fp16_weights=False, threshold=OUTLIER)
        numbers = torch.empty(rows, columns, dtype=torch.int8, device="meta")
        scales = torch.empty(rows, dtype=torch.float32, device="meta")
        eight.weight = bnb.nn.Int8Params(numbers, requires_grad=False, has_fp16_weights=False, CB=numbers, SCB=scales)  # type: ignore[assignment]
        eight.state.SCB = scales
        eight.bias = linear.bias
        return eight
    four = bnb.nn.Linear4bit(
        **shapes, compute_dtype=dtype, compress_statistics=base.double_quantization, quant_type=base.quantization
    )
    keep_packing(four)
    packed = torch.empty(-(-rows * columns // 2), 1, dtype=torch.uint8, device="meta")
    # DoRA reads the dequantised weight when it is added, even on the meta device.
    state = bnb.functional.QuantState(
        absmax=torch.empty(-(-rows * columns // BLOCK), device="meta"),
        shape=torch.Size((rows, columns)), code=torch.empty(16, device="meta"), blocksize=BLOCK,
        quant_type=base.quantization, dtype=dtype,
    )  # fmt: skip
    four.weight = bnb.nn.Params4bit(
        packed, requires_grad=False, compress_statistics=base.double_quantization, quant_type=base.quantization,
        bnb_quantized=True, quant_state=state,
    )  # fmt: skip
    four.bias = linear.bias
    return four


def keep_packing(model: nn.Module) -> None:
    """Keeps evaluations on CPUs with AVX512-BF16 from repacking 4-bit weights: that rounds their scales to 16 bits, fails for
    shapes that don't divide, and no gradient would pass through them again."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]  # a plain attribute of Linear4bit


def unpack_parameters(model: nn.Module) -> None:
    """Makes quantised weights plain parameters of the same bytes, once PEFT has seen their types."""
    for module in model.modules():
        if is_quantized(module):
            weight: Tensor = module.weight  # type: ignore[assignment]
            plain = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
            module.weight = nn.Parameter(plain, requires_grad=False)


def is_quantized(module: nn.Module) -> bool:
    """Whether a module is one of bitsandbytes' layers."""
    return type(module).__module__.startswith("bitsandbytes.")


def quantize(weight: Tensor, base: Base) -> tuple[Tensor, Any]:
    """A weight [out, in] quantised, and what it takes to read it: a QuantState for 4 bits, fp32 row scales [out] for 8."""
    import bitsandbytes as bnb

    if base.quantization == "int8":
        numbers, scales, _ = bnb.functional.int8_vectorwise_quant(weight.to(torch.float16))
        return numbers, scales
    return bnb.functional.quantize_4bit(
        weight.to(getattr(torch, base.dtype)).contiguous(),
        blocksize=BLOCK,
        compress_statistics=base.double_quantization,
        quant_type=base.quantization,
    )


def dequantize(weight: Tensor, base: Base) -> Tensor:
    """A weight [out, in] quantised and read back, in `base_model.dtype`: the base that the adapter is trained on."""
    dtype = getattr(torch, base.dtype)
    if base.quantization == "none":
        return weight.to(dtype)
    import bitsandbytes as bnb

    kept, state = quantize(weight, base)
    if base.quantization == "int8":
        return (kept.float() * (state.float() / 127)[:, None]).to(dtype)
    return bnb.functional.dequantize_4bit(kept, state).to(dtype)


@torch.no_grad()
def fill(module: Any, weight: Tensor, base: Base) -> None:
    """Sets the weight of a layer that `quantize_linears` made.

    Args:
        weight: the full weight [out, in], unquantised; under FSDP every rank quantises it, and keeps its shard and all scales.
    """
    import bitsandbytes as bnb

    parameter: Any = module.weight
    kept, state = quantize(weight.to(parameter.device), base)
    if base.quantization == "int8":
        module.weight = bnb.nn.Int8Params(kept, requires_grad=False, has_fp16_weights=False, CB=kept, SCB=state)
        module.state.SCB = state
        return
    module.quant_state = state  # found there where FSDP hands out plain tensors
    if isinstance(parameter, DTensor):
        copy_whole(parameter, kept)
        return
    module.weight = bnb.nn.Params4bit(
        kept, requires_grad=False, compress_statistics=base.double_quantization, quant_type=base.quantization,
        bnb_quantized=True, quant_state=state, module=module,
    )  # fmt: skip
