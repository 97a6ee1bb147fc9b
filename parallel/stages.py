"""Which layers each pipeline stage holds: plain numbers, the same on every rank.

A pipeline is as fast as its costliest stage. Layers differ (a dense layer at 128k costs several times a scoped one) and
the head is a product with the whole vocabulary, so stages are balanced by FLOPs and not by the number of layers.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from farsight.kernels.scoped_attention.semantics import visible_pairs
from farsight.model.build import ModelConfig
from farsight.model.flops import layer_matmul_weights


def stage_costs(config: ModelConfig, tokens: int) -> tuple[list[float], float, float]:
    """FLOPs that training takes for each token: of every layer, of the embedding (none: a look-up), and of the head.

    Args:
        tokens: of a sequence that is one document.
    """
    a = config.architecture
    matmul = 6 * layer_matmul_weights(a)
    layers = [matmul + 12 * a.head_dim * visible_pairs(layer.scopes, tokens) / tokens for layer in config.layers()]
    return layers, 0.0, 6.0 * a.dim * a.vocab_size


def layers_of_stages(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> tuple[range, ...]:
    """Contiguous runs of layers, one a stage, so that the costliest stage costs the least.

    Of the runs that do so, each stage in turn takes as many layers as it can.

    Args:
        costs: of each layer.
        first: what stage 0 costs besides its layers: the embedding.
        last: the same of the last stage: norm and head.

    Raises:
        ValueError: more stages than layers, embedding and head allow. Only the first and the last may be without layers.
    """
    n = len(costs)
    if stages < 1 or stages - 2 > n or (stages == 1 and n == 0):
        raise ValueError(f"{n} layers do not fill {stages} pipeline stages; use {n + 2} or fewer")
    before = [0.0, *accumulate(costs)]

    def cost(stage: int, begin: int, end: int) -> float:
        return before[end] - before[begin] + (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)

    @cache
    def best(stage: int, begin: int) -> tuple[float, int]:
        """The least that the costliest of `stage` and those after it can cost, and where `stage` ends for it."""
        if stage == stages - 1:
            return cost(stage, begin, n), n
        fewest = 0 if stage == 0 else 1
        needed = max(0, stages - stage - 2)  # by the stages between this one and the last
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
