"""PyTorch's variable-length attention, which is FlashAttention, as two functions: forward with log-sum-exp, and backward.

Shape suffixes: B batch, L tokens, N query heads, K key-value heads, H head dim, T tokens of all rows.
"""

import importlib.util
import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from farsight.kernels.scoped_attention.documents import Sequences
from farsight.kernels.scoped_attention.windows import Heads

DTYPES = (torch.bfloat16, torch.float16)


@cache
def dense_kernel(device: torch.device) -> str | None:
    """ "FA3" where it is installed and the GPU is of its architecture, else "FA2"; None if this PyTorch's has no windows.

    Makes FlashAttention 3 the one that PyTorch uses, unless another was chosen.
    """
    if not _takes("window_size"):
        return None
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "FA2"
    from torch.nn import attention

    if attention.current_flash_attention_impl() is None and importlib.util.find_spec("flash_attn_interface"):
        attention.activate_flash_attention_impl("FA3")
    return "FA2" if attention.current_flash_attention_impl() is None else "FA3"


@cache
def _takes(option: str) -> bool:
    """True if this PyTorch's `varlen_attn` has an option: enable_gqa came after window_size, and groups needed none before."""
    return option in inspect.signature(varlen_attn).parameters


def varlen_forward(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sequences: Sequences, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention within documents: output [T, N, H] and log-sum-exp [N, T], fp32. The last query is at the last key.

    Args:
        window: number of tokens before its own that a query sees; -1 is no limit.
    """
    grouped: dict[str, Any] = {"enable_gqa": True} if _takes("enable_gqa") else {}
    aux = AuxRequest(lse=True)
    found = varlen_attn(
        q_TNH, k_TKH, v_TKH, *sequences, return_aux=aux, scale=scale, window_size=(window, 0), **grouped
    )  # fmt: skip
    o_TNH, lse_NT = found
    return o_TNH, lse_NT


def varlen_backward(
    do_TNH: Tensor,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    o_TNH: Tensor,
    lse_NT: Tensor,
    sequences: Sequences,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; the operator that `varlen_attn`'s own backward pass calls, without dropout."""
    state, unused = torch.zeros(2, dtype=torch.uint64, device=q_TNH.device), torch.empty(0, device=q_TNH.device)
    return torch.ops.aten._flash_attention_backward(
        do_TNH, q_TNH, k_TKH, v_TKH, o_TNH, lse_NT, *sequences, 0.0, window < 0, state, unused,
        scale=scale, window_size_left=window, window_size_right=0,
    )  # fmt: skip


def rows_of_all(x_BLNH: Tensor, heads: Heads) -> Tensor:
    """Some heads of all rows one after the other, contiguous in the head dim."""
    x = x_BLNH[:, :, heads].flatten(0, 1)
    return x if x.stride(-1) == 1 else x.contiguous()
