"""The cost of serving a model, from its config alone: bytes of the KV cache and FLOPs of a prefill."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from farsight.inference.kv_cache import Batch, dense_bytes, rolling_layers
from farsight.kernels.scoped_attention.semantics import visible_pairs
from farsight.model.build import ModelConfig, build_model, set_length
from farsight.model.flops import layer_matmul_weights

CACHE_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class ServingCost:
    """The cost of one sequence of `length` tokens."""

    length: int
    cache_bytes: int
    """Bytes of the rolling caches that `farsight generate` would allocate, with keys and values in bfloat16."""
    dense_cache_bytes: int
    """Bytes of a cache that keeps every token for every key/value head."""
    pairs: int
    """Query-key pairs that the heads of all layers see in a prefill."""
    dense_pairs: int
    """The same if every head sees all tokens before the query."""
    flops_a_pair: int
    linear_flops: int
    """FLOPs of the layers' projections and feed-forward in a prefill; its output head, for one token, is left out."""

    @property
    def attention_flops(self) -> int:
        return self.pairs * self.flops_a_pair

    @property
    def dense_attention_flops(self) -> int:
        return self.dense_pairs * self.flops_a_pair

    @property
    def prefill_share(self) -> float:
        """FLOPs of the whole prefill over those of the same shapes with dense attention."""
        return (self.attention_flops + self.linear_flops) / (self.dense_attention_flops + self.linear_flops)


def serving_costs(config: ModelConfig, lengths: Sequence[int]) -> list[ServingCost]:
    """The cost at each length; caches are built on the meta device, which takes no memory.

    Attention's FLOPs are two products of head_dim for each visible pair, as `model.flops` counts them.

    Raises:
        ConfigError: positions that cannot be set for a length.
    """
    a = config.architecture
    with torch.device("meta"):
        model = build_model(config)
    costs = []
    for length in lengths:
        set_length(model, config, length)
        batch = Batch((0,), length, length, torch.device("meta"), CACHE_DTYPE)
        cache_bytes = sum(cache.nbytes for cache in rolling_layers(model, batch).values())
        scopes = [scope for layer in config.layers(length) for scope in layer.scopes]
        costs.append(
            ServingCost(
                length,
                cache_bytes,
                dense_bytes(model, batch),
                visible_pairs(scopes, length),
                visible_pairs([length] * len(scopes), length),
                4 * a.head_dim,
                2 * layer_matmul_weights(a) * a.n_layers * length,
            )
        )
    return costs
