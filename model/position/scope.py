"""Head scopes: how many tokens each head sees, and which physical head gets which scope.

A scope S includes the token itself: at token t a head sees t − S < i ≤ t (SCOPE, Eq. 2). Heads and layers count
from 0, in physical order: head n reads KV head n // (N / K), and tensor-parallel rank r of P holds the r-th of P
equal, contiguous runs of heads.

Scopes are powers of one ratio, so the few widest heads do most of the work, and the layout decides which rank
gets them. Attention work of the busiest rank relative to the mean, N = 32 query heads, K = 8 KV heads, by TP degree:

    ==============  ==================  ==================  ==================
    T               4,096               32,768              131,072
    TP degree       2     4     8       2     4     8       2     4     8
    ==============  ==================  ==================  ==================
    sorted          1.96  3.33  4.45    1.98  3.59  5.17    1.99  3.71  5.57
    interleaved     1.08  1.24  1.62    1.10  1.30  1.81    1.11  1.35  1.94
    group_balanced  1.13  2.23  4.45    1.30  2.59  5.17    1.40  2.79  5.57
    ==============  ==================  ==================  ==================

Interleaved balances best, but every KV group holds a wide head, so every group's cache and halo is long: at
131,072 tokens a cache limited to each group's widest scope has 38 % of the dense size. Group-balanced keeps
neighbouring scopes together, so most groups stay short (16 %); but its widest group alone does 70 % of the
work, which no order of whole groups can split. Sorted is the paper's order, meant for one rank.
"""

from bisect import bisect_left
from functools import cache
from typing import Literal, assert_never

from farsight.configs.schema import Dense, Heads, Scope, SlidingWindow
from farsight.kernels.scoped_attention.semantics import visible_pairs

DENSE_SCOPE = 2**31 - 1
"""Scope of a head that sees every earlier token: the largest int32."""

_LAYOUT_LENGTH = 131072
"""T at which group_balanced compares the cost of groups: fixed, because head order is part of the stored weights."""

HeadLayout = Literal["sorted", "interleaved", "group_balanced"]


@cache
def geometric_scopes(longest: int, heads: int) -> tuple[int, ...]:
    """ceil(T^(h/H)) for h = 1 … H, exactly (SCOPE, Eq. 3); T = `longest`, H = `heads`. `head_scopes` puts them in order.

    Each is the smallest s with s^H ≥ T^h, found in integers: floating point gives T + 1 for the last scope of 32
    heads from T = 32,768 on. The last scope is always T, the order never decreases, and no scope is 1 unless T is.
    """
    if longest < 1:
        raise ValueError(f"the longest scope is {longest}; set position.heads.s_max to 1 token or more")
    if heads < 1:
        raise ValueError(f"scopes are for at least one head, but n_heads is {heads}")
    candidates = range(1, longest + 1)
    return tuple(
        candidates[bisect_left(candidates, longest**h, key=lambda scope: scope**heads)] for h in range(1, heads + 1)
    )


def layout_order(layout: HeadLayout, heads: int, kv_heads: int) -> tuple[int, ...]:
    """The scope of each physical head, as an index into the scopes from narrow to wide.

    sorted: head n has the n-th scope.
    interleaved: a KV group holds every K-th scope, and groups follow each other in bit-reversed order. So rank r
        of P holds every P-th scope, for all powers of two P that divide K at once: bit reversal makes the runs
        of 2, 4, 8 … ranks nest. Other K reverse the digits of their prime factors.
    group_balanced: a KV group holds neighbouring scopes. Groups are dealt to the two halves of the ranks so that
        they cost about the same, then to the two halves of each, and so on: groups 7 0, 2 1, 6 3, 5 4 for K = 8.
        Costs are taken at T = 131,072, so that the order is the same at every length.

    Raises ValueError when `heads` is not a multiple of `kv_heads`.
    """
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(f"n_heads ({heads}) must be a multiple of n_kv_heads ({kv_heads}), both above 0")
    group_size = heads // kv_heads
    match layout:
        case "sorted":
            return tuple(range(heads))
        case "interleaved":
            groups = _digit_reversed(range(kv_heads))
            return tuple(group + kv_heads * step for group in groups for step in range(group_size))
        case "group_balanced":
            pairs = [visible_pairs([scope], _LAYOUT_LENGTH) for scope in geometric_scopes(_LAYOUT_LENGTH, heads)]
            cost = [sum(pairs[group * group_size : (group + 1) * group_size]) for group in range(kv_heads)]
            groups = _dealt(list(range(kv_heads)), cost)
            return tuple(group * group_size + step for group in groups for step in range(group_size))
        case _:
            assert_never(layout)


def head_scopes(heads: Heads, n_heads: int, n_kv_heads: int, trained_length: int, length: int) -> tuple[int, ...]:
    """Scope in tokens of each physical head of one layer.

    `trained_length` is the training sequence length of the stage, `length` that of the current sequence, in tokens.
    Only SCOPE uses them: T is `s_max`, or the trained length if that is 0. With `scope_max = "length"` a sequence
    longer than the trained length raises T to its own length; shorter ones leave T as trained.

    Raises ValueError for a window or s_max out of range.
    """
    match heads:
        case Dense():
            return (DENSE_SCOPE,) * n_heads
        case SlidingWindow():
            if not 1 <= heads.window <= DENSE_SCOPE:
                raise ValueError(f"position.heads.window is {heads.window}; set 1 to {DENSE_SCOPE} tokens")
            return (heads.window,) * n_heads
        case Scope():
            if not 0 <= heads.s_max <= DENSE_SCOPE:
                raise ValueError(
                    f"position.heads.s_max is {heads.s_max}; set the longest scope in tokens, up to {DENSE_SCOPE}, "
                    "or 0 to follow the training sequence length"
                )
            longest = heads.s_max or trained_length
            if heads.scope_max == "length" and length > trained_length:
                longest = max(longest, length)
            scopes = geometric_scopes(longest, n_heads)
            return tuple(scopes[index] for index in layout_order(heads.layout, n_heads, n_kv_heads))
        case _:
            assert_never(heads)


def cost_ratio(length: int, scopes: tuple[int, ...]) -> float:
    """Causal pairs of dense heads over those of these scopes: the factor by which attention work shrinks.

    Exact, unlike the paper's Eq. 5, which ignores that wide windows are cut off at the start of the sequence.
    """
    return visible_pairs([length] * len(scopes), length) / visible_pairs(scopes, length)


def _smallest_factor(n: int) -> int:
    """The smallest prime factor of n ≥ 2."""
    return next(factor for factor in range(2, n + 1) if n % factor == 0)


def _digit_reversed(groups: range) -> list[int]:
    """Bit reversal for a power of two, e.g. 0 4 2 6 1 5 3 7; in general, reversed digits in the prime factors."""
    if len(groups) <= 1:
        return list(groups)
    parts = _smallest_factor(len(groups))
    return [group for part in range(parts) for group in _digit_reversed(groups[part::parts])]


def _dealt(groups: list[int], cost: list[int]) -> list[int]:
    """Orders groups so that equal contiguous shards of them cost about the same.

    Costliest first, each group goes to the cheapest part that has room; each part is then divided in the same
    way. `groups` is sorted by cost.
    """
    if len(groups) <= 1:
        return groups
    n_parts = _smallest_factor(len(groups))
    parts: list[list[int]] = [[] for _ in range(n_parts)]
    for group in reversed(groups):
        with_room = [part for part in parts if len(part) < len(groups) // n_parts]
        min(with_room, key=lambda part: sum(cost[member] for member in part)).append(group)
    return [group for part in parts for group in _dealt(sorted(part), cost)]
