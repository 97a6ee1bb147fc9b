"""Parts shared by the attention kernels: the keys that a block of queries sees, its scores, and the online softmax.

Keys lie in rows of k, and their positions are the numbers of those rows; a query's position is that of its own token's key.

Names, here and in the kernels: b_ block, p_ pointer, o_ offset, m_ mask. Shape suffixes in upper case as in `api.py`;
[M] queries of a block, [N] keys of a block, [H] head dim. A pointer to document starts or slopes is None if there are none.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from farsight.kernels.triton_rows import INTERPRETED, load_rows

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def dot(a, b):
    """a @ b in fp32: fp32 inputs as three TF32 products, which keep fp32 accuracy and still use the tensor cores.

    Triton's interpreter multiplies bf16 incorrectly, so inputs are cast there.
    """
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    elif a.dtype == tl.float32:
        return tl.dot(a, b, input_precision="tf32x3")
    else:
        return tl.dot(a, b)


class Segment(NamedTuple):
    """The queries of a piece of a sequence, and the keys that they see in one key-value head.

    In a plain call these are all queries and keys, and what is always 0 is a constant, which costs nothing.
    """

    first_query: Any
    end_query: Any
    """Rows of q, from the first to one past the last."""
    kv_head: Any
    first_key: Any
    end_key: Any
    """Rows of k and v in that head. The last key is the last query's own."""
    shift: Any
    """Query row r is at position r + shift."""
    first_token: Any
    """Of the sequence, at position 0, which may be negative; None in a plain call."""


SEGMENT_COLUMNS = tl.constexpr(5)
"""Of a table of segments: first_query, end_query, first_key, shift and first_token, int32."""


@triton.jit
def load_segment(p_segments, number, kv_head, queries, q_offset):
    """A row of the table of segments, or, if there is none, all queries and keys of a head."""
    if p_segments is None:
        return Segment(0, queries, kv_head, 0, queries + q_offset, q_offset, None)
    else:
        p = p_segments + number * SEGMENT_COLUMNS
        end_query, shift = tl.load(p + 1), tl.load(p + 3)
        # The heads' keys follow one another as rows of a single head.
        return Segment(tl.load(p), end_query, 0, tl.load(p + 2), end_query + shift, shift, tl.load(p + 4))


@triton.jit
def query_segment(p_segments, pieces, kv_head, kv_heads, queries, q_offset, BLOCK_M: tl.constexpr):
    """The segment of this program's queries and the first of their rows. The last rows, which have most keys, come first."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    if p_segments is None:
        return load_segment(None, 0, kv_head, queries, q_offset), block * BLOCK_M
    else:
        blocks = tl.num_programs(0) // pieces
        segment = load_segment(p_segments, block // blocks * kv_heads + kv_head, kv_head, queries, q_offset)
        return segment, segment.first_query + block % blocks * BLOCK_M


@triton.jit
def positions_of(tokens, segment):
    """Positions of tokens of the sequence, from their indexes."""
    return tokens if segment.first_token is None else tokens - segment.first_token


class Queries(NamedTuple):
    """A block of queries of one head: their positions, and what bounds the keys that they see."""

    o_t: Any
    o_first: Any
    """[M]: positions of the queries, and of the first key that each sees."""
    first_t: Any
    last_t: Any
    first_start: Any
    last_start: Any
    """Position, and that of the document's first token, of the block's first and last query."""
    scope: Any


@triton.jit
def query_block(p_scopes, p_starts, head, first_row, segment, BLOCK_M: tl.constexpr):
    """The block of a segment's queries from `first_row` on: [BLOCK_M] rows. p_starts points to the batch row's starts."""
    shift = segment.shift
    last_row = tl.minimum(first_row + BLOCK_M, segment.end_query) - 1
    o_row = first_row + tl.arange(0, BLOCK_M)
    o_t = o_row + shift
    scope = load_scope(p_scopes, head, segment.end_key - segment.first_key)
    o_first = o_t - scope + 1
    first_start, last_start = segment.first_key, segment.first_key
    if p_starts is not None:
        p_start = p_starts + (shift if segment.first_token is None else shift + segment.first_token)
        first_start = positions_of(tl.load(p_start + first_row), segment)
        last_start = positions_of(tl.load(p_start + last_row), segment)
        b_start = tl.load(p_start + o_row, mask=o_row < segment.end_query, other=0)
        o_first = tl.maximum(o_first, positions_of(b_start, segment))
    return Queries(o_t, o_first, first_row + shift, last_row + shift, first_start, last_start, scope)


@triton.jit
def load_slope(p_slopes, head):
    """A head's ALiBi slope times log2(e)."""
    return tl.load(p_slopes + head) * LOG2_E


