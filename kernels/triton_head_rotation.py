"""`head_rotation` in Triton: a program rotates a block of tokens of one head, by tables or by angles that it computes.

A frequency's gradient is a sum over all tokens: each program writes its partial sum, and these are added in a fixed order,
so that runs repeat to the last bit.

Names as in `triton_rows.py`. Shape suffixes: B batch, L tokens, K heads, H head dim, F = H/2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from farsight.kernels.triton_rows import Rows, contiguous_rows, load_rows, padded, rows_of, store_rows

BLOCK_ELEMENTS = 2048
"""Tokens times frequencies of a program: eight per thread."""
NUM_WARPS = 8


@triton.jit
def _angles(
    p_positions,
    p_inv_freq,
    p_factor,
    positions_by_batch,
    batch,
    head,
    first,
    tokens,
    F: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Positions [L], and cosines and sines [L, F] times the attention factor, all fp32."""
    o_l, o_f = first + tl.arange(0, BLOCK_L), tl.arange(0, padded(F))
    b_position = tl.load(p_positions + batch * positions_by_batch + o_l, mask=o_l < tokens, other=0).to(tl.float32)
    b_freq = tl.load(p_inv_freq + head * F + o_f, mask=o_f < F, other=0.0)
    factor = tl.load(p_factor)
    b_angle = b_position[:, None] * b_freq[None, :]
    return b_position, tl.cos(b_angle) * factor, tl.sin(b_angle) * factor


@triton.jit
def _halves(x, F: tl.constexpr):
    """The rows of the first F dimensions, and of the other F."""
    return x, Rows(x.p + F, x.by_token, x.count)


@triton.jit
def _load_halves(x, first, F: tl.constexpr, BLOCK_L: tl.constexpr):
    x_1, x_2 = _halves(x, F)
    b_1, b_2 = load_rows(x_1, first, BLOCK_L, F), load_rows(x_2, first, BLOCK_L, F)
    return b_1.to(tl.float32), b_2.to(tl.float32)


@triton.jit
def _rotate(x, y, b_cos, b_sin, first, F: tl.constexpr, BLOCK_L: tl.constexpr):
    """Writes x, rotated, to y; returns both halves. The explicit fma rounds the same product before the sum as PyTorch's addcmul."""
    b_1, b_2 = _load_halves(x, first, F, BLOCK_L)
    b_y1, b_y2 = tl.fma(b_2, -b_sin, b_1 * b_cos), tl.fma(b_1, b_sin, b_2 * b_cos)
    y_1, y_2 = _halves(y, F)
    store_rows(y_1, b_y1, first, BLOCK_L, F)
    store_rows(y_2, b_y2, first, BLOCK_L, F)
    return b_y1, b_y2


