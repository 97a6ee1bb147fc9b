"""The cost of serving: pairs, cache and FLOPs against direct counts."""

import pytest
import torch

from farsight.configs.schema import Alibi, Architecture, LayerRule, NoRotary, Position, Rope, Scope, SlidingWindow
from farsight.model.build import ModelConfig
from farsight.model.flops import batch_flops
from farsight.reports.serving_cost import serving_costs
from tests.reports.test_report import ARCHITECTURE


@pytest.mark.parametrize(
    "position",
    [
        Position(),
        Position(rotary=NoRotary(), heads=Scope(layout="sorted")),
        Position(heads=Scope(layout="interleaved", scope_max="length")),
        Position(heads=SlidingWindow(window=20), rules=(LayerRule(layers="1", heads=Scope(s_max=50)),)),
        Position(rotary=NoRotary(), bias=Alibi()),
    ],
    ids=["dense", "sorted", "grown", "mixed", "alibi"],
)
def test_cost_equals_counting(position):
    config = ModelConfig(ARCHITECTURE, position, trained_length=64)
    lengths = (1, 16, 64, 200)
    for cost, length in zip(serving_costs(config, lengths), lengths, strict=True):
        layers = config.layers(length)
        pairs = sum(min(scope, t + 1) for layer in layers for scope in layer.scopes for t in range(length))
        slots = sum(min(max(layer.scopes[2 * head : 2 * head + 2]), length) for layer in layers for head in range(4))
        assert cost.pairs == pairs
        assert cost.cache_bytes == slots * 8 * 2 * 2  # head dim, keys and values, two bytes each
        assert cost.dense_cache_bytes == 3 * 4 * length * 8 * 2 * 2
        assert cost.dense_pairs == 3 * 8 * length * (length + 1) // 2
        head = 2 * ARCHITECTURE.dim * ARCHITECTURE.vocab_size * length
        step = batch_flops(ARCHITECTURE, layers, torch.arange(length)[None])  # a backward pass is two forward ones
        assert 3 * (cost.attention_flops + cost.linear_flops + head) == step


def test_a_cache_in_the_order_of_scopes_holds_a_sixth_of_dense():
    architecture = Architecture(n_layers=1, n_heads=32, n_kv_heads=8, head_dim=128, dim=64, ffn_dim=64)
    config = ModelConfig(architecture, Position(rotary=Rope(), heads=Scope(layout="sorted")), trained_length=131072)
    (cost,) = serving_costs(config, [131072])
    assert cost.dense_cache_bytes == 2 * 131072 * 8 * 128 * 2
    assert cost.cache_bytes / cost.dense_cache_bytes == pytest.approx(0.1622, abs=1e-4)
