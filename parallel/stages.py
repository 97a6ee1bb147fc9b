"""The layers of each pipeline stage: plain numbers, the same on every rank.

A pipeline is as fast as its costliest stage. Layers differ (a dense layer at 128k costs several times a scoped one) and
the head is a product with the whole vocabulary, so stages are balanced by FLOPs, not by the number of layers.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from farsight.kernels.scoped_attention.semantics import visible_pairs
from farsight.model.build import ModelConfig
from farsight.model.flops import layer_matmul_weights


def stage_costs(config: ModelConfig, tokens: int) -> tuple[list[float], float, float]:
    """Training FLOPs per token: of each layer, of the embedding (0, a look-up), and of the head. `layers_of_stages` balances them.

    Args:
        tokens: length of the sequence, taken as one document.
    """
    a = config.architecture
    matmul = 6 * layer_matmul_weights(a)
    layers = [matmul + 12 * a.head_dim * visible_pairs(layer.scopes, tokens) / tokens for layer in config.layers()]
    return layers, 0.0, 6.0 * a.dim * a.vocab_size


def layers_of_stages(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> tuple[range, ...]:
    """Contiguous runs of layers, one per stage, that minimise the cost of the costliest stage.

    Among equally good splits, each stage in turn takes as many layers as it can.

    Args:
        costs: cost of each layer.
        first: cost of stage 0 besides its layers: the embedding.
        last: cost of the last stage besides its layers: norm and head.

    Raises:
        ValueError: too many stages: only the first and the last may have no layers.
    """
    n = len(costs)
    if stages < 1 or stages - 2 > n or (stages == 1 and n == 0):
        raise ValueError(f"{n} layers do not fill {stages} pipeline stages; use {n + 2} or fewer")
    before = [0.0, *accumulate(costs)]

    def cost(stage: int, begin: int, end: int) -> float:
        return before[end] - before[begin] + (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)

    @cache
    def best(stage: int, begin: int) -> tuple[float, int]:
        """The lowest possible cost of the costliest stage from `stage` on, and where `stage` then ends."""
        if stage == stages - 1:
            return cost(stage, begin, n), n
        fewest = 0 if stage == 0 else 1
        needed = max(0, stages - stage - 2)  # one layer for each stage between this one and the last
        ends = range(begin + fewest, n - needed + 1)
        return min(
            ((max(cost(stage, begin, end), best(stage + 1, end)[0]), end) for end in ends), key=_least_then_longest
        )

    runs, begin = [], 0
    for stage in range(stages):
        _, end = best(stage, begin)
        runs.append(range(begin, end))
        begin = end
    return tuple(runs)


def _least_then_longest(candidate: tuple[float, int]) -> tuple[float, int]:
    cost, end = candidate
    return cost, -end
