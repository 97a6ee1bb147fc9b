"""Attention of a prompt's next tokens over a rolling cache and themselves.

Shape suffixes: B batch, L tokens of the chunk, T keys from cache and chunk, N query heads, K key-value heads, H head dim.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from farsight.kernels.scoped_attention.rolling_cache import RollingCache
from farsight.kernels.scoped_attention.visibility import Visibility


@torch.no_grad()
def chunk_attention(
    attend: Callable[..., Tensor],
    q_BLNH: Tensor,
    k_BLKH: Tensor,
    v_BLKH: Tensor,
    cache: RollingCache,
    visibility: Visibility,
    document_starts_B: Tensor | None,
    seen: int,
) -> Tensor:
    """`api.scoped_prefill`; `attend` is `scoped_attention`, called for all key-value heads with equally long rings at once."""
    L = q_BLNH.shape[1]
    group = q_BLNH.shape[2] // cache.kv_heads
    if seen + L > cache.most_tokens:
        raise ValueError(
            f"{seen} tokens and {L} more do not fit into a cache of most_tokens = {cache.most_tokens}: make it longer"
        )
    o_BLNH = torch.empty_like(q_BLNH)
    together: list[tuple[Tensor, Tensor] | None] = []
    for run in cache.runs:
        capacity = cache.capacities[run.start]
        if seen + L <= capacity:
            together.append(None)
            continue
        # This chunk is about to overwrite tokens that it still sees.
        past = cache.last_tokens(run, seen, min(seen, capacity - 1))
        new = k_BLKH[:, :, run], v_BLKH[:, :, run]
        together.append((torch.cat((past[0], new[0]), dim=1), torch.cat((past[1], new[1]), dim=1)))
    cache.append(k_BLKH, v_BLKH)
    for run, copied in zip(cache.runs, together, strict=True):
        keys_BTKH, values_BTKH = copied or cache.last_tokens(run, seen + L, seen + L)
        before = keys_BTKH.shape[1] - L
        starts_BT = None
        if document_starts_B is not None:
            own = torch.arange(before + L, device=q_BLNH.device)
            # Relative to the first key. A token before its row's start is padding, and sees itself.
            starts_BT = torch.minimum((document_starts_B.long() - (seen - before)).clamp_min(0)[:, None], own)
        queries = slice(run.start * group, run.stop * group)
        o_BLNH[:, :, queries] = attend(
            q_BLNH[:, :, queries],
            keys_BTKH,
            values_BTKH,
            replace(visibility.for_heads(queries), document_starts_BL=starts_BT, q_offset=before),
        )
    return o_BLNH
