"""The backward pass of scoped attention in Triton: one kernel for dq, by blocks of queries, and one for dk and dv, by blocks
of keys. No two programs write to the same memory, so gradients do not vary from run to run.

Probabilities are recomputed from the log-sum-exp. Names as in `blocks.py`.
"""

import triton
import triton.language as tl

from farsight.kernels.scoped_attention.triton.blocks import (
    LOG2_E,
    dot,
    key_runs,
    load_scope,
    load_segment,
    load_slope,
    positions_of,
    query_block,
    query_scores,
    query_segment,
    runs,
    scores,
)
from farsight.kernels.triton_rows import load_rows, rows_of, store_rows


@triton.jit
def delta_kernel(
    p_o,
    p_do,
    p_delta,
    o_strides,
    do_strides,
    queries,
    heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """delta [B, N, Lq] = sum over H of o · do. Grid: (blocks of queries, B, N)."""
    first_row = tl.program_id(0) * BLOCK_M
    batch, head = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    b_o = load_rows(rows_of(p_o, o_strides, batch, head, queries), first_row, BLOCK_M, HEAD_DIM)
    b_do = load_rows(rows_of(p_do, do_strides, batch, head, queries), first_row, BLOCK_M, HEAD_DIM)
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    o_row = first_row + tl.arange(0, BLOCK_M)
    tl.store(p_delta + (batch * heads + head) * queries + o_row, b_delta, mask=o_row < queries)


@triton.jit
def _load_statistics(p_lse, p_delta, o_row, queries):
    """Log-sum-exp in base 2 and delta of rows; +inf past the end, where probabilities are then 0."""
    b_lse = tl.load(p_lse + o_row, mask=o_row < queries, other=float("inf")) * LOG2_E
    return b_lse, tl.load(p_delta + o_row, mask=o_row < queries, other=0.0)


@triton.jit
def dq_kernel(
    p_q,
    p_k,
    p_v,
    p_do,
    p_dq,
    p_lse,
    p_delta,
    p_scopes,
    p_order,
    p_starts,
    p_slopes,
    p_segments,
    q_strides,
    k_strides,
    v_strides,
    do_strides,
    dq_strides,
    queries,
    q_offset,
    tokens,
    pieces,
    heads,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dq of one block of queries of one head of one batch row; arguments and grid are the forward kernel's."""
    batch = tl.program_id(1).to(tl.int64)
    head = tl.load(p_order + tl.program_id(2)).to(tl.int64)
    segment, first_row = query_segment(p_segments, pieces, head // GROUP, heads // GROUP, queries, q_offset, BLOCK_M)
    if p_segments is not None:  # noqa: SIM102  known when the kernel is compiled
        if first_row >= segment.end_query:
            return
    scale_log2 = scale * LOG2_E
    o_row = first_row + tl.arange(0, BLOCK_M)
    p_starts = None if p_starts is None else p_starts + batch * tokens
    seen = query_block(p_scopes, p_starts, head, first_row, segment, BLOCK_M)
    slope_log2 = None if p_slopes is None else load_slope(p_slopes, head)
    b_q = load_rows(rows_of(p_q, q_strides, batch, head, segment.end_query), first_row, BLOCK_M, HEAD_DIM)
    b_do = load_rows(rows_of(p_do, do_strides, batch, head, segment.end_query), first_row, BLOCK_M, HEAD_DIM)
    o_head = (batch * heads + head) * queries
    b_lse, b_delta = _load_statistics(p_lse + o_head, p_delta + o_head, o_row, segment.end_query)
    k = rows_of(p_k, k_strides, batch, segment.kv_head, segment.end_key)
    v = rows_of(p_v, v_strides, batch, segment.kv_head, segment.end_key)
    bounds = key_runs(seen, segment, BLOCK_N)
    b_dq = tl.zeros(b_q.shape, dtype=tl.float32)
    for run in tl.static_range(3):
        for first in tl.range(bounds[run], bounds[run + 1], BLOCK_N):
            b_k = load_rows(k, first, BLOCK_N, HEAD_DIM, run == 1)
            b_v = load_rows(v, first, BLOCK_N, HEAD_DIM, run == 1)
            b_s = query_scores(b_q, b_k, seen, first + tl.arange(0, BLOCK_N), slope_log2, scale_log2, run == 1)
            b_p = tl.exp2(b_s - b_lse[:, None])
            b_ds = b_p * (dot(b_do, tl.trans(b_v)) - b_delta[:, None])
            b_dq += dot(b_ds.to(b_k.dtype), b_k)
    # Again: kept over the loops it would take registers that they need.
    segment, first_row = query_segment(p_segments, pieces, head // GROUP, heads // GROUP, queries, q_offset, BLOCK_M)
    dq = rows_of(p_dq, dq_strides, batch, head, segment.end_query)
    store_rows(dq, b_dq * scale, first_row, BLOCK_M, HEAD_DIM)


@triton.jit
def dkv_kernel(
    p_q,
    p_k,
    p_v,
    p_do,
    p_dk,
    p_dv,
    p_lse,
    p_delta,
    p_scopes,
    p_order,
    p_until,
    p_slopes,
    p_segments,
    q_strides,
    k_strides,
    v_strides,
    do_strides,
    dk_strides,
    queries,
    q_offset,
    tokens,
    pieces,
    heads,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dk and dv of one block of keys of one key-value head, over the query heads that share it.

    Arguments beyond the forward kernel's: until [B, tokens], one past the last token of each token's document; order,
    key-value heads from wide to narrow, or rows of the table of segments; dk and dv share their strides. Grid: (blocks of
    keys of the longest segment, B, entries of the order).
    """
    batch = tl.program_id(1).to(tl.int64)
    number = tl.load(p_order + tl.program_id(2))
    kv_head = number.to(tl.int64)
    if p_segments is not None:
        kv_head = (number.to(tl.int32) % (heads // GROUP)).to(tl.int64)
    segment = load_segment(p_segments, number, kv_head, queries, q_offset)
    first_key = segment.first_key + tl.program_id(0) * BLOCK_N  # the first keys are seen by the most queries
    end_key, shift = segment.end_key, segment.shift
    if p_segments is not None:  # noqa: SIM102  known when the kernel is compiled
        if first_key >= end_key:
            return
    scale_log2 = scale * LOG2_E
    last_key = tl.minimum(first_key + BLOCK_N, end_key) - 1
    o_i = first_key + tl.arange(0, BLOCK_N)
    b_k = load_rows(rows_of(p_k, k_strides, batch, segment.kv_head, end_key), first_key, BLOCK_N, HEAD_DIM)
    b_v = load_rows(rows_of(p_v, v_strides, batch, segment.kv_head, end_key), first_key, BLOCK_N, HEAD_DIM)
    first_until, last_until = end_key, end_key
    if p_until is not None:
        p_until += batch * tokens
        if segment.first_token is not None:
            p_until += segment.first_token
        first_until = positions_of(tl.load(p_until + first_key), segment)
        last_until = positions_of(tl.load(p_until + last_key), segment)
        b_until = positions_of(tl.load(p_until + o_i, mask=o_i < end_key, other=0), segment)
        if p_segments is not None:  # a document may go on after the segment
            first_until, last_until = tl.minimum(first_until, end_key), tl.minimum(last_until, end_key)

    b_dk = tl.zeros(b_k.shape, dtype=tl.float32)
    b_dv = tl.zeros(b_k.shape, dtype=tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        scope = load_scope(p_scopes, head, end_key - segment.first_key)
        slope_log2 = None if p_slopes is None else load_slope(p_slopes, head)
        q = rows_of(p_q, q_strides, batch, head, segment.end_query)
        do = rows_of(p_do, do_strides, batch, head, segment.end_query)
        o_head = (batch * heads + head) * queries
        # One past the last query that sees each key.
        o_end = o_i + scope if p_until is None else tl.minimum(o_i + scope, b_until)
        # From the first key's own row to the last row that the scope or the document of the last key reaches; between them,
        # the rows that see the whole block.
        zero = segment.first_query  # blocks begin there
        begin = tl.maximum(first_key - shift - zero, 0) // BLOCK_M * BLOCK_M
        seen_from = tl.cdiv(tl.maximum(last_key - shift - zero, 0), BLOCK_M) * BLOCK_M
        seen_to = tl.maximum(tl.minimum(first_key + scope, first_until) - shift - zero, 0) // BLOCK_M * BLOCK_M
        end = tl.maximum(tl.minimum(last_key + scope, last_until) - shift - zero, 0)
        rows = runs(zero + tl.minimum(begin, end), zero + seen_from, zero + seen_to, zero + end)
        for run in tl.static_range(3):
            for first in tl.range(rows[run], rows[run + 1], BLOCK_M):
                o_row = first + tl.arange(0, BLOCK_M)
                o_t = (o_row + shift)[None, :]
                b_q = load_rows(q, first, BLOCK_M, HEAD_DIM, run == 1)
                b_do = load_rows(do, first, BLOCK_M, HEAD_DIM, run == 1)
                b_lse, b_delta = _load_statistics(p_lse + o_head, p_delta + o_head, o_row, segment.end_query)
                m_seen = None if run == 1 else (o_i[:, None] <= o_t) & (o_t < o_end[:, None])
                b_s = scores(b_k, b_q, o_t, o_i[:, None], slope_log2, scale_log2, m_seen)  # [N, M]
                b_p = tl.exp2(b_s - b_lse[None, :])
                b_dv += dot(b_p.to(b_do.dtype), b_do)
                b_ds = b_p * (dot(b_v, tl.trans(b_do)) - b_delta[None, :])
                b_dk += dot(b_ds.to(b_q.dtype), b_q)
    # Again: kept over the loops it would take registers that they need.
    segment = load_segment(p_segments, number, kv_head, queries, q_offset)
    dk = rows_of(p_dk, dk_strides, batch, segment.kv_head, segment.end_key)
    dv = rows_of(p_dv, dk_strides, batch, segment.kv_head, segment.end_key)
    store_rows(dk, b_dk * scale, first_key, BLOCK_N, HEAD_DIM)
    store_rows(dv, b_dv, first_key, BLOCK_N, HEAD_DIM)
