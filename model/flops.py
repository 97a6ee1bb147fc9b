"""Exact FLOPs of a training step: matrix products by their shapes, attention by the pairs that heads really see.

torchtitan counts full attention for every head; with scopes that would flatter the MFU several times over.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from configs.schema import Architecture
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
        positions_BL: each token's distance from the start of its document; it sees min(scope, position + 1) tokens.
    """
    scopes = Counter(scope for layer in layers for scope in layer.scopes)
    depth_counts = torch.bincount(positions_BL.flatten().long() + 1)
    depths = torch.arange(depth_counts.numel())
    tokens_upto, depth_upto = depth_counts.cumsum(0), (depth_counts * depths).cumsum(0)
    deepest, tokens = depth_counts.numel() - 1, int(tokens_upto[-1])
    pairs = 0
    for scope, heads in scopes.items():
        s = min(scope, deepest)
        pairs += heads * (int(depth_upto[s]) + s * (tokens - int(tokens_upto[s])))
    return pairs
