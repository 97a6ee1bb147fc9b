"""Decoding in Triton: a token is appended to a rolling cache, and its queries attend to the slots, split into parts.

Every key-value head's ring is cut into parts of equal length. One program computes a part for all query heads that share
the key-value head, so a wide head fills the GPU with many parts, and a narrow one is a single program. The part in which the
new token's slot lies starts with that token and stores it; no program reads the slot. A second kernel combines the parts,
weighted by their log-sum-exp, and counts the token. Nothing is read on the host: the token's index is loaded from memory.

Names as in `blocks.py`; [G] query heads of a key-value head, [S] slots.
"""

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from farsight.kernels.scoped_attention.rolling_cache import RollingCache
from farsight.kernels.scoped_attention.triton.attention import check_runs
from farsight.kernels.scoped_attention.triton.blocks import (
    LOG2_E,
    load_scope,
    load_slope,
    nothing_seen,
    raised,
    scores,
    see,
)
from farsight.kernels.scoped_attention.visibility import Visibility
from farsight.kernels.triton_rows import Rows, contiguous_rows, load_rows, padded, store_rows

SHORTEST_PART = 128
PROGRAMS_PER_PROCESSOR = 4  # parts per multiprocessor of a GPU, so that none waits long for the last
PARTS_AT_ONCE = 16


