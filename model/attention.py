"""Projections, position and kernel of one layer's attention.

Shapes: B batch, L sequence, D model, N query heads, K key/value heads, H head dimension.
"""

import torch
from torch import Tensor, nn

from farsight.configs.schema import Architecture
from farsight.kernels.head_rotation import rotate_heads
from farsight.kernels.scoped_attention import Visibility, remember_scopes
from farsight.model.context import OwnKV, PendingKV, SequenceContext
from farsight.model.norm import build_norm
from farsight.model.position.garfa import HeadFrequencies, HeadRope
from farsight.model.position.layers import LayerPosition
from farsight.model.position.rope import rotate


class Attention(nn.Module):
    """Grouped-query attention in which every head has its own scope.

    Args:
        architecture: shapes, norms, biases and scale.
        position: the layer's scopes and bias, in physical head order. (Its rotation is passed to `forward` as
            tables, because layers that rotate alike share them.)
        backend: attention kernel, as in `scoped_attention`.
    """

    scopes_N: Tensor
    """int32 [N], the rank's heads."""
    bias_PN: Tensor | None
    """fp32 [P, N], coefficients of the bias of the rank's heads; None for no bias."""
    scopes: tuple[int, ...]
    """`scopes_N` as numbers."""
    heads: slice
    """The query heads that the rank holds: a part of the layer's under tensor parallelism."""
    context: SequenceContext | None = None
    """Set where the layer sees only a part of the sequence: its rank's tokens, or those that follow a cache."""
    garfa: HeadFrequencies | None
    """Separate frequencies for each key/value head. The model calls it, not this layer: FSDP gathers its weights around the
    call, which has to be outside the compiled block."""

    def __init__(self, architecture: Architecture, position: LayerPosition, backend: str) -> None:
        super().__init__()
        a = architecture
        self.head_dim, self.backend = a.head_dim, backend
        queries, keys, biases = a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim, a.attention_bias != "none"
        self.wq = nn.Linear(a.dim, queries, bias=biases)
        self.wk = nn.Linear(a.dim, keys, bias=biases)
        self.wv = nn.Linear(a.dim, keys, bias=biases)
        self.wo = nn.Linear(queries, a.dim, bias=a.attention_bias == "all")
        whole = a.qk_norm_span == "projection"
        self.q_norm: nn.Module | None = build_norm(a, queries if whole else a.head_dim) if a.qk_norm else None
        self.k_norm: nn.Module | None = build_norm(a, keys if whole else a.head_dim) if a.qk_norm else None
        self.norms_whole_projection = a.qk_norm and whole
        # The kernels multiply scores by 1/sqrt(H); queries are multiplied by what is left of another scale.
        self.query_factor = 1.0 if a.softmax_scale is None else a.softmax_scale * a.head_dim**0.5
        self.bias_kind = None if position.bias is None else position.bias.kind
        self.coefficients = 0 if position.bias is None else len(position.bias.coefficients)
        self.group = a.n_heads // a.n_kv_heads
        self.garfa = None if position.garfa is None else HeadFrequencies(position.garfa, trained=False)
        self.hold_heads(0, a.n_heads)
        self.set_position(position)

    def hold_heads(self, begin: int, end: int) -> None:
        """Keeps only the layer's query heads [begin, end) on this rank; `set_position` then fills their buffers."""
        self.heads = slice(begin, end)
        self.register_buffer("scopes_N", torch.empty(end - begin, dtype=torch.int32), persistent=False)
        bias = None if self.bias_kind is None else torch.empty(self.coefficients, end - begin, dtype=torch.float32)
        self.register_buffer("bias_PN", bias, persistent=False)
        if self.garfa is not None:
            self.garfa.hold_heads(begin // self.group, end // self.group)

    def set_position(self, position: LayerPosition) -> None:
        """Fills the buffers, which building on the meta device leaves empty.

        Args:
            position: that of the whole layer, whichever heads the rank holds.
        """
        self.scopes = tuple(position.scopes[self.heads])
        if self.scopes_N.is_meta:
            return
        self.scopes_N.copy_(torch.tensor(self.scopes, dtype=torch.int32))
        remember_scopes(self.scopes_N, self.scopes)
        if self.bias_PN is not None:
            assert position.bias is not None
            rows = [values[self.heads] for values in position.bias.coefficients]
            self.bias_PN.copy_(torch.tensor(rows, dtype=torch.float32))
        if self.garfa is not None:
            self.garfa.fill()

    def forward(
        self,
        x_BLD: Tensor,
        rope: tuple[Tensor, Tensor] | None = None,
        document_starts_BL: Tensor | None = None,
        head_rope: HeadRope | None = None,
        query_scale: Tensor | None = None,
    ) -> Tensor:
        """Attends within each head's scope and each token's document: [B, L, D], in x's dtype.

        Args:
            rope: cosine and sine tables of this layer's rotation, fp32 [B or 1, L, H]; None does not rotate.
            document_starts_BL: integers, the index in the row at which each token's document starts; None is one
                document. It covers the whole sequence even where a rank holds a part of it.
            head_rope: rotates keys, and queries if its `queries` is set, in place of `rope`.
            query_scale: fp32 [B or 1, L, 1, 1], multiplies the queries.
        """
        if self.context is not None and self.context.rotates:
            rope = head_rope = None
        k_BLKH = self._heads(self.wk(x_BLD), self.k_norm)
        v_BLKH = self._heads(self.wv(x_BLD), None)
        if head_rope is not None:
            k_BLKH = rotate_heads(k_BLKH, *head_rope[:3])
        elif rope is not None:
            k_BLKH = rotate(k_BLKH, *rope)
        # Keys and values first: the exchange overlaps with computing the queries.
        if self.context is None:
            pending: PendingKV = OwnKV(k_BLKH, v_BLKH)
        else:
            pending = self.context.exchange(k_BLKH, v_BLKH, self.scopes)
        q_BLNH = self._heads(self.wq(x_BLD), self.q_norm)
        if self.query_factor != 1.0:
            q_BLNH = q_BLNH * self.query_factor
        if query_scale is not None:
            q_BLNH = q_BLNH * query_scale.to(q_BLNH.dtype)
        if head_rope is not None and head_rope.queries:
            positions_BL, inv_freq_KF, attention_factor, _ = head_rope
            inv_freq_NF = inv_freq_KF.repeat_interleave(self.group, dim=0)
            q_BLNH = rotate_heads(q_BLNH, positions_BL, inv_freq_NF, attention_factor)
        elif rope is not None:
            q_BLNH = rotate(q_BLNH, *rope)
        visibility = Visibility.of_parts(self.scopes_N, document_starts_BL, self.bias_PN, self.bias_kind)
        o_BLNH = pending.attend(q_BLNH, visibility, self.backend)
        return self.wo(o_BLNH.flatten(-2))

    def _heads(self, x_BLD: Tensor, norm: nn.Module | None) -> Tensor:
        """A projection's heads [B, L, heads of the rank, H], normalised."""
        if norm is not None and self.norms_whole_projection:
            x_BLD, norm = norm(x_BLD), None
        # -1 instead of N or K: under tensor parallelism a rank holds only some heads.
        heads_BLNH = x_BLD.unflatten(-1, (-1, self.head_dim))
        return heads_BLNH if norm is None else norm(heads_BLNH)
