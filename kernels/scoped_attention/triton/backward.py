"""The backward pass of scoped attention in Triton: one kernel for dq, by blocks of queries, and one for dk and dv, by blocks
of keys. No two programs write to the same memory, so gradients do not vary from run to run.

Probabilities are recomputed from the log-sum-exp. Names as in `forward.py`.
"""

import triton
import triton.language as tl

from farsight.kernels.scoped_attention.triton.forward import dot, key_runs, load_rows, store_rows


@triton.jit
def delta_kernel(
    p_o,
    p_do,
    p_delta,
    o_by_batch,
    o_by_token,
    o_by_head,
    do_by_batch,
    do_by_token,
    do_by_head,
    queries,
    heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """delta [B, N, Lq] = sum over H of o · do. Grid: (blocks of queries, B, N)."""
    first_row = tl.program_id(0) * BLOCK_M
    batch, head = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    p_o += batch * o_by_batch + head * o_by_head
    p_do += batch * do_by_batch + head * do_by_head
    b_o = load_rows(p_o, first_row, o_by_token, queries, BLOCK_M, HEAD_DIM, BLOCK_H, False)
    b_do = load_rows(p_do, first_row, do_by_token, queries, BLOCK_M, HEAD_DIM, BLOCK_H, False)
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    o_row = first_row + tl.arange(0, BLOCK_M)
    tl.store(p_delta + (batch * heads + head) * queries + o_row, b_delta, mask=o_row < queries)


@triton.jit
def _dq_keys(
    b_dq,
    b_q,
    b_do,
    b_lse,
    b_delta,
    o_t,
    b_start,
    begin,
    end,
    p_k,
    p_v,
    k_by_token,
    v_by_token,
    scope,
    slope_log2,
    scale_log2,
    keys,
    WIDE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
):
    """Adds the contribution of keys `begin` to `end` to dq of a block of queries, before the factor `scale`."""
    for first in tl.range(begin, end, BLOCK_N):
        o_i = first + tl.arange(0, BLOCK_N)
        b_k = load_rows(p_k, first, k_by_token, keys, BLOCK_N, HEAD_DIM, BLOCK_H, not MASKED)
        b_v = load_rows(p_v, first, v_by_token, keys, BLOCK_N, HEAD_DIM, BLOCK_H, not MASKED)
        b_s = dot(b_q, tl.trans(b_k), WIDE, INTERPRETED) * scale_log2
        if HAS_SLOPES:
            b_s -= slope_log2 * (o_t[:, None] - o_i[None, :]).to(tl.float32)
        if MASKED:
            m_s = (o_i[None, :] <= o_t[:, None]) & (o_i[None, :] > o_t[:, None] - scope)
            if HAS_STARTS:
                m_s &= o_i[None, :] >= b_start[:, None]
            b_s = tl.where(m_s, b_s, float("-inf"))
        b_p = tl.exp2(b_s - b_lse[:, None])
        b_ds = b_p * (dot(b_do, tl.trans(b_v), WIDE, INTERPRETED) - b_delta[:, None])
        b_dq += dot(b_ds.to(b_k.dtype), b_k, WIDE, INTERPRETED)
    return b_dq


@triton.jit
def _dq_band(
    b_q,
    b_do,
    b_lse,
    b_delta,
    o_t,
    b_start,
    first_t,
    last_t,
    first_start,
    last_start,
    p_k,
    p_v,
    k_by_token,
    v_by_token,
    scope,
    slope_log2,
    scale_log2,
    keys,
    WIDE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
):
    """dq of a block of queries over all keys it sees, before the factor `scale`."""
    begin, seen_from, seen_to, end = key_runs(first_t, last_t, first_start, last_start, scope, keys, BLOCK_N)
    b_dq = tl.zeros([BLOCK_M, BLOCK_H], dtype=tl.float32)
    b_dq = _dq_keys(
        b_dq, b_q, b_do, b_lse, b_delta, o_t, b_start, begin, seen_from, p_k, p_v, k_by_token, v_by_token,
        scope, slope_log2, scale_log2, keys, WIDE, INTERPRETED, HEAD_DIM, BLOCK_H, BLOCK_N, True, HAS_STARTS, HAS_SLOPES,
    )  # fmt: skip
    b_dq = _dq_keys(
        b_dq, b_q, b_do, b_lse, b_delta, o_t, b_start, seen_from, seen_to, p_k, p_v, k_by_token, v_by_token,
        scope, slope_log2, scale_log2, keys, WIDE, INTERPRETED, HEAD_DIM, BLOCK_H, BLOCK_N, False, HAS_STARTS, HAS_SLOPES,
    )  # fmt: skip
    return _dq_keys(
        b_dq, b_q, b_do, b_lse, b_delta, o_t, b_start, seen_to, end, p_k, p_v, k_by_token, v_by_token,
        scope, slope_log2, scale_log2, keys, WIDE, INTERPRETED, HEAD_DIM, BLOCK_H, BLOCK_N, True, HAS_STARTS, HAS_SLOPES,
    )  # fmt: skip


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
    q_by_batch,
    q_by_token,
    q_by_head,
    k_by_batch,
    k_by_token,
    k_by_head,
    v_by_batch,
    v_by_token,
    v_by_head,
    do_by_batch,
    do_by_token,
    do_by_head,
    dq_by_batch,
    dq_by_token,
    dq_by_head,
    queries,
    q_offset,
    heads,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_NARROW: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    WIDE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """dq of one block of queries of one head of one batch row; arguments and grid are the forward kernel's."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    head = tl.load(p_order + tl.program_id(2)).to(tl.int64)
    kv_head = head // GROUP
    keys = queries + q_offset
    scope = tl.minimum(tl.load(p_scopes + head), keys).to(tl.int32)
    scale_log2 = scale * 1.4426950408889634
    slope_log2 = 0.0
    if HAS_SLOPES:
        slope_log2 = tl.load(p_slopes + head) * 1.4426950408889634

    first_row = block * BLOCK_M
    last_row = tl.minimum(first_row + BLOCK_M, queries) - 1
    o_row = first_row + tl.arange(0, BLOCK_M)
    o_t = o_row + q_offset
    m_row = o_row < queries
    b_start = tl.zeros([BLOCK_M], dtype=tl.int32)
    first_start, last_start = 0, 0
    if HAS_STARTS:
        p_start = p_starts + batch * keys + q_offset
        b_start = tl.load(p_start + o_row, mask=m_row, other=0).to(tl.int32)
        first_start = tl.load(p_start + first_row).to(tl.int32)
        last_start = tl.load(p_start + last_row).to(tl.int32)

    p_q += batch * q_by_batch + head * q_by_head
    p_do += batch * do_by_batch + head * do_by_head
    b_q = load_rows(p_q, first_row, q_by_token, queries, BLOCK_M, HEAD_DIM, BLOCK_H, False)
    b_do = load_rows(p_do, first_row, do_by_token, queries, BLOCK_M, HEAD_DIM, BLOCK_H, False)
    o_stat = (batch * heads + head) * queries + o_row
    # +inf past the end: those rows' probabilities are 0.
    b_lse = tl.load(p_lse + o_stat, mask=m_row, other=float("inf")) * 1.4426950408889634
    b_delta = tl.load(p_delta + o_stat, mask=m_row, other=0.0)
    p_k += batch * k_by_batch + kv_head * k_by_head
    p_v += batch * v_by_batch + kv_head * v_by_head

    if BLOCK_NARROW == BLOCK_N or scope > BLOCK_N:
        b_dq = _dq_band(
            b_q, b_do, b_lse, b_delta, o_t, b_start, first_row + q_offset, last_row + q_offset, first_start,
            last_start, p_k, p_v, k_by_token, v_by_token, scope, slope_log2, scale_log2, keys, WIDE, INTERPRETED,
            HEAD_DIM, BLOCK_H, BLOCK_M, BLOCK_N, HAS_STARTS, HAS_SLOPES,
        )  # fmt: skip
    else:
        b_dq = _dq_band(
            b_q, b_do, b_lse, b_delta, o_t, b_start, first_row + q_offset, last_row + q_offset, first_start,
            last_start, p_k, p_v, k_by_token, v_by_token, scope, slope_log2, scale_log2, keys, WIDE, INTERPRETED,
            HEAD_DIM, BLOCK_H, BLOCK_M, BLOCK_NARROW, HAS_STARTS, HAS_SLOPES,
        )  # fmt: skip
    p_dq += batch * dq_by_batch + head * dq_by_head
    store_rows(p_dq, b_dq * scale, first_row, dq_by_token, queries, BLOCK_M, HEAD_DIM, BLOCK_H)


@triton.jit
def _dkv_queries(
    b_dk,
    b_dv,
    b_k,
    b_v,
    o_i,
    begin,
    end,
    p_q,
    p_do,
    p_lse,
    p_delta,
    p_start,
    q_by_token,
    do_by_token,
    scope,
    slope_log2,
    scale_log2,
    queries,
    q_offset,
    WIDE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
):
    """Adds the contribution of query rows `begin` to `end` of one head to dv and dk (before the factor `scale`) of a block of
    keys."""
    for first in tl.range(begin, end, BLOCK_M):
        o_row = first + tl.arange(0, BLOCK_M)
        o_t = o_row + q_offset
        b_q = load_rows(p_q, first, q_by_token, queries, BLOCK_M, HEAD_DIM, BLOCK_H, not MASKED)
        b_do = load_rows(p_do, first, do_by_token, queries, BLOCK_M, HEAD_DIM, BLOCK_H, not MASKED)
        # +inf past the end: those rows' probabilities are 0.
        b_lse = tl.load(p_lse + o_row, mask=o_row < queries, other=float("inf")) * 1.4426950408889634
        b_delta = tl.load(p_delta + o_row, mask=o_row < queries, other=0.0)
        b_s = dot(b_k, tl.trans(b_q), WIDE, INTERPRETED) * scale_log2  # [N, M]
        if HAS_SLOPES:
            b_s -= slope_log2 * (o_t[None, :] - o_i[:, None]).to(tl.float32)
        if MASKED:
            m_s = (o_i[:, None] <= o_t[None, :]) & (o_i[:, None] > o_t[None, :] - scope)
            if HAS_STARTS:
                b_start = tl.load(p_start + o_row, mask=o_row < queries, other=0).to(tl.int32)
                m_s &= o_i[:, None] >= b_start[None, :]
            b_s = tl.where(m_s, b_s, float("-inf"))
        b_p = tl.exp2(b_s - b_lse[None, :])
        b_dv += dot(b_p.to(b_do.dtype), b_do, WIDE, INTERPRETED)
        b_ds = b_p * (dot(b_v, tl.trans(b_do), WIDE, INTERPRETED) - b_delta[None, :])
        b_dk += dot(b_ds.to(b_q.dtype), b_q, WIDE, INTERPRETED)
    return b_dk, b_dv


@triton.jit
def _dkv_band(
    b_dk,
    b_dv,
    b_k,
    b_v,
    o_i,
    first_key,
    last_key,
    first_until,
    last_until,
    p_q,
    p_do,
    p_lse,
    p_delta,
    p_start,
    q_by_token,
    do_by_token,
    scope,
    slope_log2,
    scale_log2,
    queries,
    q_offset,
    WIDE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
):
    """dk and dv of a block of keys from all queries of one head that see any of it."""
    # From the first key's own row to the last row that the scope or the document of the last key reaches; between them, the
    # rows that see the whole block.
    begin = tl.maximum(first_key - q_offset, 0) // BLOCK_M * BLOCK_M
    end = tl.maximum(tl.minimum(last_key + scope, last_until) - q_offset, 0)
    seen_from = tl.cdiv(tl.maximum(last_key - q_offset, 0), BLOCK_M) * BLOCK_M
    seen_to = tl.maximum(tl.minimum(first_key + scope, first_until) - q_offset, 0) // BLOCK_M * BLOCK_M
    begin = tl.minimum(begin, end)
    seen_from = tl.minimum(tl.maximum(seen_from, begin), end)
    seen_to = tl.minimum(tl.maximum(seen_to, seen_from), end)
    b_dk, b_dv = _dkv_queries(
        b_dk, b_dv, b_k, b_v, o_i, begin, seen_from, p_q, p_do, p_lse, p_delta, p_start, q_by_token,
        do_by_token, scope, slope_log2, scale_log2, queries, q_offset, WIDE, INTERPRETED, HEAD_DIM, BLOCK_H, BLOCK_M, True, HAS_STARTS,
        HAS_SLOPES,
    )  # fmt: skip
    b_dk, b_dv = _dkv_queries(
        b_dk, b_dv, b_k, b_v, o_i, seen_from, seen_to, p_q, p_do, p_lse, p_delta, p_start, q_by_token,
        do_by_token, scope, slope_log2, scale_log2, queries, q_offset, WIDE, INTERPRETED, HEAD_DIM, BLOCK_H, BLOCK_M, False, HAS_STARTS,
        HAS_SLOPES,
    )  # fmt: skip
    return _dkv_queries(
        b_dk, b_dv, b_k, b_v, o_i, seen_to, end, p_q, p_do, p_lse, p_delta, p_start, q_by_token,
        do_by_token, scope, slope_log2, scale_log2, queries, q_offset, WIDE, INTERPRETED, HEAD_DIM, BLOCK_H, BLOCK_M, True, HAS_STARTS,
        HAS_SLOPES,
    )  # fmt: skip


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
    p_starts,
    p_until,
    p_slopes,
    q_by_batch,
    q_by_token,
    q_by_head,
    k_by_batch,
    k_by_token,
    k_by_head,
    v_by_batch,
    v_by_token,
    v_by_head,
    do_by_batch,
    do_by_token,
    do_by_head,
    dk_by_batch,
    dk_by_token,
    dk_by_head,
    queries,
    q_offset,
    heads,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_NARROW: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    WIDE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """dk and dv of one block of keys of one key-value head, over the query heads that share it.

    Arguments beyond the forward kernel's: until [B, Lk], one past the last token of each token's document; order [K],
    key-value heads from wide to narrow; dk and dv share their strides. Grid: (blocks of keys, B, K).
    """
    block = tl.program_id(0)  # the first keys are seen by the most queries
    batch = tl.program_id(1).to(tl.int64)
    kv_head = tl.load(p_order + tl.program_id(2)).to(tl.int64)
    keys = queries + q_offset
    scale_log2 = scale * 1.4426950408889634

    first_key = block * BLOCK_N
    last_key = tl.minimum(first_key + BLOCK_N, keys) - 1
    o_i = first_key + tl.arange(0, BLOCK_N)
    p_k += batch * k_by_batch + kv_head * k_by_head
    p_v += batch * v_by_batch + kv_head * v_by_head
    b_k = load_rows(p_k, first_key, k_by_token, keys, BLOCK_N, HEAD_DIM, BLOCK_H, False)
    b_v = load_rows(p_v, first_key, v_by_token, keys, BLOCK_N, HEAD_DIM, BLOCK_H, False)
    first_until, last_until = keys, keys
    p_start = p_starts
    if HAS_STARTS:
        first_until = tl.load(p_until + batch * keys + first_key).to(tl.int32)
        last_until = tl.load(p_until + batch * keys + last_key).to(tl.int32)
        p_start += batch * keys + q_offset

    b_dk = tl.zeros([BLOCK_N, BLOCK_H], dtype=tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_H], dtype=tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        scope = tl.minimum(tl.load(p_scopes + head), keys).to(tl.int32)
        slope_log2 = 0.0
        if HAS_SLOPES:
            slope_log2 = tl.load(p_slopes + head) * 1.4426950408889634
        p_q_head = p_q + batch * q_by_batch + head * q_by_head
        p_do_head = p_do + batch * do_by_batch + head * do_by_head
        o_stat = (batch * heads + head) * queries
        if BLOCK_NARROW == BLOCK_M or scope > BLOCK_M:
            b_dk, b_dv = _dkv_band(
                b_dk, b_dv, b_k, b_v, o_i, first_key, last_key, first_until, last_until, p_q_head, p_do_head,
                p_lse + o_stat, p_delta + o_stat, p_start, q_by_token, do_by_token, scope, slope_log2, scale_log2,
                queries, q_offset, WIDE, INTERPRETED, HEAD_DIM, BLOCK_H, BLOCK_M, HAS_STARTS, HAS_SLOPES,
            )  # fmt: skip
        else:
            b_dk, b_dv = _dkv_band(
                b_dk, b_dv, b_k, b_v, o_i, first_key, last_key, first_until, last_until, p_q_head, p_do_head,
                p_lse + o_stat, p_delta + o_stat, p_start, q_by_token, do_by_token, scope, slope_log2, scale_log2,
                queries, q_offset, WIDE, INTERPRETED, HEAD_DIM, BLOCK_H, BLOCK_NARROW, HAS_STARTS, HAS_SLOPES,
            )  # fmt: skip
    p_dk += batch * dk_by_batch + kv_head * dk_by_head
    p_dv += batch * dk_by_batch + kv_head * dk_by_head
    store_rows(p_dk, b_dk * scale, first_key, dk_by_token, keys, BLOCK_N, HEAD_DIM, BLOCK_H)
    store_rows(p_dv, b_dv, first_key, dk_by_token, keys, BLOCK_N, HEAD_DIM, BLOCK_H)
