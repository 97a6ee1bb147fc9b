"""Parts shared by all Triton kernels: whether they are interpreted, and the addresses of a head's rows in memory.

Names: b_ block, p_ pointer, o_ offset, m_ mask.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""True where Triton interprets kernels on the CPU, as tests have it do with TRITON_INTERPRET=1."""


def check_runs(x: Tensor, cpu_backend: str) -> None:
    """Raises ValueError, naming the backend to use on a CPU, unless kernels support tensors of this dtype and device."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f'backend "triton" does not take {x.dtype}: use bfloat16, float16 or float32, or "{cpu_backend}"'
        )
    if x.device.type == "cpu" and not INTERPRETED:
        raise ValueError(f'backend "triton" needs a GPU: use "{cpu_backend}" on a CPU')


def contiguous_rows(x: Tensor) -> Tensor:
    """x [..., H] with each head's row contiguous, which is all that the kernels require."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.constexpr_function
def padded(size: int) -> int:
    """Rows or columns of a block for a head dim or a group of heads: a power of two, at least what a product of blocks takes."""
    return max(16, triton.next_power_of_2(size))


def described(x_BLNH: Tensor, rows: int) -> TensorDescriptor | Tensor:
    """x as a tensor descriptor of blocks of a head's rows, or x itself if its address or a stride is no multiple of 16 bytes.

    A GPU's tensor memory accelerator then copies a block at a time; the kernel spends no registers on addresses and masks.
    """
    strides = x_BLNH.stride()[:3]
    if x_BLNH.data_ptr() % 16 or any(stride <= 0 or stride * x_BLNH.itemsize % 16 for stride in strides):
        return x_BLNH
    # The descriptor's order is [B, N, L, H], so that a block [1, 1, rows, H] is a matrix.
    return TensorDescriptor.from_tensor(x_BLNH.transpose(1, 2), [1, 1, rows, padded(x_BLNH.shape[-1])])


class Rows(NamedTuple):
    """The rows of one head, each contiguous: pointer to the first, elements from one to the next, and their count."""

    p: Any
    by_token: Any
    count: Any


class DescribedRows(NamedTuple):
    """The rows of one head of a tensor descriptor, and their count."""

    p: Any
    batch: Any
    head: Any
    count: Any


@triton.jit
def rows_of(p, strides, batch, head, count):
    """The rows of one head of x [B, L, heads, H], from the strides of B, L and heads; p points to x or describes it."""
    if isinstance(p, tl.core.tensor_descriptor_base):
        return DescribedRows(p, batch.to(tl.int32), tl.cast(head, tl.int32), count)
    else:
        return Rows(p + (batch * strides[0] + head * strides[2]), strides[1], count)


@triton.jit
def _row_pointers(x, first, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr):
    o_n = tl.arange(0, BLOCK)
    o_h = tl.arange(0, padded(HEAD_DIM))
    # The block's offset has 64 bits, since a million tokens have more elements than 32 bits can count; offsets within the
    # block fit in 32 bits, which take half the registers.
    p_block = x.p + tl.cast(first, tl.int64) * x.by_token + o_n[:, None] * x.by_token + o_h[None, :]
    return p_block, (first + o_n < x.count)[:, None], (o_h < HEAD_DIM)[None, :]


@triton.jit
def load_rows(x, first, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, WHOLE: tl.constexpr = False):
    """Rows `first` to `first + BLOCK` of a head, zero past the last and HEAD_DIM; WHOLE promises that none is past the last."""
    if isinstance(x.p, tl.core.tensor_descriptor_base):
        return x.p.load([x.batch, x.head, first, 0]).reshape(BLOCK, padded(HEAD_DIM))
    else:
        p_block, m_row, m_dim = _row_pointers(x, first, BLOCK, HEAD_DIM)
        if not WHOLE:
            return tl.load(p_block, mask=m_row & m_dim, other=0.0)
        elif padded(HEAD_DIM) == HEAD_DIM:
            return tl.load(p_block)
        else:
            return tl.load(p_block, mask=m_dim, other=0.0)


@triton.jit
def store_rows(x, b, first, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Writes rows `first` to `first + BLOCK` of a head, except those past the last."""
    p_block, m_row, m_dim = _row_pointers(x, first, BLOCK, HEAD_DIM)
    tl.store(p_block, b.to(x.p.dtype.element_ty), mask=m_row & m_dim)
