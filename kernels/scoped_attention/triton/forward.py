"""The forward pass of scoped attention in Triton: online softmax over the blocks of keys that a head's band touches.

One program computes a block of queries of one head. Its keys fall into three runs of blocks: those that the scope or a
document cuts, those that every query sees, and those on the diagonal. Only the first and the last run are masked, and
blocks outside are never loaded. A narrow head steps over keys in smaller blocks, so that a band of three tokens does not
cost as much as one of 128.

Names: b_ block, p_ pointer, o_ offset, m_ mask. Shape suffixes in upper case as in `api.py`; [M] queries of a block,
[N] keys of a block, [H] head dim.
"""

import triton
import triton.language as tl


@triton.jit
def dot(a, b, WIDE: tl.constexpr, INTERPRETED: tl.constexpr):
    """a @ b in fp32: fp32 inputs as three TF32 products, which keep fp32 accuracy and still use the tensor cores.

    Triton's interpreter multiplies bf16 incorrectly, so inputs are cast there.
    """
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    elif WIDE:
        return tl.dot(a, b, input_precision="tf32x3")
    else:
        return tl.dot(a, b)


@triton.jit
def load_rows(
    p, first, by_token, rows, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, WHOLE: tl.constexpr
):
    """Rows `first` to `first + BLOCK` of a head, zero past `rows` and HEAD_DIM; WHOLE promises that no row is past `rows`."""
    o_n = tl.arange(0, BLOCK)
    o_h = tl.arange(0, BLOCK_H)
    # The block's offset has 64 bits, since a million tokens have more elements than 32 bits can count; offsets within the
    # block fit in 32 bits, which take half the registers.
    p_block = p + tl.cast(first, tl.int64) * by_token + o_n[:, None] * by_token + o_h[None, :]
    if WHOLE:
        if HEAD_DIM == BLOCK_H:
            return tl.load(p_block)
        else:
            return tl.load(p_block, mask=(o_h < HEAD_DIM)[None, :], other=0.0)
    else:
        return tl.load(p_block, mask=(first + o_n < rows)[:, None] & (o_h < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def store_rows(p, b, first, by_token, rows, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr):
    """Writes rows `first` to `first + BLOCK` of a head, except those past `rows`."""
    o_n = tl.arange(0, BLOCK)
    o_h = tl.arange(0, BLOCK_H)
    p_block = p + tl.cast(first, tl.int64) * by_token + o_n[:, None] * by_token + o_h[None, :]
    tl.store(p_block, b.to(p.dtype.element_ty), mask=(first + o_n < rows)[:, None] & (o_h < HEAD_DIM)[None, :])


@triton.jit
def _keys(
    b_acc,
    b_sum,
    b_max,
    b_q,
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
    """Updates the running output, sum and maximum of a block of queries with keys `begin` (a multiple of BLOCK_N) to `end`."""
    for first in tl.range(begin, end, BLOCK_N):
        o_i = first + tl.arange(0, BLOCK_N)
        b_k = load_rows(p_k, first, k_by_token, keys, BLOCK_N, HEAD_DIM, BLOCK_H, not MASKED)
        b_s = dot(b_q, tl.trans(b_k), WIDE, INTERPRETED) * scale_log2
        if HAS_SLOPES:
            b_s -= slope_log2 * (o_t[:, None] - o_i[None, :]).to(tl.float32)
        if MASKED:
            m_s = (o_i[None, :] <= o_t[:, None]) & (o_i[None, :] > o_t[:, None] - scope)
            if HAS_STARTS:
                m_s &= o_i[None, :] >= b_start[:, None]
            b_s = tl.where(m_s, b_s, float("-inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_s, 1))
        # A row that has seen nothing yet has a maximum of -inf, and -inf - -inf is NaN.
        b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_p = tl.exp2(b_s - b_shift[:, None])
        b_alpha = tl.exp2(b_max - b_shift)
        b_sum = b_sum * b_alpha + tl.sum(b_p, 1)
        b_v = load_rows(p_v, first, v_by_token, keys, BLOCK_N, HEAD_DIM, BLOCK_H, not MASKED)
        b_acc = b_acc * b_alpha[:, None] + dot(b_p.to(b_v.dtype), b_v, WIDE, INTERPRETED)
        b_max = b_new_max
    return b_acc, b_sum, b_max


@triton.jit
def key_runs(first_t, last_t, first_start, last_start, scope, keys, BLOCK_N: tl.constexpr):
    """The range of keys for a block of queries, and within it the full blocks that every query sees.

    From `begin` to `seen_from` and from `seen_to` to `end` some queries see some keys. If there is no full block, that run
    is empty and its keys are in a masked one.
    """
    begin = tl.maximum(first_t - scope + 1, first_start) // BLOCK_N * BLOCK_N
    end = tl.minimum(last_t + 1, keys)
    seen_from = tl.cdiv(tl.maximum(last_t - scope + 1, last_start), BLOCK_N) * BLOCK_N
    seen_to = (first_t + 1) // BLOCK_N * BLOCK_N
    seen_from = tl.minimum(tl.maximum(seen_from, begin), end)
    seen_to = tl.minimum(tl.maximum(seen_to, seen_from), end)
    return begin, seen_from, seen_to, end


@triton.jit
def _band(
    b_q,
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
    """Output, sum and maximum of a block of queries over all keys it sees, in steps of BLOCK_N keys."""
    begin, seen_from, seen_to, end = key_runs(first_t, last_t, first_start, last_start, scope, keys, BLOCK_N)
    b_acc = tl.zeros([BLOCK_M, BLOCK_H], dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    b_acc, b_sum, b_max = _keys(
        b_acc, b_sum, b_max, b_q, o_t, b_start, begin, seen_from, p_k, p_v, k_by_token, v_by_token,
        scope, slope_log2, scale_log2, keys, WIDE, INTERPRETED, HEAD_DIM, BLOCK_H, BLOCK_N, True, HAS_STARTS, HAS_SLOPES,
    )  # fmt: skip
    b_acc, b_sum, b_max = _keys(
        b_acc, b_sum, b_max, b_q, o_t, b_start, seen_from, seen_to, p_k, p_v, k_by_token, v_by_token,
        scope, slope_log2, scale_log2, keys, WIDE, INTERPRETED, HEAD_DIM, BLOCK_H, BLOCK_N, False, HAS_STARTS, HAS_SLOPES,
    )  # fmt: skip
    return _keys(
        b_acc, b_sum, b_max, b_q, o_t, b_start, seen_to, end, p_k, p_v, k_by_token, v_by_token,
        scope, slope_log2, scale_log2, keys, WIDE, INTERPRETED, HEAD_DIM, BLOCK_H, BLOCK_N, True, HAS_STARTS, HAS_SLOPES,
    )  # fmt: skip


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
    q_by_batch,
    q_by_token,
    q_by_head,
    k_by_batch,
    k_by_token,
    k_by_head,
    v_by_batch,
    v_by_token,
    v_by_head,
    o_by_batch,
    o_by_token,
    o_by_head,
    queries,
    q_offset,
    heads,
    scale_log2,
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
    """Output and log-sum-exp of one block of queries of one head of one batch row.

    Arguments: q and o [B, Lq, N, H], k and v [B, Lk, K, H], each with stride 1 in H; lse [B, N, Lq]; scopes and slopes
    [N]; order [N], heads from wide to narrow; starts [B, Lk]. Grid: (blocks of queries, B, N).
    """
    # The grid's last dimension varies slowest, so the widest heads start first, and within a head the rows with most keys.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    head = tl.load(p_order + tl.program_id(2)).to(tl.int64)
    kv_head = head // GROUP
    keys = queries + q_offset
    # At most the length of the sequence, so that t - scope fits in 32 bits.
    scope = tl.minimum(tl.load(p_scopes + head), keys).to(tl.int32)
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
    b_q = load_rows(p_q, first_row, q_by_token, queries, BLOCK_M, HEAD_DIM, BLOCK_H, False)
    p_k += batch * k_by_batch + kv_head * k_by_head
    p_v += batch * v_by_batch + kv_head * v_by_head

    if BLOCK_NARROW == BLOCK_N or scope > BLOCK_N:
        b_acc, b_sum, b_max = _band(
            b_q, o_t, b_start, first_row + q_offset, last_row + q_offset, first_start, last_start, p_k, p_v,
            k_by_token, v_by_token, scope, slope_log2, scale_log2, keys, WIDE, INTERPRETED, HEAD_DIM, BLOCK_H, BLOCK_M,
            BLOCK_N, HAS_STARTS, HAS_SLOPES,
        )  # fmt: skip
    else:
        b_acc, b_sum, b_max = _band(
            b_q, o_t, b_start, first_row + q_offset, last_row + q_offset, first_start, last_start, p_k, p_v,
            k_by_token, v_by_token, scope, slope_log2, scale_log2, keys, WIDE, INTERPRETED, HEAD_DIM, BLOCK_H, BLOCK_M,
            BLOCK_NARROW, HAS_STARTS, HAS_SLOPES,
        )  # fmt: skip

    b_sum = tl.where(m_row, b_sum, 1.0)  # rows past the end may have seen nothing
    p_o += batch * o_by_batch + head * o_by_head
    store_rows(p_o, b_acc / b_sum[:, None], first_row, o_by_token, queries, BLOCK_M, HEAD_DIM, BLOCK_H)
    b_lse = (b_max + tl.log2(b_sum)) * 0.6931471805599453
    tl.store(p_lse + (batch * heads + head) * queries + o_row, b_lse, mask=m_row)
