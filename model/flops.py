"""Exact FLOPs of a training step: matrix products by their shapes, attention by the pairs that heads really see.

torchtitan counts full attention for every head; with scopes that would flatter the MFU several times over.
"""

from collections.abc import Sequence

from torch import Tensor

from configs.schema import Architecture
from kernels.scoped_attention.semantics import visible_pairs_at_positions
from model.layers import LayerPosition


def matmul_flops_per_token(architecture: Architecture) -> int:
    """FLOPs of one token's matrix products, forward and backward: 6 for each weight of a linear layer or the head.

    The embedding is a look-up and counts nothing; a tied head counts as a head.
    """
    a = architecture
    attention = 2 * a.dim * a.head_dim * (a.n_heads + a.n_kv_heads)
    return 6 * (a.n_layers * (attention + 3 * a.dim * a.ffn_dim) + a.dim * a.vocab_size)


def attention_flops_per_pair(head_dim: int) -> int:
    """FLOPs of one visible query-key pair of one head, forward (4·H) and backward (8·H), recomputation not counted."""
    return 12 * head_dim


def batch_pairs(layers: Sequence[LayerPosition], positions_BL: Tensor) -> int:
    """Query-key pairs that the heads of all layers see in a batch.

    Args:
        positions_BL: each token's distance from the start of its document.
    """
    return visible_pairs_at_positions((scope for layer in layers for scope in layer.scopes), positions_BL)
