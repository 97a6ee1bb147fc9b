"""Projections, position and kernel of one layer's attention.

Shapes: B batch, L sequence, D model, N query heads, K key/value heads, H head dimension.
"""

import torch
from torch import Tensor, nn

from configs.schema import Architecture
from kernels.scoped_attention.api import scoped_attention
from model.layers import LayerPosition
from model.rope import rotate


class Attention(nn.Module):
    """Grouped-query attention in which every head has a scope of its own.

    Args:
        architecture: shapes; `qk_norm` adds RMSNorm over each head's queries and keys.
        position: the layer's scopes and ALiBi slopes, in physical head order. (Its rotation arrives as tables,
            because layers that rotate alike share them.)
        backend: kernel, as `scoped_attention` takes it.
    """

    scopes_N: Tensor
    slopes_N: Tensor | None

    def __init__(self, architecture: Architecture, position: LayerPosition, backend: str) -> None:
        super().__init__()
        a = architecture
        self.head_dim, self.backend = a.head_dim, backend
        self.wq = nn.Linear(a.dim, a.n_heads * a.head_dim, bias=False)
        self.wk = nn.Linear(a.dim, a.n_kv_heads * a.head_dim, bias=False)
        self.wv = nn.Linear(a.dim, a.n_kv_heads * a.head_dim, bias=False)
        self.wo = nn.Linear(a.n_heads * a.head_dim, a.dim, bias=False)
        self.q_norm = nn.RMSNorm(a.head_dim, eps=a.norm_eps) if a.qk_norm else None
        self.k_norm = nn.RMSNorm(a.head_dim, eps=a.norm_eps) if a.qk_norm else None
        self.register_buffer("scopes_N", torch.empty(a.n_heads, dtype=torch.int32), persistent=False)
        slopes = None if position.alibi_slopes is None else torch.empty(a.n_heads, dtype=torch.float32)
        self.register_buffer("slopes_N", slopes, persistent=False)
        self.set_position(position)

    def set_position(self, position: LayerPosition) -> None:
        """Fills the buffers, which building on the meta device leaves empty."""
        if self.scopes_N.is_meta:
            return
        self.scopes_N.copy_(torch.tensor(position.scopes, dtype=torch.int32))
        if self.slopes_N is not None:
            self.slopes_N.copy_(torch.tensor(position.alibi_slopes, dtype=torch.float32))

    def forward(
        self,
        x_BLD: Tensor,
        rope: tuple[Tensor, Tensor] | None = None,
        document_starts_BL: Tensor | None = None,
    ) -> Tensor:
        """Attends within each head's scope and each token's document.

        Args:
            rope: cosine and sine tables of this layer's rotation; None does not rotate.
            document_starts_BL: index in the row at which each token's document starts; None is one document.
        """
        # -1 and not N or K: under tensor parallelism a rank holds some of the heads.
        q_BLNH = self.wq(x_BLD).unflatten(-1, (-1, self.head_dim))
        k_BLKH = self.wk(x_BLD).unflatten(-1, (-1, self.head_dim))
        v_BLKH = self.wv(x_BLD).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_BLNH, k_BLKH = self.q_norm(q_BLNH), self.k_norm(k_BLKH)
        if rope is not None:
            q_BLNH, k_BLKH = rotate(q_BLNH, *rope), rotate(k_BLKH, *rope)
        o_BLNH = scoped_attention(
            q_BLNH,
            k_BLKH,
            v_BLKH,
            self.scopes_N,
            document_starts_BL=document_starts_BL,
            alibi_slopes_N=self.slopes_N,
            backend=self.backend,
        )
        return self.wo(o_BLNH.flatten(-2))
