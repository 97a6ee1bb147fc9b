"""Scoped attention straight from the formula, O(L²) in memory: all other backends are tested against it.

Shape suffixes: B batch, L tokens (Lq queries, Lk keys), N query heads, K key-value heads, H head dim.
"""

import torch
from torch import Tensor

from farsight.kernels.scoped_attention import semantics


def reference_attention(
    q_BLNH: Tensor,
    k_BLKH: Tensor,
    v_BLKH: Tensor,
    scopes_N: Tensor,
    document_starts_BL: Tensor | None,
    alibi_slopes_N: Tensor | None,
    q_offset: int,
    scale: float,
) -> Tensor:
    """`api.scoped_attention` with all arguments given, in fp32 or wider; gradients come from autograd."""
    if not torch.compiler.is_compiling():
        semantics.check_values(scopes_N.tolist(), document_starts_BL)
    Lq, N = q_BLNH.shape[1:3]
    Lk, K = k_BLKH.shape[1:3]
    dtype = torch.promote_types(q_BLNH.dtype, torch.float32)
    scopes_N = scopes_N.to(q_BLNH.device)
    q_BNLH = q_BLNH.to(dtype).transpose(1, 2)
    k_BNLH, v_BNLH = (x.to(dtype).transpose(1, 2).repeat_interleave(N // K, dim=1) for x in (k_BLKH, v_BLKH))

    with torch.autocast(q_BLNH.device.type, enabled=False):
        scores_BNLL = q_BNLH @ k_BNLH.transpose(-1, -2) * scale
        if alibi_slopes_N is not None:
            token = torch.arange(Lk, device=q_BLNH.device)
            slopes = alibi_slopes_N.to(q_BLNH.device, dtype)[:, None, None]
            scores_BNLL = scores_BNLL + semantics.alibi_bias(token[q_offset:, None], token, slopes)
        if document_starts_BL is None:
            seen = semantics.visibility(scopes_N, Lq, q_offset)
        else:
            seen = semantics.visibility_in_documents(scopes_N, document_starts_BL, q_offset)
        probabilities_BNLL = scores_BNLL.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        return (probabilities_BNLL @ v_BNLH).transpose(1, 2).to(q_BLNH.dtype)
