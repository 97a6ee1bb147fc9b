"""Attention per rank: work and its balance, keys from other ranks, and the cost of each order of heads.

Tensor-parallel rank r of P holds the r-th of P equal runs of heads; a context-parallel rank holds the pieces given by
`parallel/context.py`. Everything is derived from the scopes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import get_args

from farsight.configs.schema import JobConfig, Scope
from farsight.kernels.scoped_attention.semantics import visible_pairs
from farsight.launch.plan.run import Run, layers_of
from farsight.model.build import ModelConfig
from farsight.model.position.scope import HeadLayout
from farsight.parallel.context import SequenceLayout as Cut
from farsight.parallel.context import keys_seen, pieces, reaches, received_bytes

Reach = tuple[int, ...]
"""Tokens that each key-value head sees."""


@cache
def rank_pairs(scopes: tuple[int, ...], tokens: int, tp: int, cp: int, cut: Cut) -> tuple[tuple[float, ...], ...]:
    """Query-key pairs that each rank's heads see in one layer and row, indexed [tp][cp].

    Args:
        scopes: scopes of the layer's heads, in tokens.
        tokens: length of the row.
        tp, cp: degrees of tensor and context parallelism.
        cut: how rows are split over context-parallel ranks.
    """
    part = len(scopes) // tp
    spans = [pieces(rank, cp, tokens, cut) if cp > 1 else ((0, tokens),) for rank in range(cp)]
    own = [scopes[rank * part : (rank + 1) * part] for rank in range(tp)]
    return tuple(tuple(sum(visible_pairs(heads, end, begin) for begin, end in held) for held in spans) for heads in own)


def imbalance(layers: Sequence[tuple[int, ...]], tokens: int, tp: int, cp: int, cut: Cut) -> tuple[float, float, float]:
    """The busiest rank's pairs over the mean: across tensor-parallel ranks, across context-parallel ranks, and across both.

    Args:
        layers: each layer's scopes, in tokens.
        tokens, tp, cp, cut: as for `rank_pairs`.
    """
    tables = [rank_pairs(scopes, tokens, tp, cp, cut) for scopes in layers]
    total = [[sum(table[i][j] for table in tables) for j in range(cp)] for i in range(tp)]
    whole = sum(map(sum, total))
    by_tp = max(sum(row) for row in total) * tp / whole
    by_cp = max(sum(row[j] for row in total) for j in range(cp)) * cp / whole
    return by_tp, by_cp, max(map(max, total)) * tp * cp / whole


# Keys from other ranks


@cache
def reaches_of_ranks(scopes: tuple[int, ...], kv_heads: int, tokens: int, tp: int) -> tuple[Reach, ...]:
    """Reach of each key-value head, grouped by tensor-parallel rank."""
    reach, part = reaches(scopes, kv_heads, tokens), kv_heads // tp
    return tuple(reach[rank * part : (rank + 1) * part] for rank in range(tp))


@cache
def _most_received(parts: tuple[Reach, ...], cp: int, tokens: int, cut: Cut, head_dim: int, itemsize: int) -> int:
    return max(
        received_bytes(rank, cp, tokens, reach, cut, head_dim, itemsize) for rank in range(cp) for reach in set(parts)
    )


@cache
def _most_seen(parts: tuple[Reach, ...], cp: int, tokens: int, cut: Cut) -> int:
    def rows(rank: int, reach: Reach) -> int:
        spans = [keys_seen(piece, far) for piece in pieces(rank, cp, tokens, cut) for far in reach]
        return sum(end - begin for begin, end in spans)

    return max(rows(rank, reach) for rank in range(cp) for reach in set(parts))


def received_in_forward(run: Run, scopes: tuple[int, ...]) -> int:
    """Bytes of keys and values that a rank receives in a layer's forward pass of a micro-batch; the maximum over ranks."""
    if run.layout.cp == 1:
        return 0
    parts, tokens, cut = _parts(run, scopes)
    most = _most_received(parts, run.layout.cp, tokens, cut, run.config.architecture.head_dim, run.product)
    return run.layout.rows * most


