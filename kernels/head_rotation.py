"""Rotation of queries or keys: by tables, and with separate frequencies for each head, differentiable in those frequencies.

Plain RoPE shares tables of cosines and sines among all heads and layers that rotate alike. With per-head frequencies the
tables would be [L, K, H] for each layer: the Triton kernels compute them where they are used, and never store a table.

The pair (x1, x2) of half-split dimensions rotates by angle = position · frequency. The gradient dx is the result's gradient
rotated back, and that of the angle is the cross product x1·dx2 − x2·dx1; both are written out here.

Shape suffixes: B batch, L tokens, K heads, H head dim, F = H/2 frequencies.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from farsight.kernels.scoped_attention.choice import TRIAL_TOLERANCE, in_a_thread

Backend = Literal["auto", "torch", "triton"]


def rotate_by_tables(x_BLNH: Tensor, cos_BLH: Tensor, sin_BLH: Tensor) -> Tensor:
    """`model.position.rope.rotate` with tables that all heads share, as one Triton kernel: on GPUs, without a gradient.

    The kernel is checked once per process against PyTorch operators.

    Raises:
        RuntimeError: it gives wrong results on this machine.
    """
    from farsight.kernels.triton_head_rotation import triton_rotate_by_tables

    try_triton(x_BLNH.device.type, str(x_BLNH.dtype), x_BLNH.shape[-1], by_tables=True)
    return triton_rotate_by_tables(x_BLNH, cos_BLH, sin_BLH)


def rotate_heads(
    x_BLKH: Tensor,
    positions_BL: Tensor,
    inv_freq_KF: Tensor,
    attention_factor: Tensor,
    backend: Backend = "auto",
) -> Tensor:
    """Rotates pair i of head k at position m by the angle m · inv_freq[k, i].

    If all rows of `inv_freq_KF` are equal, the result equals table-based RoPE to the last bit on a CPU: products are fp32
    (fp64 for fp64 inputs), in the same order.

    Args:
        x_BLKH: queries or keys; bf16, fp16, fp32 or fp64.
        positions_BL: integers from 0, exact up to 2^24; [1, L] if all sequences share their positions.
        inv_freq_KF: radians per token of each head, fp32 (fp64 for fp64 inputs). Fewer than H/2 rotate the head's first
            dimensions and leave the others.
        attention_factor: multiplies cosines and sines (YaRN's temperature); a 0-dim tensor of `inv_freq_KF`'s dtype,
            because torch.compile would compile a program for each Python number.
        backend: "triton" (GPUs), "torch" (any device), or "auto": "triton" on CUDA devices, checked against "torch" once
            per process, and "torch" elsewhere.

    Returns:
        The rotated heads, in x's shape and dtype. Differentiable in x and `inv_freq_KF`; the latter's gradient is summed in
        fp32 in a fixed order.

    Raises:
        ValueError: shapes that do not fit, or a backend that can't run here.
        RuntimeError: the Triton kernels give wrong results on this machine.
    """
    (B, L, K, H), positions, frequencies = x_BLKH.shape, tuple(positions_BL.shape), tuple(inv_freq_KF.shape)
    if H % 2 or len(frequencies) != 2 or frequencies[0] != K or not 0 < frequencies[1] <= H // 2:
        raise ValueError(
            f"x_BLKH is {[B, L, K, H]} and inv_freq_KF {list(frequencies)}: pass frequencies [heads, head dim / 2], or fewer"
        )
    if (rotated := 2 * frequencies[1]) < H:
        first = rotate_heads(x_BLKH[..., :rotated], positions_BL, inv_freq_KF, attention_factor, backend)
        return torch.cat((first, x_BLKH[..., rotated:]), dim=-1)
    if positions not in ((B, L), (1, L)):
        raise ValueError(f"x_BLKH is {[B, L, K, H]} and positions_BL {list(positions)}: pass [{B}, {L}] or [1, {L}]")
    chosen = backend if backend != "auto" else "triton" if x_BLKH.is_cuda else "torch"
    if chosen == "triton":
        from farsight.kernels import triton_head_rotation, triton_rows  # noqa: F401  registers the operators

        triton_rows.check_runs(x_BLKH, "torch")
        if backend == "auto":
            try_triton(x_BLKH.device.type, str(x_BLKH.dtype), H)
    return _RotateHeads.apply(x_BLKH, positions_BL, inv_freq_KF, attention_factor, chosen == "triton")


class _RotateHeads(torch.autograd.Function):
    """Saves x only if the frequencies need a gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, positions: Tensor, inv_freq: Tensor, attention_factor: Tensor, in_triton: bool
    ) -> Tensor:
        ctx.in_triton = in_triton
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None, positions, inv_freq, attention_factor)
        if in_triton:
            return torch.ops.farsight.triton_rotate_heads(x, positions, inv_freq, attention_factor)
        y = _rotated(x, *_tables(x, positions, inv_freq, attention_factor))
        return y if y.dtype == x.dtype else y.to(x.dtype)  # not `to` alone, see below

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, positions, inv_freq, attention_factor = ctx.saved_tensors
        if ctx.in_triton:
            dx, parts = torch.ops.farsight.triton_rotate_heads_backward(dy, x, positions, inv_freq, attention_factor)
            return dx, None, None if x is None else parts.sum(dim=0), None, None
        cos, sin = _tables(dy, positions, inv_freq, attention_factor)
        dx = _rotated(dy, cos, -sin)
        if x is None:
            return dx.to(dy.dtype), None, None, None, None
        (x1, x2), (dx1, dx2) = x.to(dx.dtype).chunk(2, dim=-1), dx.chunk(2, dim=-1)
        by_angle = x1 * dx2 - x2 * dx1
        by_frequency = (positions[..., None, None].to(dx.dtype) * by_angle).sum(dim=(0, 1))
        return dx.to(dy.dtype), None, by_frequency, None, None


