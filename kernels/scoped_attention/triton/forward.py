"""The forward pass of scoped attention in Triton: online softmax over the blocks of keys that a head's band touches.

One program computes a block of queries of one head. Its keys fall into three runs of blocks: those that the scope or a
document cuts, those that every query sees, and those on the diagonal. Only the first and the last run are masked, and
blocks outside are never loaded.

Names as in `blocks.py`.
"""

import triton
import triton.language as tl

from farsight.kernels.scoped_attention.triton.blocks import (
    key_runs,
    load_slope,
    nothing_seen,
    query_block,
    query_scores,
    see,
)
from farsight.kernels.triton_rows import load_rows, rows_of, store_rows


@triton.jit
def forward_kernel(
    p_q,
    p_k,
    p_v,
    p_o,
    p_lse,
    p_scopes,
    p_order,
    p_starts,
    p_slopes,
    q_strides,
    k_strides,
    v_strides,
    o_strides,
    queries,
    q_offset,
    heads,
    scale_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Output and log-sum-exp of one block of queries of one head of one batch row.

    Arguments: q and o [B, Lq, N, H], k and v [B, Lk, K, H], each with stride 1 in H and its strides of the other dimensions;
    lse [B, N, Lq]; scopes and slopes [N]; order [N], heads from wide to narrow; starts [B, Lk]. Grid: (blocks of queries, B,
    N).
    """
    # The grid's last dimension varies slowest, so the widest heads start first, and within a head the rows with most keys.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    batch = tl.program_id(1).to(tl.int64)
    head = tl.load(p_order + tl.program_id(2)).to(tl.int64)
    o_row = first_row + tl.arange(0, BLOCK_M)
    p_start = None if p_starts is None else p_starts + batch * (queries + q_offset) + q_offset
    seen = query_block(p_scopes, p_start, head, first_row, queries, q_offset, BLOCK_M)
    slope_log2 = None if p_slopes is None else load_slope(p_slopes, head)
    b_q = load_rows(rows_of(p_q, q_strides, batch, head, queries), first_row, BLOCK_M, HEAD_DIM)
    k = rows_of(p_k, k_strides, batch, head // GROUP, queries + q_offset)
    v = rows_of(p_v, v_strides, batch, head // GROUP, queries + q_offset)
    bounds = key_runs(seen, k.count, BLOCK_N)
    b_acc, b_sum, b_max = nothing_seen(b_q)
    for run in tl.static_range(3):
        for first in tl.range(bounds[run], bounds[run + 1], BLOCK_N):
            b_k = load_rows(k, first, BLOCK_N, HEAD_DIM, run == 1)
            b_s = query_scores(b_q, b_k, seen, first + tl.arange(0, BLOCK_N), slope_log2, scale_log2, run == 1)
            b_acc, b_sum, b_max = see(b_acc, b_sum, b_max, b_s, v, first, BLOCK_N, HEAD_DIM, run == 1)

    m_row = o_row < queries
    b_sum = tl.where(m_row, b_sum, 1.0)  # rows past the end may have seen nothing
    store_rows(rows_of(p_o, o_strides, batch, head, queries), b_acc / b_sum[:, None], first_row, BLOCK_M, HEAD_DIM)
    b_lse = (b_max + tl.log2(b_sum)) * 0.6931471805599453
    tl.store(p_lse + (batch * heads + head) * queries + o_row, b_lse, mask=m_row)