@triton.jit
def load_scope(p_scopes, head, longest):
    """A head's scope, at most `longest`, so that t - scope fits in 32 bits."""
    return tl.minimum(tl.load(p_scopes + head), longest).to(tl.int32)


@triton.jit
def key_runs(seen, segment, BLOCK_N: tl.constexpr):
    """The range of keys for a block of queries, and within it the full blocks that every query sees.

    Bounds of three runs: in the first and the last some queries see some keys. If there is no full block, the middle run
    is empty and its keys are in one of the others.
    """
    zero = segment.first_key  # blocks begin there
    begin = (tl.maximum(seen.first_t - seen.scope + 1, seen.first_start) - zero) // BLOCK_N * BLOCK_N
    seen_from = tl.cdiv(tl.maximum(seen.last_t - seen.scope + 1, seen.last_start) - zero, BLOCK_N) * BLOCK_N
    seen_to = (seen.first_t + 1 - zero) // BLOCK_N * BLOCK_N
    return runs(zero + begin, zero + seen_from, zero + seen_to, tl.minimum(seen.last_t + 1, segment.end_key))


@triton.jit
def runs(begin, seen_from, seen_to, end):
    """The bounds in ascending order, if begin ≤ end."""
    seen_from = tl.minimum(tl.maximum(seen_from, begin), end)
    return begin, seen_from, tl.minimum(tl.maximum(seen_to, seen_from), end), end


@triton.jit
def scores(b_a, b_b, o_t, o_i, slope_log2, scale_log2, m_seen):
    """a @ bᵀ, of queries at o_t and keys at o_i in either order, times scale · log2(e), with ALiBi's penalty.

    -inf where the mask m_seen, if there is one, is false. o_t, o_i and the slope broadcast to the scores.
    """
    b_s = dot(b_a, tl.trans(b_b)) * scale_log2
    if slope_log2 is not None:
        b_s -= slope_log2 * (o_t - o_i).to(tl.float32)
    return b_s if m_seen is None else tl.where(m_seen, b_s, float("-inf"))


@triton.jit
def query_scores(b_q, b_k, seen, o_i, slope_log2, scale_log2, WHOLE: tl.constexpr):
    """The scores [M, N] of a block of queries for keys at o_i; WHOLE promises that all of them are seen."""
    o_t, o_i = seen.o_t[:, None], o_i[None, :]
    m_seen = None if WHOLE else (o_i >= seen.o_first[:, None]) & (o_i <= o_t)
    return scores(b_q, b_k, o_t, o_i, slope_log2, scale_log2, m_seen)


@triton.jit
def nothing_seen(b_q):
    """The running output, sum and maximum of a block of queries before the first key."""
    BLOCK_M: tl.constexpr = b_q.shape[0]
    b_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    return tl.zeros(b_q.shape, dtype=tl.float32), tl.zeros([BLOCK_M], dtype=tl.float32), b_max


@triton.jit
def raised(b_max, b_other):
    """The larger of two maxima, and what to subtract from scores for it."""
    b_new_max = tl.maximum(b_max, b_other)
    # Where nothing has been seen yet the maximum is -inf, and -inf - -inf is NaN.
    return b_new_max, tl.where(b_new_max == float("-inf"), 0.0, b_new_max)


@triton.jit
def see(b_acc, b_sum, b_max, b_s, v, first, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, WHOLE: tl.constexpr):
    """Updates the running output, sum and maximum with a block of keys: scores [M, N], and values in rows from `first` on."""
    b_new_max, b_shift = raised(b_max, tl.max(b_s, 1))
    b_p = tl.exp2(b_s - b_shift[:, None])
    b_alpha = tl.exp2(b_max - b_shift)
    b_sum = b_sum * b_alpha + tl.sum(b_p, 1)
    b_v = load_rows(v, first, BLOCK_N, HEAD_DIM, WHOLE)
    return b_acc * b_alpha[:, None] + dot(b_p.to(b_v.dtype), b_v), b_sum, b_new_max
