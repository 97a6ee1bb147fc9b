"""`head_rotation.rotate_heads` in Triton: a program rotates a block of tokens of one head, and computes its own angles.

A frequency's gradient is a sum over all tokens: each program writes its partial sum, and these are added in a fixed order,
so that runs repeat to the last bit.

Names: b_ block, p_ pointer, o_ offset, m_ mask. Shape suffixes: B batch, L tokens, K heads, H head dim, F = H/2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from farsight.kernels.triton_launch import contiguous_rows, interpreted

BLOCK_ELEMENTS = 2048
"""Tokens times frequencies of a program: eight per thread."""
NUM_WARPS = 8


@triton.jit
def _angles(p_positions, p_inv_freq, p_factor, head, o_l, o_f, m_l, F: tl.constexpr, BLOCK_F: tl.constexpr):
    """Positions [L], and cosines and sines [L, F] times the attention factor, all fp32."""
    b_position = tl.load(p_positions + o_l, mask=m_l, other=0).to(tl.float32)
    b_freq = tl.load(p_inv_freq + head * F + o_f, mask=o_f < F, other=0.0)
    factor = tl.load(p_factor)
    b_angle = b_position[:, None] * b_freq[None, :]
    return b_position, tl.cos(b_angle) * factor, tl.sin(b_angle) * factor


@triton.jit
def _rotated(b_1, b_2, b_cos, b_sin):
    """Both halves, rotated. The explicit fma rounds the same product before the sum as PyTorch's addcmul."""
    return tl.fma(b_2, -b_sin, b_1 * b_cos), tl.fma(b_1, b_sin, b_2 * b_cos)


