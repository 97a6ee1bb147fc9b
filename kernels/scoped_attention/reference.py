"""Scoped attention straight from the formula, O(L²) in memory: all other backends are tested against it.

Shape suffixes: B batch, L tokens (Lq queries, Lk keys), N query heads, K key-value heads, H head dim.
"""

import torch
from torch import Tensor

from farsight.kernels.scoped_attention import semantics
from farsight.kernels.scoped_attention.visibility import Visibility


def reference_attention(q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, visibility: Visibility, scale: float) -> Tensor:
    """`api.scoped_attention` with all arguments given, in fp32 or wider; gradients come from autograd."""
    if not torch.compiler.is_compiling():
        semantics.check_values(visibility.scopes_N.tolist(), visibility.document_starts_BL)
    Lq, N = q_BLNH.shape[1:3]
    K = k_BLKH.shape[2]
    dtype = torch.promote_types(q_BLNH.dtype, torch.float32)
    visibility = visibility.to(q_BLNH.device)
    q_BNLH = q_BLNH.to(dtype).transpose(1, 2)
    k_BNLH, v_BNLH = (x.to(dtype).transpose(1, 2).repeat_interleave(N // K, dim=1) for x in (k_BLKH, v_BLKH))

    with torch.autocast(q_BLNH.device.type, enabled=False):
        scores_BNLL = q_BNLH @ k_BNLH.transpose(-1, -2) * scale
        bias_NLL = visibility.score_bias(Lq, dtype)
        if bias_NLL is not None:
            scores_BNLL = scores_BNLL + bias_NLL
        probabilities_BNLL = scores_BNLL.masked_fill(~visibility.mask(Lq), -torch.inf).softmax(dim=-1)
        return (probabilities_BNLL @ v_BNLH).transpose(1, 2).to(q_BLNH.dtype)
