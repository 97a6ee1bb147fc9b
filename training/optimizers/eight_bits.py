"""8-bit moments in checkpoints: saved in fp32, since a rank's blocks depend on the layout, and quantised again when loaded."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def is_quantised(value: Tensor) -> bool:
    """Whether a tensor is torchao's `OptimState8bit`, or sharded and its local part is."""
    return hasattr(local(value), "codes")


def local(value: Any) -> Tensor:
    """The part of a tensor that this rank holds."""
    return value.to_local() if isinstance(value, DTensor) else value


def dequantised(value: Any) -> Tensor:
    """The values in fp32, on the host: they take four times the memory."""
    part = local(value).dequantize()
    if isinstance(value, DTensor):
        part = DTensor.from_local(
            part, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
    return part.cpu()


def quantise(value: Any, whole: Tensor) -> None:
    """Sets a quantised tensor to values in fp32; those that came from the same blocks are restored exactly.

    A block's scale divides its largest value to 1, or its smallest to the map's lowest entry, which is more than -1. Division rounds,
    so its neighbours are tried too.
    """
    from torchao.optim.quant_utils import dequant_with_qmap, quantize_8bit_with_qmap

    state: Any = local(value)
    blocks = local(whole).to(state.device).view(state.scale.numel(), -1)
    highest = blocks.amax(1) / state.qmap[-1]
    if state.signed:
        highest = torch.maximum(highest, blocks.amin(1) / state.qmap[0])
    done = torch.zeros_like(highest, dtype=torch.bool)
    for scale in (highest, highest.nextafter(torch.zeros_like(highest)), highest.nextafter(2 * highest)):
        codes = quantize_8bit_with_qmap((blocks / scale.clamp(1e-12)[:, None]).flatten(), state.qmap).view_as(blocks)
        exact = (dequant_with_qmap(codes, state.qmap, scale).view_as(blocks) == blocks).all(1)
        takes = exact & ~done if scale is not highest else torch.ones_like(done)
        state.scale[takes] = scale[takes]
        state.codes.view_as(blocks)[takes] = codes[takes]
        done |= exact
