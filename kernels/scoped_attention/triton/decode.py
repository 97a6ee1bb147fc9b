"""Decoding in Triton: one query per batch row against a rolling cache, split over its slots.

Every key-value head's ring is cut into parts of equal length. One program computes a part for all query heads that share
the key-value head, so a wide head fills the GPU with many parts, and a narrow one is a single program. A second kernel
combines the parts, weighted by their log-sum-exp. Nothing is read on the host: the token's index is loaded from memory.

Names as in `forward.py`; [G] query heads of a key-value head, [S] slots.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from farsight.kernels.scoped_attention.rolling_cache import RollingCache
from farsight.kernels.scoped_attention.triton.attention import INTERPRETED, LOG2_E, check_runs
from farsight.kernels.scoped_attention.triton.forward import dot, load_rows
from farsight.kernels.scoped_attention.visibility import Visibility

SHORTEST_PART = 128
PROGRAMS_PER_PROCESSOR = 4  # parts per multiprocessor of a GPU, so that none waits long for the last
PARTS_AT_ONCE = 16


@triton.jit
def decode_kernel(
    p_q,
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
    q_by_batch,
    q_by_head,
    cache_by_batch,
    parts,
    part_slots,
    scale_log2,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    WIDE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One part of one key-value head's ring, for one row of the batch.

    Arguments: q [B, N, H]; k and v [B, S, H], contiguous except in B; parts [B, parts, GROUP, H] and lse [B, parts, GROUP],
    fp32, output and log-sum-exp (base 2) of each part; tokens [1], the number appended so far; scopes and slopes [N];
    heads [parts], each part's key-value head; first_parts and first_slots [K + 1]; starts [B]. Grid: (parts, B).
    """
    part = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    kv_head = tl.load(p_heads + part).to(tl.int64)
    first_slot = tl.load(p_first_slots + kv_head)
    capacity = tl.load(p_first_slots + kv_head + 1) - first_slot
    t = tl.load(p_tokens) - 1
    begin = (part - tl.load(p_first_parts + kv_head)) * part_slots
    end = tl.minimum(tl.minimum(begin + part_slots, capacity), t + 1)

    o_g = tl.arange(0, BLOCK_G)
    m_g = o_g < GROUP
    p_q += batch * q_by_batch + kv_head * GROUP * q_by_head
    b_q = load_rows(p_q, 0, q_by_head, GROUP, BLOCK_G, HEAD_DIM, BLOCK_H, False)
    # At most the capacity, so that t - scope fits in 32 bits.
    b_scope = tl.minimum(tl.load(p_scopes + kv_head * GROUP + o_g, mask=m_g, other=1), capacity).to(tl.int32)
    b_slope = tl.zeros([BLOCK_G], dtype=tl.float32)
    if HAS_SLOPES:
        b_slope = tl.load(p_slopes + kv_head * GROUP + o_g, mask=m_g, other=0.0) * 1.4426950408889634
    start = 0
    if HAS_STARTS:
        start = tl.load(p_starts + batch).to(tl.int32)

    o_ring = batch * cache_by_batch + first_slot.to(tl.int64) * HEAD_DIM
    b_acc = tl.zeros([BLOCK_G, BLOCK_H], dtype=tl.float32)
    b_sum = tl.zeros([BLOCK_G], dtype=tl.float32)
    b_max = tl.full([BLOCK_G], float("-inf"), dtype=tl.float32)
    for first in tl.range(begin, end, BLOCK_N):
        o_s = first + tl.arange(0, BLOCK_N)
        # The token in each slot: the latest one, up to the query, that was written to it.
        o_i = t - (t - o_s) % capacity
        b_k = load_rows(p_k + o_ring, first, HEAD_DIM, end, BLOCK_N, HEAD_DIM, BLOCK_H, False)
        b_s = dot(b_q, tl.trans(b_k), WIDE, INTERPRETED) * scale_log2
        if HAS_SLOPES:
            b_s -= b_slope[:, None] * (t - o_i).to(tl.float32)[None, :]
        m_s = (o_s < end)[None, :] & (o_i[None, :] > t - b_scope[:, None])
        if HAS_STARTS:
            m_s &= (o_i >= start)[None, :]
        b_s = tl.where(m_s, b_s, float("-inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_s, 1))
        # A head that has seen nothing yet has a maximum of -inf, and -inf - -inf is NaN.
        b_shift = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
        b_p = tl.exp2(b_s - b_shift[:, None])
        b_alpha = tl.exp2(b_max - b_shift)
        b_sum = b_sum * b_alpha + tl.sum(b_p, 1)
        b_v = load_rows(p_v + o_ring, first, HEAD_DIM, end, BLOCK_N, HEAD_DIM, BLOCK_H, False)
        b_acc = b_acc * b_alpha[:, None] + dot(b_p.to(b_v.dtype), b_v, WIDE, INTERPRETED)
        b_max = b_new_max

    b_some = tl.where(b_sum == 0.0, 1.0, b_sum)  # for a part of which a head sees nothing
    o_h = tl.arange(0, BLOCK_H)
    o_row = (batch * parts + part) * GROUP + o_g
    m_o = m_g[:, None] & (o_h < HEAD_DIM)[None, :]
    tl.store(p_parts + o_row[:, None] * HEAD_DIM + o_h[None, :], b_acc / b_some[:, None], mask=m_o)
    tl.store(p_lse + o_row, b_max + tl.log2(b_some), mask=m_g)


@triton.jit
def combine_kernel(
    p_parts,
    p_lse,
    p_o,
    p_first_parts,
    o_by_batch,
    o_by_head,
    parts,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Combines the parts of one query head, weighted by their log-sum-exp. Grid: (N, B)."""
    head = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    kv_head = head // GROUP
    o_h = tl.arange(0, BLOCK_H)
    m_h = o_h < HEAD_DIM
    b_acc = tl.zeros([BLOCK_H], dtype=tl.float32)
    b_max = -float("inf")
    b_sum = 0.0
    end = tl.load(p_first_parts + kv_head + 1)
    for first in tl.range(tl.load(p_first_parts + kv_head), end, BLOCK_P):
        o_p = first + tl.arange(0, BLOCK_P)
        o_row = (batch * parts + o_p) * GROUP + head % GROUP
        b_lse = tl.load(p_lse + o_row, mask=o_p < end, other=-float("inf"))
        b_new_max = tl.maximum(b_max, tl.max(b_lse, 0))
        b_shift = tl.where(b_new_max == -float("inf"), 0.0, b_new_max)
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
    q_BNH: Tensor, cache: RollingCache, visibility: Visibility, document_starts_B: Tensor | None, scale: float
) -> Tensor:
    """`api.scoped_decode` with all arguments given.

    Raises:
        ValueError: the kernels cannot run here, or the bias is not ALiBi.
    """
    check_runs(q_BNH)
    return decode_op(
        q_BNH, cache.keys_BSH, cache.values_BSH, cache.tokens, cache.capacities, visibility.scopes_N,
        document_starts_B, visibility.alibi_slopes("triton"), scale,
    )  # fmt: skip


@torch.library.custom_op("farsight::triton_decode", mutates_args=())
def decode_op(
    q_BNH: Tensor,
    keys_BSH: Tensor,
    values_BSH: Tensor,
    tokens: Tensor,
    capacities: Sequence[int],
    scopes_N: Tensor,
    document_starts_B: Tensor | None,
    alibi_slopes_N: Tensor | None,
    scale: float,
) -> Tensor:
    """Output [B, N, H] in q's dtype, as one operator; `capacities` is the length of each key-value head's ring in `keys_BSH`."""
    q_BNH = q_BNH if q_BNH.stride(-1) == 1 else q_BNH.contiguous()
    B, N, H = q_BNH.shape
    group = N // len(capacities)
    part_slots = _part_slots(sum(capacities) * B, q_BNH.device)
    heads, first_parts, first_slots = _parts(tuple(capacities), part_slots, q_BNH.device)
    parts, block_h = heads.shape[0], max(16, triton.next_power_of_2(H))
    wide, block_g = q_BNH.dtype == torch.float32, max(16, triton.next_power_of_2(group))
    o_parts = torch.empty((B, parts, group, H), dtype=torch.float32, device=q_BNH.device)
    lse_parts = torch.empty((B, parts, group), dtype=torch.float32, device=q_BNH.device)
    o_BNH = torch.empty((B, N, H), dtype=q_BNH.dtype, device=q_BNH.device)
    absent = tokens  # never read, but the kernel needs some pointer
    starts = absent if document_starts_B is None else document_starts_B.to(q_BNH.device, torch.int32)
    slopes = absent if alibi_slopes_N is None else alibi_slopes_N.to(q_BNH.device, torch.float32)
    decode_kernel[(parts, B)](
        q_BNH, keys_BSH, values_BSH, o_parts, lse_parts, tokens, scopes_N.to(q_BNH.device, torch.int64), heads,
        first_parts, first_slots, starts, slopes, *q_BNH.stride()[:2], keys_BSH.stride(0), parts, part_slots,
        scale * LOG2_E, GROUP=group, BLOCK_G=block_g, HEAD_DIM=H, BLOCK_H=block_h,
        HAS_STARTS=document_starts_B is not None, HAS_SLOPES=alibi_slopes_N is not None, WIDE=wide,
        INTERPRETED=INTERPRETED, **launch_options(wide, block_g),
    )  # fmt: skip
    combine_kernel[(N, B)](
        o_parts, lse_parts, o_BNH, first_parts, *o_BNH.stride()[:2], parts, group, H, block_h, PARTS_AT_ONCE
    )
    return o_BNH


@decode_op.register_fake
def _(q, keys, values, tokens, capacities, scopes, starts, slopes, scale):
    return q.new_empty(q.shape)


def launch_options(wide: bool, block_g: int) -> dict[str, int]:
    """Keys per step, warps and stages of the decode kernel; not tuned on a GPU yet."""
    if wide:
        return {"BLOCK_N": 32, "num_warps": 4 if block_g == 16 else 8, "num_stages": 2}
    return {"BLOCK_N": 64, "num_warps": 4, "num_stages": 3}


def _part_slots(slots: int, device: torch.device) -> int:
    """Slots per part: a power of two, such that the slots of all rows make a few programs per multiprocessor."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return max(SHORTEST_PART, triton.next_power_of_2(triton.cdiv(slots, PROGRAMS_PER_PROCESSOR * processors)))


@lru_cache(maxsize=32)  # shared by all layers whose rings are alike, and by all tokens
def _parts(capacities: tuple[int, ...], part_slots: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The key-value head of each part; the first part of each head, and its first slot, with totals at the end; all int32."""
    counts = [triton.cdiv(capacity, part_slots) for capacity in capacities]
    heads = [head for head, count in enumerate(counts) for _ in range(count)]
    first_parts = [0, *accumulate(counts)]
    first_slots = [0, *accumulate(capacities)]

    def on_device(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return on_device(heads), on_device(first_parts), on_device(first_slots)
