"""Exact FLOPs of a training step: matrix products by their shapes, attention by the query-key pairs that heads really see.

Counting full attention for every head, as is usual, would overstate the MFU of scopes several times. Only necessary work
is counted: no weight gradients of frozen layers, no backward pass below the lowest trained layer, and no recomputation.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from farsight.configs.schema import Architecture
from farsight.kernels.scoped_attention.semantics import visible_pairs_at_positions
from farsight.model.position.layers import LayerPosition


@dataclass(frozen=True)
class Adapters:
    """Adapters that train on top of frozen layers."""

    lowest: int
    """Layer at which the backward pass ends."""
    weights: int
    """Number of weights in all adapters' matrices."""


def batch_flops(
    architecture: Architecture,
    layers: Sequence[LayerPosition],
    positions_BL: Tensor,
    trained_layers: Collection[int] | None = None,
    adapters: Adapters | None = None,
) -> int:
    """FLOPs of a batch, forward and backward.

    Args:
        positions_BL: integers, each token's distance from the start of its document.
        trained_layers: None trains all parameters, or only the adapters if there are any.
    """
    lowest = min(trained_layers) if trained_layers else 0
    if adapters is not None:
        lowest = adapters.lowest
    per_pair: Counter[int] = Counter()  # FLOPs by scope: 4 forward, and 8 backward where the backward pass gets
    for number, layer in enumerate(layers):
        for scope in layer.scopes:
            per_pair[scope] += 4 + 8 * (number >= lowest)
    attention = architecture.head_dim * visible_pairs_at_positions(per_pair, positions_BL)
    return matmul_flops_per_token(architecture, trained_layers, adapters) * positions_BL.numel() + attention


def matmul_flops_per_token(
    architecture: Architecture, trained_layers: Collection[int] | None = None, adapters: Adapters | None = None
) -> int:
    """FLOPs of one token's matrix products. Each weight of a linear layer or the head costs 2 in the forward pass, 2 for the
    gradient of its input, and 2 for its own gradient.

    The embedding is a look-up and costs nothing; a tied head counts as a head.
    """
    a = architecture
    layer, head = layer_matmul_weights(a), a.dim * a.vocab_size
    if adapters is not None:
        passed_back = (a.n_layers - adapters.lowest) * layer + head
        own = len(trained_layers or ()) * layer
        return 2 * (a.n_layers * layer + head) + 2 * passed_back + 2 * own + 6 * adapters.weights
    if not trained_layers:
        return 6 * (a.n_layers * layer + head)
    passed_back = (a.n_layers - min(trained_layers)) * layer + head
    return 2 * (a.n_layers * layer + head) + 2 * passed_back + 2 * len(trained_layers) * layer


def layer_matmul_weights(architecture: Architecture) -> int:
    """Number of weights in a layer's linear parts: projections and feed-forward."""
    a = architecture
    return 2 * a.dim * a.head_dim * (a.n_heads + a.n_kv_heads) + 3 * a.dim * a.ffn_dim
