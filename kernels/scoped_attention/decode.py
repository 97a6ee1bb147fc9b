"""Attention of one token over a rolling cache, on any device: one matrix product for key-value heads whose rings are equally long.

Shape suffixes: B batch, N query heads, K key-value heads, G query heads of a key-value head, H head dim, S slots.
"""

import torch
from torch import Tensor

from farsight.kernels.scoped_attention import semantics
from farsight.kernels.scoped_attention.host import host_values
from farsight.kernels.scoped_attention.rolling_cache import RollingCache
from farsight.kernels.scoped_attention.visibility import Visibility


@torch.no_grad()
def ring_attention(
    q_BNH: Tensor,
    k_BKH: Tensor,
    v_BKH: Tensor,
    cache: RollingCache,
    visibility: Visibility,
    document_starts_B: Tensor | None,
    scale: float,
    seen: int | None,
) -> Tensor:
    """`api.scoped_decode`, with the scale given."""
    scopes, bias = host_values(visibility.scopes_N), visibility.bias
    semantics.check_values(scopes, None)
    token = int(cache.tokens) if seen is None else seen
    dtype, group = torch.promote_types(q_BNH.dtype, torch.float32), len(scopes) // cache.kv_heads
    for head, scope in enumerate(scopes):
        if min(scope, cache.most_tokens) > (capacity := cache.capacities[head // group]):
            raise ValueError(
                f"a query head of key-value head {head // group} has scope {scope}, of which the cache keeps "
                f"{capacity} tokens: pass the scopes that the cache was made for"
            )
    cache.append(k_BKH[:, None], v_BKH[:, None])
    q_BKGH = q_BNH.to(dtype).unflatten(1, (cache.kv_heads, group)) * scale
    o_BKGH = torch.empty_like(q_BKGH)
    # Padding sees itself.
    starts_B = None if document_starts_B is None else document_starts_B.to(q_BNH.device).clamp_max(token)
    for run in cache.runs:
        members, capacity = slice(run.start * group, run.stop * group), cache.capacities[run.start]
        filled = min(capacity, token + 1)
        keys_BKSH, values_BKSH = (x[:, :, :filled].to(dtype) for x in cache.rings(run))
        scores_BKGS = q_BKGH[:, run] @ keys_BKSH.transpose(2, 3)
        if min(scopes[members]) < filled or starts_B is not None or bias is not None:
            # The token in each slot: the latest one, up to the query, that was written to it.
            held_S = token - (token - torch.arange(filled, device=q_BNH.device)) % capacity
            scopes_KG = visibility.scopes_N[members].to(q_BNH.device).unflatten(0, (-1, group))
            mask = semantics.visible(token, held_S, scopes_KG[..., None])
            if bias is not None:
                here = bias.for_heads(members).to(q_BNH.device, dtype)
                scores_BKGS += here(token - held_S, *scopes_KG.shape, 1)
            if starts_B is not None:
                mask = mask & semantics.in_document(held_S, starts_B[:, None, None, None])
            scores_BKGS.masked_fill_(~mask, -torch.inf)
        o_BKGH[:, run] = scores_BKGS.softmax(-1) @ values_BKSH
    return o_BKGH.flatten(1, 2).to(q_BNH.dtype)