@triton.jit
def rotate_kernel(
    p_x,
    p_y,
    p_positions,
    p_inv_freq,
    p_factor,
    x_by_batch,
    x_by_token,
    x_by_head,
    y_by_batch,
    y_by_token,
    y_by_head,
    positions_by_batch,
    tokens,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """One block of tokens of one head of one batch row. Grid: (blocks of tokens, K, B); x and y with stride 1 in H."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_l = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    o_f = tl.arange(0, BLOCK_F)
    m_l = o_l < tokens
    m_x = m_l[:, None] & (o_f < F)[None, :]
    p_positions += batch * positions_by_batch
    _, b_cos, b_sin = _angles(p_positions, p_inv_freq, p_factor, head, o_l, o_f, m_l, F, BLOCK_F)
    p_x += batch * x_by_batch + head * x_by_head + o_l.to(tl.int64)[:, None] * x_by_token + o_f[None, :]
    b_x1 = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
    b_x2 = tl.load(p_x + F, mask=m_x, other=0.0).to(tl.float32)
    b_y1, b_y2 = _rotated(b_x1, b_x2, b_cos, b_sin)
    p_y += batch * y_by_batch + head * y_by_head + o_l.to(tl.int64)[:, None] * y_by_token + o_f[None, :]
    tl.store(p_y, b_y1.to(p_y.dtype.element_ty), mask=m_x)
    tl.store(p_y + F, b_y2.to(p_y.dtype.element_ty), mask=m_x)


@triton.jit
def rotate_backward_kernel(
    p_dy,
    p_x,
    p_dx,
    p_parts,
    p_positions,
    p_inv_freq,
    p_factor,
    dy_by_batch,
    dy_by_token,
    dy_by_head,
    x_by_batch,
    x_by_token,
    x_by_head,
    dx_by_batch,
    dx_by_token,
    dx_by_head,
    positions_by_batch,
    tokens,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BY_FREQUENCY: tl.constexpr,
):
    """The gradient rotated back and, with BY_FREQUENCY, this program's part of the gradient of its head's frequencies.

    Grid and strides as in `rotate_kernel`; parts [blocks of tokens · B, K, F], fp32.
    """
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_l = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    o_f = tl.arange(0, BLOCK_F)
    m_l = o_l < tokens
    m_x = m_l[:, None] & (o_f < F)[None, :]
    p_positions += batch * positions_by_batch
    b_position, b_cos, b_sin = _angles(p_positions, p_inv_freq, p_factor, head, o_l, o_f, m_l, F, BLOCK_F)
    p_dy += batch * dy_by_batch + head * dy_by_head + o_l.to(tl.int64)[:, None] * dy_by_token + o_f[None, :]
    b_dy1 = tl.load(p_dy, mask=m_x, other=0.0).to(tl.float32)
    b_dy2 = tl.load(p_dy + F, mask=m_x, other=0.0).to(tl.float32)
    b_dx1, b_dx2 = _rotated(b_dy1, b_dy2, b_cos, -b_sin)
    p_dx += batch * dx_by_batch + head * dx_by_head + o_l.to(tl.int64)[:, None] * dx_by_token + o_f[None, :]
    tl.store(p_dx, b_dx1.to(p_dx.dtype.element_ty), mask=m_x)
    tl.store(p_dx + F, b_dx2.to(p_dx.dtype.element_ty), mask=m_x)
    if BY_FREQUENCY:
        p_x += batch * x_by_batch + head * x_by_head + o_l.to(tl.int64)[:, None] * x_by_token + o_f[None, :]
        b_x1 = tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
        b_x2 = tl.load(p_x + F, mask=m_x, other=0.0).to(tl.float32)
        b_part = tl.sum(b_position[:, None] * (b_x1 * b_dx2 - b_x2 * b_dx1), 0)
        row = (batch * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(1) + head
        tl.store(p_parts + row * F + o_f, b_part, mask=o_f < F)


INTERPRETED = interpreted(rotate_kernel)


def block_sizes(head_dim: int) -> dict[str, int]:
    """Block sizes of a program for a head dim, as the kernels' constants."""
    block_f = triton.next_power_of_2(head_dim // 2)
    return {"F": head_dim // 2, "BLOCK_F": block_f, "BLOCK_L": max(1, BLOCK_ELEMENTS // block_f)}


def check_runs(x: Tensor) -> None:
    """Raises ValueError unless the kernels support tensors of this dtype and device."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f'backend "triton" does not take {x.dtype}: use bfloat16, float16 or float32, or "torch"')
    if x.device.type == "cpu" and not INTERPRETED:
        raise ValueError('backend "triton" needs a GPU: use "torch" on a CPU')


@torch.library.custom_op("farsight::triton_rotate_heads", mutates_args=())
def triton_rotate_heads(x: Tensor, positions: Tensor, inv_freq: Tensor, attention_factor: Tensor) -> Tensor:
    """The forward pass of `rotate_heads`, without autograd: x [B, L, K, H] rotated, in x's dtype."""
    x, y = contiguous_rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    blocks = block_sizes(x.shape[-1])
    rotate_kernel[_grid(x, blocks)](
        x, y, positions.contiguous(), inv_freq.contiguous(), attention_factor, *x.stride()[:3], *y.stride()[:3],
        _by_batch(positions), x.shape[1], **blocks, num_warps=NUM_WARPS,
    )  # fmt: skip
    return y


@triton_rotate_heads.register_fake
def _(x, positions, inv_freq, attention_factor):
    return x.new_empty(x.shape)


@torch.library.custom_op("farsight::triton_rotate_heads_backward", mutates_args=())
def triton_rotate_heads_backward(
    dy: Tensor, x: Tensor | None, positions: Tensor, inv_freq: Tensor, attention_factor: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of x, in dy's dtype, and the partial sums of that of the frequencies, fp32 [parts, K, F].

    Without x there are no parts: [0, K, F].
    """
    dy, dx = contiguous_rows(dy), torch.empty(dy.shape, dtype=dy.dtype, device=dy.device)
    x_rows, blocks = dy if x is None else contiguous_rows(x), block_sizes(dy.shape[-1])
    parts = torch.empty(_parts(dy, x, blocks), dtype=torch.float32, device=dy.device)
    rotate_backward_kernel[_grid(dy, blocks)](
        dy, x_rows, dx, parts, positions.contiguous(), inv_freq.contiguous(), attention_factor,
        *dy.stride()[:3], *x_rows.stride()[:3], *dx.stride()[:3], _by_batch(positions), dy.shape[1],
        **blocks, BY_FREQUENCY=x is not None, num_warps=NUM_WARPS,
    )  # fmt: skip
    return dx, parts


@triton_rotate_heads_backward.register_fake
def _(dy, x, positions, inv_freq, attention_factor):
    parts = _parts(dy, x, block_sizes(dy.shape[-1]))
    return dy.new_empty(dy.shape), dy.new_empty(parts, dtype=torch.float32)


def _grid(x: Tensor, blocks: dict[str, int]) -> tuple[int, int, int]:
    return triton.cdiv(x.shape[1], blocks["BLOCK_L"]), x.shape[2], x.shape[0]


def _parts(dy: Tensor, x: Tensor | None, blocks: dict[str, int]) -> tuple[int, int, int]:
    count, heads, batch = _grid(dy, blocks)
    return 0 if x is None else batch * count, heads, blocks["F"]


def _by_batch(positions: Tensor) -> int:
    """Stride between the positions of two rows; 0 if all rows share them."""
    return 0 if positions.shape[0] == 1 else positions.shape[1]
