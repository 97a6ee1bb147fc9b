"""Splitting layers over pipeline stages by cost."""

import itertools
import random

import pytest
import torch

from farsight.configs.load import build_config
from farsight.model.build import ModelConfig
from farsight.model.flops import batch_flops
from farsight.parallel.stages import layers_of_stages, stage_costs


def brute_force(costs, stages, first, last):
    """The cost of the costliest stage in the best of all splits in which only the first and last stage may be empty."""
    n, found = len(costs), []
    for cuts in itertools.combinations_with_replacement(range(n + 1), stages - 1):
        bounds = [0, *cuts, n]
        parts = [costs[a:b] for a, b in itertools.pairwise(bounds)]
        if all(parts[1:-1]):
            sums = [sum(part) for part in parts]
            sums[0] += first
            sums[-1] += last
            found.append(max(sums))
    return min(found)


def test_no_split_is_better():
    rng = random.Random(0)
    for _ in range(200):
        costs = [rng.choice([1.0, 2.0, 7.5, rng.random()]) for _ in range(rng.randint(2, 8))]
        stages, first, last = rng.randint(1, len(costs)), rng.random(), 3 * rng.random()
        runs = layers_of_stages(costs, stages, first, last)
        assert [layer for run in runs for layer in run] == list(range(len(costs)))
        assert all(runs[1:-1])
        sums = [sum(costs[layer] for layer in run) for run in runs]
        sums[0] += first
        sums[-1] += last
        assert max(sums) == pytest.approx(brute_force(costs, stages, first, last), rel=1e-12)


def test_alike_layers_are_dealt_evenly_and_the_head_counts():
    assert layers_of_stages([1.0] * 8, 4) == (range(0, 2), range(2, 4), range(4, 6), range(6, 8))
    assert layers_of_stages([1.0] * 7, 2, last=1.0) == (range(0, 4), range(4, 7))
    assert layers_of_stages([1.0, 1.0], 4, last=5.0) == (range(0, 0), range(0, 1), range(1, 2), range(2, 2))
    with pytest.raises(ValueError, match="2 layers do not fill 5 pipeline stages; use 4 or fewer"):
        layers_of_stages([1.0, 1.0], 5)


def test_costs_add_up_to_the_models_flops():
    job = build_config(
        {
            "model": {"flavor": "tiny"},
            "training": {"seq_len": 512},
            "position": {"rules": [{"layers": "1::2", "heads": {"kind": "scope"}}]},
        }
    )
    config = ModelConfig.from_job(job)
    layers, embedding, head = stage_costs(config, 512)
    assert layers[0] > layers[1] == layers[3]  # dense layers cost more than scoped ones
    whole = batch_flops(config.architecture, config.layers(), torch.arange(512)[None])
    assert sum(layers) + embedding + head == pytest.approx(whole / 512, rel=1e-12)