def keys_seen_numbers(run: Run, scopes: tuple[int, ...]) -> int:
    """Numbers in the keys and values that a rank's queries see in one row, summed over its pieces; the maximum over ranks."""
    parts, tokens, cut = _parts(run, scopes)
    return 2 * run.config.architecture.head_dim * _most_seen(parts, run.layout.cp, tokens, cut)


def _parts(run: Run, scopes: tuple[int, ...]) -> tuple[tuple[Reach, ...], int, Cut]:
    """The reach of each tensor-parallel rank's key-value heads, the length of a row, and how rows are split."""
    tokens = run.config.training.seq_len
    parts = reaches_of_ranks(scopes, run.config.architecture.n_kv_heads, tokens, run.layout.tp)
    return parts, tokens, run.config.parallelism.context_parallel_load_balancer


def halo_bytes(run: Run, scopes: tuple[int, ...]) -> int:
    """Bytes of buffers for one layer's exchange: the rank's own keys and values, those received, and both joined."""
    if run.layout.cp == 1:
        return 0
    a = run.config.architecture
    own = 2 * run.tokens * a.n_kv_heads // run.layout.tp * a.head_dim * run.product
    return 2 * (own + received_in_forward(run, scopes))


# Orders of heads


@dataclass(frozen=True)
class HeadLayoutCost:
    """The cost of an order of scopes over heads, for the whole model."""

    imbalance: dict[int, float]
    """By tensor-parallel degree: the busiest rank's pairs over the mean."""
    halo_bytes: dict[int, int]
    """By context-parallel degree: bytes received in one row's forward pass through all layers; the maximum over ranks."""
    cache_share: float
    """Size of the KV cache as a share of a dense one, if each key-value head's is as long as its widest scope."""


def chosen_head_layout(config: JobConfig) -> HeadLayout | None:
    """The order of the model's scoped heads; None for a model without them."""
    position = config.position
    kinds = [position.heads, *(rule.heads for rule in position.rules if rule.heads is not None)]
    return next((heads.layout for heads in kinds if isinstance(heads, Scope)), None)


def compare_head_layouts(run: Run) -> dict[HeadLayout, HeadLayoutCost]:
    """The cost of each order at the run's degrees, or at degrees that divide the heads and the length if those are 1."""
    layout, a, tokens = run.layout, run.config.architecture, run.config.training.seq_len
    degrees = [layout.tp] if layout.tp > 1 else [d for d in (2, 4, 8) if a.n_kv_heads % d == 0]
    cut = run.config.parallelism.context_parallel_load_balancer
    ranks = [layout.cp] if layout.cp > 1 else [d for d in (8,) if tokens % (2 * d) == 0]
    costs = {}
    for order in get_args(HeadLayout):
        layers = [layer.scopes for layer in layers_of(_in_order(run.config, order))]
        reach = [reaches(scopes, a.n_kv_heads, tokens) for scopes in layers]
        parts = [reaches_of_ranks(scopes, a.n_kv_heads, tokens, layout.tp) for scopes in layers]
        costs[order] = HeadLayoutCost(
            {d: imbalance(layers, tokens, d, 1, cut)[0] for d in degrees},
            {d: sum(_most_received(part, d, tokens, cut, a.head_dim, run.product) for part in parts) for d in ranks},
            sum(map(sum, reach)) / (tokens * a.n_kv_heads * len(layers)),
        )
    return costs


def _in_order(config: JobConfig, order: HeadLayout) -> ModelConfig:
    def ordered(heads):
        return replace(heads, layout=order) if isinstance(heads, Scope) else heads

    position = config.position
    rules = tuple(replace(rule, heads=ordered(rule.heads)) for rule in position.rules)
    model = ModelConfig.from_job(config)
    return replace(model, position=replace(position, heads=ordered(position.heads), rules=rules))
