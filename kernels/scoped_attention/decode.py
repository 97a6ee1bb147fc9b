"""One query against a rolling cache, on any device: a matrix product for each key-value head over its own ring.

Shape suffixes: B batch, N query heads, K key-value heads, G query heads of a key-value head, H head dim, S slots.
"""

import torch
from torch import Tensor

from . import semantics
from .rolling_cache import RollingCache


@torch.no_grad()
def ring_attention(
    q_BNH: Tensor,
    cache: RollingCache,
    scopes_N: Tensor,
    document_starts_B: Tensor | None,
    alibi_slopes_N: Tensor | None,
    scale: float,
) -> Tensor:
    """`api.scoped_decode` with all arguments given."""
    scopes = scopes_N.tolist()
    semantics.check_values(scopes, None)
    token = int(cache.tokens) - 1
    if token < 0:
        raise ValueError("the cache is empty: append the token's own keys and values first")
    dtype, group = torch.promote_types(q_BNH.dtype, torch.float32), len(scopes) // cache.kv_heads
    q_BKGH = q_BNH.to(dtype).unflatten(1, (cache.kv_heads, group)) * scale
    o_BKGH = torch.empty_like(q_BKGH)
    first = 0
    for head, capacity in enumerate(cache.capacities):
        widest = max(scopes[head * group : (head + 1) * group])
        if min(widest, cache.most_tokens) > capacity:
            raise ValueError(
                f"a query head of key-value head {head} has scope {widest}, of which the cache keeps {capacity} tokens: "
                "pass the scopes that the cache was made for"
            )
        filled = min(capacity, token + 1)
        ring = slice(first, first + filled)
        first += capacity
        keys, values = cache.keys_BSH[:, ring].to(dtype), cache.values_BSH[:, ring].to(dtype)
        members = slice(head * group, (head + 1) * group)
        scores_BGS = q_BKGH[:, head] @ keys.transpose(1, 2)
        if min(scopes[members]) < filled or document_starts_B is not None or alibi_slopes_N is not None:
            query = torch.tensor(token, device=q_BNH.device)
            # Which token a slot holds: the last one, up to the query, that fell on it.
            held_S = token - (token - torch.arange(filled, device=q_BNH.device)) % capacity
            seen = semantics.visible(query, held_S, torch.tensor(scopes[members], device=q_BNH.device)[:, None])
            if alibi_slopes_N is not None:
                slopes_G = alibi_slopes_N[members].to(q_BNH.device, dtype)
                scores_BGS += semantics.alibi_bias(token, held_S, slopes_G[:, None])
            if document_starts_B is not None:
                seen = seen & semantics.in_document(held_S, document_starts_B.to(q_BNH.device)[:, None, None])
            scores_BGS.masked_fill_(~seen, -torch.inf)
        o_BKGH[:, head] = scores_BGS.softmax(-1) @ values
    return o_BKGH.flatten(1, 2).to(q_BNH.dtype)