@triton.jit
def decode_kernel(
    p_q,
    p_new_k,
    p_new_v,
    p_k,
    p_v,
    p_parts,
    p_lse,
    p_tokens,
    p_scopes,
    p_heads,
    p_first_parts,
    p_first_slots,
    p_starts,
    p_slopes,
    q_strides,
    new_k_strides,
    new_v_strides,
    cache_by_batch,
    parts,
    part_slots,
    scale_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One part of one key-value head's ring, for one row of the batch.

    Arguments: q [B, N, H]; new_k and new_v [B, K, H], the token's own; k and v [B, S, H], contiguous except in B; parts
    [B, parts, GROUP, H] and lse [B, parts, GROUP], fp32, output and log-sum-exp (base 2) of each part; tokens [1], the number
    before this one; scopes and slopes [N]; heads [parts], each part's key-value head; first_parts and first_slots [K + 1];
    starts [B]. Strides are those of B and heads. Grid: (parts, B).
    """
    BLOCK_G: tl.constexpr = padded(GROUP)
    part = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    kv_head = tl.load(p_heads + part).to(tl.int64)
    first_slot = tl.load(p_first_slots + kv_head)
    capacity = tl.load(p_first_slots + kv_head + 1) - first_slot
    t = tl.load(p_tokens)
    slot = t % capacity
    begin = (part - tl.load(p_first_parts + kv_head)) * part_slots
    end = tl.minimum(tl.minimum(begin + part_slots, capacity), t)

    p_q += batch * q_strides[0] + kv_head * GROUP * q_strides[1]
    b_q = load_rows(Rows(p_q, q_strides[1], GROUP), 0, BLOCK_G, HEAD_DIM)
    o_g = tl.arange(0, BLOCK_G)
    # Rows past the group, which are not written, are computed as its last.
    o_head = (kv_head * GROUP + tl.minimum(o_g, GROUP - 1))[:, None]
    b_scope = load_scope(p_scopes, o_head, capacity)
    b_slope = None if p_slopes is None else load_slope(p_slopes, o_head)
    b_first = t - b_scope + 1 if p_starts is None else tl.maximum(t - b_scope + 1, tl.load(p_starts + batch))

    o_ring = batch * cache_by_batch + first_slot.to(tl.int64) * HEAD_DIM
    b_acc, b_sum, b_max = nothing_seen(b_q)
    if (slot >= begin) & (slot < begin + part_slots):
        o_h = tl.arange(0, padded(HEAD_DIM))
        m_h = o_h < HEAD_DIM
        b_k = tl.load(p_new_k + batch * new_k_strides[0] + kv_head * new_k_strides[1] + o_h, mask=m_h, other=0.0)
        b_v = tl.load(p_new_v + batch * new_v_strides[0] + kv_head * new_v_strides[1] + o_h, mask=m_h, other=0.0)
        o_slot = o_ring + slot.to(tl.int64) * HEAD_DIM + o_h
        tl.store(p_k + o_slot, b_k, mask=m_h)
        tl.store(p_v + o_slot, b_v, mask=m_h)
        # Every head sees the token itself, at a distance of 0, where there is no penalty.
        b_max = tl.sum(b_q.to(tl.float32) * b_k.to(tl.float32)[None, :], 1) * scale_log2
        b_sum += 1.0
        b_acc += b_v.to(tl.float32)[None, :]
    k, v = Rows(p_k + o_ring, HEAD_DIM, end), Rows(p_v + o_ring, HEAD_DIM, end)
    for first in tl.range(begin, end, BLOCK_N):
        o_s = (first + tl.arange(0, BLOCK_N))[None, :]
        # The token in each slot: the latest one before the query that was written to it. In the query's slot, which is being
        # overwritten, and past the end nothing is seen.
        o_i = tl.where((o_s < end) & (o_s != slot), t - (t - o_s) % capacity, t + 1)
        b_k = load_rows(k, first, BLOCK_N, HEAD_DIM)
        b_s = scores(b_q, b_k, t, o_i, b_slope, scale_log2, (o_i >= b_first) & (o_i <= t))
        b_acc, b_sum, b_max = see(b_acc, b_sum, b_max, b_s, v, first, BLOCK_N, HEAD_DIM, False)

    b_some = tl.where(b_sum == 0.0, 1.0, b_sum)  # for a part of which a head sees nothing
    o_row = (batch * parts + part) * GROUP
    store_rows(Rows(p_parts + o_row * HEAD_DIM, HEAD_DIM, GROUP), b_acc / b_some[:, None], 0, BLOCK_G, HEAD_DIM)
    tl.store(p_lse + o_row + o_g, b_max + tl.log2(b_some), mask=o_g < GROUP)


@triton.jit
def combine_kernel(
    p_parts,
    p_lse,
    p_o,
    p_tokens,
    p_first_parts,
    o_by_batch,
    o_by_head,
    parts,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Combines the parts of one query head, weighted by their log-sum-exp; the first program counts the token. Grid: (N, B)."""
    head = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    kv_head = head // GROUP
    if (head == 0) & (batch == 0):
        tl.store(p_tokens, tl.load(p_tokens) + 1)
    o_h = tl.arange(0, padded(HEAD_DIM))
    m_h = o_h < HEAD_DIM
    b_acc = tl.zeros([padded(HEAD_DIM)], dtype=tl.float32)
    b_max = -float("inf")
    b_sum = 0.0
    end = tl.load(p_first_parts + kv_head + 1)
    for first in tl.range(tl.load(p_first_parts + kv_head), end, BLOCK_P):
        o_p = first + tl.arange(0, BLOCK_P)
        o_row = (batch * parts + o_p) * GROUP + head % GROUP
        b_lse = tl.load(p_lse + o_row, mask=o_p < end, other=-float("inf"))
        b_new_max, b_shift = raised(b_max, tl.max(b_lse, 0))
        b_weight = tl.exp2(b_lse - b_shift)
        b_alpha = tl.exp2(b_max - b_shift)
        b_part = tl.load(
            p_parts + o_row[:, None] * HEAD_DIM + o_h[None, :], mask=(o_p < end)[:, None] & m_h[None, :], other=0.0
        )
        b_acc = b_acc * b_alpha + tl.sum(b_weight[:, None] * b_part, 0)
        b_sum = b_sum * b_alpha + tl.sum(b_weight, 0)
        b_max = b_new_max
    p_o += batch * o_by_batch + head * o_by_head
    tl.store(p_o + o_h, (b_acc / b_sum).to(p_o.dtype.element_ty), mask=m_h)


def triton_decode(
    q_BNH: Tensor,
    k_BKH: Tensor,
    v_BKH: Tensor,
    cache: RollingCache,
    visibility: Visibility,
    document_starts_B: Tensor | None,
    scale: float,
) -> Tensor:
    """`api.scoped_decode` with all arguments given.

    Raises:
        ValueError: the kernels cannot run here, or the bias is not ALiBi.
    """
    check_runs(q_BNH)
    if (parts := _parts_of.get(cache)) is None:
        part_slots = _part_slots(sum(cache.capacities) * len(q_BNH), q_BNH.device)
        parts = _parts_of[cache] = _parts(cache.capacities, part_slots, q_BNH.device)
    return decode_op(
        q_BNH, k_BKH, v_BKH, cache.keys_BSH, cache.values_BSH, cache.tokens, *parts, visibility.scopes_N,
        document_starts_B, visibility.alibi_slopes("triton"), scale,
    )  # fmt: skip


@torch.library.custom_op("farsight::triton_decode", mutates_args=("keys_BSH", "values_BSH", "tokens"))
def decode_op(
    q_BNH: Tensor,
    k_BKH: Tensor,
    v_BKH: Tensor,
    keys_BSH: Tensor,
    values_BSH: Tensor,
    tokens: Tensor,
    part_slots: int,
    heads: Tensor,
    first_parts: Tensor,
    first_slots: Tensor,
    scopes_N: Tensor,
    document_starts_B: Tensor | None,
    alibi_slopes_N: Tensor | None,
    scale: float,
) -> Tensor:
    """Output [B, N, H] in q's dtype, as one operator, which also appends the token; `_Parts` describes the parts."""
    q_BNH, k_BKH, v_BKH = (contiguous_rows(x) for x in (q_BNH, k_BKH, v_BKH))
    (B, N, H), parts = q_BNH.shape, heads.shape[0]
    group = N // k_BKH.shape[1]
    o_parts = torch.empty((B, parts, group, H), dtype=torch.float32, device=q_BNH.device)
    lse_parts = torch.empty((B, parts, group), dtype=torch.float32, device=q_BNH.device)
    o_BNH = torch.empty((B, N, H), dtype=q_BNH.dtype, device=q_BNH.device)
    # Where these are on the device already, as a model's are, nothing is copied: the kernel takes integers of any width.
    scopes, starts, slopes = (
        None if x is None else x.to(q_BNH.device) for x in (scopes_N, document_starts_B, alibi_slopes_N)
    )
    decode_kernel[(parts, B)](
        q_BNH, k_BKH, v_BKH, keys_BSH, values_BSH, o_parts, lse_parts, tokens, scopes, heads, first_parts, first_slots,
        starts, slopes, q_BNH.stride()[:2], k_BKH.stride()[:2], v_BKH.stride()[:2], keys_BSH.stride(0), parts, part_slots,
        scale * LOG2_E.value, group, H, **launch_options(q_BNH.dtype, group),
    )  # fmt: skip
    combine_kernel[(N, B)](
        o_parts, lse_parts, o_BNH, tokens, first_parts, *o_BNH.stride()[:2], parts, group, H, PARTS_AT_ONCE
    )
    return o_BNH


@decode_op.register_fake
def _(q, *_):
    return q.new_empty(q.shape)


def launch_options(dtype: torch.dtype, group: int) -> dict[str, int]:
    """Keys per step, warps and stages of the decode kernel for `group` query heads; not tuned on a GPU yet."""
    if dtype == torch.float32:
        return {"BLOCK_N": 32, "num_warps": 4 if group <= 16 else 8, "num_stages": 2}
    return {"BLOCK_N": 64, "num_warps": 4, "num_stages": 3}


def _part_slots(slots: int, device: torch.device) -> int:
    """Slots per part: a power of two, such that the slots of all rows make a few programs per multiprocessor."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return max(SHORTEST_PART, triton.next_power_of_2(triton.cdiv(slots, PROGRAMS_PER_PROCESSOR * processors)))


class _Parts(NamedTuple):
    """The division of a cache's rings into parts."""

    slots: int
    """Slots of a part."""
    heads: Tensor
    """int32 [parts], the key-value head of each."""
    first_parts: Tensor
    first_slots: Tensor
    """int32 [K + 1], of each head, with totals at the end."""


_parts_of: WeakKeyDictionary[RollingCache, _Parts] = WeakKeyDictionary()
"""By cache, which keeps the tensors alive as long as a CUDA graph may read them."""


@lru_cache(maxsize=32)  # shared by all layers whose rings are alike
def _parts(capacities: tuple[int, ...], slots: int, device: torch.device) -> _Parts:
    counts = [triton.cdiv(capacity, slots) for capacity in capacities]
    heads = [head for head, count in enumerate(counts) for _ in range(count)]
    return _Parts(
        slots,
        *(
            torch.tensor(values, dtype=torch.int32, device=device)
            for values in (heads, [0, *accumulate(counts)], [0, *accumulate(capacities)])
        ),
    )
