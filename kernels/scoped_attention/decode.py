"""Attention of one query over a rolling cache, on any device: one matrix product for key-value heads whose rings are equally long.

Shape suffixes: B batch, N query heads, K key-value heads, G query heads of a key-value head, H head dim, S slots.
"""

import torch
from torch import Tensor

from farsight.kernels.scoped_attention import semantics
from farsight.kernels.scoped_attention.rolling_cache import RollingCache
from farsight.kernels.scoped_attention.visibility import Visibility


@torch.no_grad()
def ring_attention(
    q_BNH: Tensor, cache: RollingCache, visibility: Visibility, document_starts_B: Tensor | None, scale: float
) -> Tensor:
    """`api.scoped_decode` with all arguments given."""
    scopes, bias = visibility.scopes_N.tolist(), visibility.bias
    semantics.check_values(scopes, None)
    token = int(cache.tokens) - 1
    if token < 0:
        raise ValueError("the cache is empty: append the token's own keys and values first")
    dtype, group = torch.promote_types(q_BNH.dtype, torch.float32), len(scopes) // cache.kv_heads
    q_BKGH = q_BNH.to(dtype).unflatten(1, (cache.kv_heads, group)) * scale
    o_BKGH = torch.empty_like(q_BKGH)
    for run in cache.runs:
        members, capacity = slice(run.start * group, run.stop * group), cache.capacities[run.start]
        for head, scope in enumerate(scopes[members], start=members.start):
            if min(scope, cache.most_tokens) > capacity:
                raise ValueError(
                    f"a query head of key-value head {head // group} has scope {scope}, of which the cache keeps "
                    f"{capacity} tokens: pass the scopes that the cache was made for"
                )
        filled = min(capacity, token + 1)
        keys_BKSH, values_BKSH = (x[:, :, :filled].to(dtype) for x in cache.rings(run))
        scores_BKGS = q_BKGH[:, run] @ keys_BKSH.transpose(2, 3)
        if min(scopes[members]) < filled or document_starts_B is not None or bias is not None:
            query = torch.tensor(token, device=q_BNH.device)
            # The token in each slot: the latest one, up to the query, that was written to it.
            held_S = token - (token - torch.arange(filled, device=q_BNH.device)) % capacity
            scopes_KG = torch.tensor(scopes[members], device=q_BNH.device).unflatten(0, (-1, group))
            seen = semantics.visible(query, held_S, scopes_KG[..., None])
            if bias is not None:
                here = bias.for_heads(members).to(q_BNH.device, dtype)
                scores_BKGS += here(token - held_S, *scopes_KG.shape, 1)
            if document_starts_B is not None:
                starts_B = document_starts_B.to(q_BNH.device)
                seen = seen & semantics.in_document(held_S, starts_B[:, None, None, None])
            scores_BKGS.masked_fill_(~seen, -torch.inf)
        o_BKGH[:, run] = scores_BKGS.softmax(-1) @ values_BKSH
    return o_BKGH.flatten(1, 2).to(q_BNH.dtype)
