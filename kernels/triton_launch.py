"""Launching Triton kernels: shared by the kernels of attention and of rotation."""

from typing import Any

import triton
from torch import Tensor


def interpreted(kernel: Any) -> bool:
    """True for a kernel that Triton interprets on the CPU, as tests have it do with TRITON_INTERPRET=1."""
    return not isinstance(kernel, triton.runtime.JITFunction)


def contiguous_rows(x: Tensor) -> Tensor:
    """x [B, L, heads, H] with each head's row contiguous, which is all that the kernels require."""
    return x if x.stride(-1) == 1 else x.contiguous()