def _tables(x: Tensor, positions: Tensor, inv_freq: Tensor, attention_factor: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [B or 1, L, K, H] each, as in `model.position.rope.rope_tables`: sines negated in the first half."""
    wide = torch.promote_types(x.dtype, torch.float32)
    angles = positions[..., None, None].to(wide) * inv_freq
    cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation, in the tables' dtype, by the operations of `model.position.rope.rotate` for bit-identical results."""
    x = x.to(cos.dtype)
    # Not in place: compiled by PyTorch 2.11, a function loses its gradient if its last operator returns a tensor it was given.
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


@torch.compiler.assume_constant_result
def try_triton(device_type: str, dtype: str, head_dim: int, by_tables: bool = False) -> bool:
    """Compares the Triton kernels with the PyTorch operators, once per process for each dtype and head dim.

    Returns:
        True, since a function called while compiling has to return something.

    Raises:
        RuntimeError: they differ by more than rounding.
    """
    return _tried(_tables_error if by_tables else _error, device_type, dtype, head_dim)


@cache
def _tried(error_of: Callable[..., float], device_type: str, dtype: str, head_dim: int) -> bool:
    error = in_a_thread(error_of, device_type, dtype, head_dim)
    if not error <= TRIAL_TOLERANCE[dtype]:
        raise RuntimeError(
            f"the Triton kernels that rotate heads are off by {error:.1e} of the largest value for {dtype}, head dim "
            f"{head_dim}, on this machine, where {TRIAL_TOLERANCE[dtype]:.0e} is expected: report this with the output of "
            "python -m torch.utils.collect_env"
        )
    return True


def _error(device_type: str, dtype: str, head_dim: int) -> float:
    """Largest error of the result and its gradients, relative to the largest value."""
    x, dy, frequencies, positions = _trial_inputs(device_type, dtype, head_dim)
    results = []
    backends: tuple[Backend, ...] = ("triton", "torch")
    for backend in backends:
        leaves = [x.detach().requires_grad_(), frequencies.detach().requires_grad_()]
        y = rotate_heads(leaves[0], positions, leaves[1], frequencies.new_full((), 1.3), backend)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
    errors = [(a.float() - b.float()).abs().max() / b.abs().max() for a, b in zip(*results, strict=True)]
    return float(torch.stack(errors).max())  # NaN if any is


@torch.no_grad()
def _tables_error(device_type: str, dtype: str, head_dim: int) -> float:
    """The same for the rotation by tables, which has no gradients."""
    x, _, frequencies, positions = _trial_inputs(device_type, dtype, head_dim)
    cos, sin = _tables(x, positions, frequencies[:1], frequencies.new_full((), 1.3))
    found = torch.ops.farsight.triton_rotate_by_tables(x, cos[:, :, 0], sin[:, :, 0])
    exact = _rotated(x, cos, sin)
    return float((found.float() - exact).abs().max() / exact.abs().max())


def _trial_inputs(device_type: str, dtype: str, head_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, the result's gradient, frequencies and positions."""
    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype.removeprefix("torch."))
    x, dy = (torch.randn(2, 300, 3, head_dim, generator=generator).to(device_type, kind) for _ in range(2))
    frequencies = torch.rand(3, head_dim // 2, generator=generator).to(device_type)
    positions = torch.randint(0, 1000, (2, 300), generator=generator).to(device_type)
    return x, dy, frequencies, positions