@triton.jit
def rotate_kernel(
    p_x,
    p_y,
    p_positions,
    p_inv_freq,
    p_factor,
    x_strides,
    y_strides,
    positions_by_batch,
    tokens,
    F: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """One block of tokens of one head of one batch row. Grid: (blocks of tokens, K, B); x and y with stride 1 in H."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first = tl.program_id(0) * BLOCK_L
    _, b_cos, b_sin = _angles(
        p_positions, p_inv_freq, p_factor, positions_by_batch, batch, head, first, tokens, F, BLOCK_L
    )
    x, y = rows_of(p_x, x_strides, batch, head, tokens), rows_of(p_y, y_strides, batch, head, tokens)
    _rotate(x, y, b_cos, b_sin, first, F, BLOCK_L)


@triton.jit
def rotate_by_tables_kernel(
    p_x,
    p_y,
    p_cos,
    p_sin,
    x_strides,
    y_strides,
    tables_by_batch,
    tokens,
    F: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """The same by tables [B or 1, L, H], contiguous but for B, whose second halves have the sign that the angles' sines have."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first = tl.program_id(0) * BLOCK_L
    o_tables = batch * tables_by_batch + F
    b_cos = load_rows(Rows(p_cos + o_tables, 2 * F, tokens), first, BLOCK_L, F)
    b_sin = load_rows(Rows(p_sin + o_tables, 2 * F, tokens), first, BLOCK_L, F)
    x, y = rows_of(p_x, x_strides, batch, head, tokens), rows_of(p_y, y_strides, batch, head, tokens)
    _rotate(x, y, b_cos, b_sin, first, F, BLOCK_L)


@triton.jit
def rotate_backward_kernel(
    p_dy,
    p_x,
    p_dx,
    p_parts,
    p_positions,
    p_inv_freq,
    p_factor,
    dy_strides,
    x_strides,
    dx_strides,
    positions_by_batch,
    tokens,
    F: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """The gradient rotated back and, unless x is None, this program's part of the gradient of its head's frequencies.

    Grid and strides as in `rotate_kernel`; parts [blocks of tokens · B, K, F], fp32.
    """
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    first = tl.program_id(0) * BLOCK_L
    b_position, b_cos, b_sin = _angles(
        p_positions, p_inv_freq, p_factor, positions_by_batch, batch, head, first, tokens, F, BLOCK_L
    )
    dy, dx = rows_of(p_dy, dy_strides, batch, head, tokens), rows_of(p_dx, dx_strides, batch, head, tokens)
    b_dx1, b_dx2 = _rotate(dy, dx, b_cos, -b_sin, first, F, BLOCK_L)
    if p_x is not None:
        b_x1, b_x2 = _load_halves(rows_of(p_x, x_strides, batch, head, tokens), first, F, BLOCK_L)
        b_part = tl.sum(b_position[:, None] * (b_x1 * b_dx2 - b_x2 * b_dx1), 0)
        row = (batch * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(1) + head
        o_f = tl.arange(0, padded(F))
        tl.store(p_parts + row * F + o_f, b_part, mask=o_f < F)


def block_sizes(head_dim: int) -> dict[str, int]:
    """Frequencies of a head and tokens of a program, as the kernels' constants."""
    return {"F": head_dim // 2, "BLOCK_L": max(1, BLOCK_ELEMENTS // padded(head_dim // 2))}


@torch.library.custom_op("farsight::triton_rotate_heads", mutates_args=())
def triton_rotate_heads(x: Tensor, positions: Tensor, inv_freq: Tensor, attention_factor: Tensor) -> Tensor:
    """The forward pass of `rotate_heads`, without autograd: x [B, L, K, H] rotated, in x's dtype."""
    x, y = contiguous_rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    blocks = block_sizes(x.shape[-1])
    rotate_kernel[_grid(x, blocks)](
        x, y, positions.contiguous(), inv_freq.contiguous(), attention_factor, x.stride()[:3], y.stride()[:3],
        _by_batch(positions), x.shape[1], **blocks, num_warps=NUM_WARPS,
    )  # fmt: skip
    return y


@triton_rotate_heads.register_fake
def _(x, positions, inv_freq, attention_factor):
    return x.new_empty(x.shape)


@torch.library.custom_op("farsight::triton_rotate_by_tables", mutates_args=())
def triton_rotate_by_tables(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`head_rotation.rotate_by_tables`, without autograd: x [B, L, K, H] rotated, in x's dtype."""
    x, y = contiguous_rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    cos, sin, blocks = cos.contiguous(), sin.contiguous(), block_sizes(x.shape[-1])
    rotate_by_tables_kernel[_grid(x, blocks)](
        x, y, cos, sin, x.stride()[:3], y.stride()[:3], 0 if len(cos) == 1 else cos.stride(0), x.shape[1], **blocks,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return y


@triton_rotate_by_tables.register_fake
def _(x, cos, sin):
    return x.new_empty(x.shape)


@torch.library.custom_op("farsight::triton_rotate_heads_backward", mutates_args=())
def triton_rotate_heads_backward(
    dy: Tensor, x: Tensor | None, positions: Tensor, inv_freq: Tensor, attention_factor: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of x, in dy's dtype, and the partial sums of that of the frequencies, fp32 [parts, K, F].

    Without x there are no parts: [0, K, F].
    """
    dy, dx = contiguous_rows(dy), torch.empty(dy.shape, dtype=dy.dtype, device=dy.device)
    x_rows, blocks = None if x is None else contiguous_rows(x), block_sizes(dy.shape[-1])
    parts = torch.empty(_parts(dy, x, blocks), dtype=torch.float32, device=dy.device)
    rotate_backward_kernel[_grid(dy, blocks)](
        dy, x_rows, dx, parts, positions.contiguous(), inv_freq.contiguous(), attention_factor,
        dy.stride()[:3], None if x_rows is None else x_rows.stride()[:3], dx.stride()[:3], _by_batch(positions), dy.shape[1],
        **blocks, num_warps=NUM_WARPS,
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
