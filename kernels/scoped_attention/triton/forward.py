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
    query_segment,
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
    p_segments,
    q_strides,
    k_strides,
    v_strides,
    o_strides,
    queries,
    q_offset,
    tokens,
    pieces,
    heads,
    scale_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Output and log-sum-exp of one block of queries of one head of one batch row.

    Arguments: q and o [B, Lq, N, H], k and v [B, Lk, K, H], each with stride 1 in H and its strides of the other dimensions;
    lse [B, N, Lq]; scopes and slopes [N]; order, heads from wide to narrow; starts [B, tokens]. Grid: (blocks of queries, B,
    heads of the order).

    With a table of segments [pieces · K, 5] k and v are [B, rows, 1, H], and each piece has as many blocks as the longest.
    """
    # The grid's last dimension varies slowest, so the widest heads start first, and within a head the rows with most keys.
    batch = tl.program_id(1).to(tl.int64)
    head = tl.load(p_order + tl.program_id(2)).to(tl.int64)
    segment, first_row = query_segment(p_segments, pieces, head // GROUP, heads // GROUP, queries, q_offset, BLOCK_M)
    if p_segments is not None:  # noqa: SIM102  known when the kernel is compiled
        if first_row >= segment.end_query:
            return
    o_row = first_row + tl.arange(0, BLOCK_M)
    p_starts = None if p_starts is None else p_starts + batch * tokens
    seen = query_block(p_scopes, p_starts, head, first_row, segment, BLOCK_M)
    slope_log2 = None if p_slopes is None else load_slope(p_slopes, head)
    b_q = load_rows(rows_of(p_q, q_strides, batch, head, segment.end_query), first_row, BLOCK_M, HEAD_DIM)
    k = rows_of(p_k, k_strides, batch, segment.kv_head, segment.end_key)
    v = rows_of(p_v, v_strides, batch, segment.kv_head, segment.end_key)
    bounds = key_runs(seen, segment, BLOCK_N)
    b_acc, b_sum, b_max = nothing_seen(b_q)
    for run in tl.static_range(3):
        for first in tl.range(bounds[run], bounds[run + 1], BLOCK_N):
            b_k = load_rows(k, first, BLOCK_N, HEAD_DIM, run == 1)
            b_s = query_scores(b_q, b_k, seen, first + tl.arange(0, BLOCK_N), slope_log2, scale_log2, run == 1)
            b_acc, b_sum, b_max = see(b_acc, b_sum, b_max, b_s, v, first, BLOCK_N, HEAD_DIM, run == 1)

    # Again: kept over the loops it would take registers that they need.
    segment, first_row = query_segment(p_segments, pieces, head // GROUP, heads // GROUP, queries, q_offset, BLOCK_M)
    o_row = first_row + tl.arange(0, BLOCK_M)
    m_row = o_row < segment.end_query
    b_sum = tl.where(m_row, b_sum, 1.0)  # rows past the end may have seen nothing
    o = rows_of(p_o, o_strides, batch, head, segment.end_query)
    store_rows(o, b_acc / b_sum[:, None], first_row, BLOCK_M, HEAD_DIM)
    b_lse = (b_max + tl.log2(b_sum)) * 0.6931471805599453
    tl.store(p_lse + (batch * heads + head) * queries + o_row, b_lse, mask=m_row)
