"""Scopes against Eq. 3 in exact and high-precision arithmetic, and layouts against their documented imbalance."""

from decimal import ROUND_CEILING, Decimal, localcontext

import numpy as np
import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from farsight.configs.schema import Dense, Scope, SlidingWindow
from farsight.kernels.scoped_attention.semantics import visible_pairs
from farsight.model.position.bias import alibi_slopes
from farsight.model.position.scope import DENSE_SCOPE, cost_ratio, geometric_scopes, head_scopes, layout_order

LENGTHS = [4096, 32768, 131072, 262144]
LAYOUTS = ["sorted", "interleaved", "group_balanced"]
SHAPES = [(32, 8), (32, 32), (16, 8), (8, 8), (64, 8), (24, 6), (40, 10), (12, 3), (7, 7), (8, 1), (1, 1)]


# ── Eq. 3 ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("longest", [2, 3, 100, 1000, *LENGTHS])
def test_scopes_satisfy_the_definition(longest, heads):
    scopes = geometric_scopes(longest, heads)
    assert len(scopes) == heads
    for h, scope in enumerate(scopes, start=1):
        assert (scope - 1) ** heads < longest**h <= scope**heads
    assert list(scopes) == sorted(scopes)
    assert scopes[-1] == longest
    assert min(scopes) >= 2


@pytest.mark.parametrize("heads", [8, 16, 32])
@pytest.mark.parametrize("longest", LENGTHS)
def test_scopes_equal_high_precision_powers(longest, heads):
    with localcontext() as context:
        context.prec = 80
        tiny = (
            Decimal(10) ** -60
        )  # above the rounding of exact powers, far below the distance of other powers to an integer
        expected = tuple(
            int((Decimal(longest) ** (Decimal(h) / heads) - tiny).to_integral_value(ROUND_CEILING))
            for h in range(1, heads + 1)
        )
    assert geometric_scopes(longest, heads) == expected


def test_known_scopes():
    assert geometric_scopes(8, 3) == (2, 4, 8)  # Figure 3
    assert geometric_scopes(262144, 16)[7] == 512  # floating point gives 513
    assert geometric_scopes(4096, 8) == (3, 8, 23, 64, 182, 512, 1449, 4096)
    assert geometric_scopes(1, 4) == (1, 1, 1, 1)


# ── Work ──────────────────────────────────────────────────────────────────────────────────────────────


def test_visible_pairs_counts_the_mask():
    for length in (1, 2, 7, 16):
        for scope in (1, 2, 5, 16, 17, DENSE_SCOPE):
            mask = sum(t - scope < i <= t for t in range(length) for i in range(length))  # Eq. 2
            assert visible_pairs([scope], length) == mask


@pytest.mark.parametrize(("length", "ratio"), zip(LENGTHS, ["5.10", "6.25", "7.00", "7.36"], strict=True))
def test_cost_ratio_with_32_heads(length, ratio):
    assert f"{cost_ratio(length, geometric_scopes(length, 32)):.2f}" == ratio


def test_cost_ratio_of_the_papers_example():
    """γ = 2 and H = 32 at 128k: 16 heads are full, and the saving is 1.81, not 8."""
    assert f"{cost_ratio(131072, tuple(min(2**h, 131072) for h in range(1, 33))):.2f}" == "1.81"
    assert cost_ratio(4096, (DENSE_SCOPE,) * 8) == 1.0


# ── Layouts ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
def test_layouts_are_permutations(layout, heads, kv_heads):
    assert sorted(layout_order(layout, heads, kv_heads)) == list(range(heads))


@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
def test_what_a_kv_group_holds(heads, kv_heads):
    size = heads // kv_heads

    def groups(layout):
        order = layout_order(layout, heads, kv_heads)
        return [order[group * size : (group + 1) * size] for group in range(kv_heads)]

    every_kth = {tuple(range(first, heads, kv_heads)) for first in range(kv_heads)}
    neighbours = {tuple(range(first, first + size)) for first in range(0, heads, size)}
    assert set(groups("interleaved")) == every_kth
    assert set(groups("group_balanced")) == neighbours
    assert groups("sorted") == sorted(neighbours)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_interleaved_ranks_hold_every_pth_scope(ranks):
    order = layout_order("interleaved", 32, 8)
    shards = [set(order[rank * 32 // ranks : (rank + 1) * 32 // ranks]) for rank in range(ranks)]
    assert {frozenset(shard) for shard in shards} == {frozenset(range(first, 32, ranks)) for first in range(ranks)}


def imbalance(layout, length, heads, kv_heads, ranks):
    """Work of the busiest rank relative to the mean, with pairs counted token by token."""
    seen = np.arange(1, length + 1, dtype=np.int64)
    scopes = head_scopes(Scope(layout=layout), heads, kv_heads, length, length)
    work = np.array([np.minimum(seen, scope).sum() for scope in scopes]).reshape(ranks, -1).sum(axis=1)
    return work.max() / work.mean()


@pytest.mark.parametrize(
    ("layout", "length", "expected"),
    [
        ("sorted", 4096, ["1.96", "3.33", "4.45"]),
        ("sorted", 32768, ["1.98", "3.59", "5.17"]),
        ("sorted", 131072, ["1.99", "3.71", "5.57"]),
        ("interleaved", 4096, ["1.08", "1.24", "1.62"]),
        ("interleaved", 32768, ["1.10", "1.30", "1.81"]),
        ("interleaved", 131072, ["1.11", "1.35", "1.94"]),
        ("group_balanced", 4096, ["1.13", "2.23", "4.45"]),
        ("group_balanced", 32768, ["1.30", "2.59", "5.17"]),
        ("group_balanced", 131072, ["1.40", "2.79", "5.57"]),
    ],
)
def test_documented_imbalance(layout, length, expected):
    assert [f"{imbalance(layout, length, 32, 8, ranks):.2f}" for ranks in (2, 4, 8)] == expected


@pytest.mark.parametrize("length", [4096, 131072])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (32, 32), (16, 8), (8, 8), (64, 8), (32, 16)])
def test_group_balanced_beats_sorted(length, heads, kv_heads):
    for ranks in (2, 4, 8):
        ours, paper = (imbalance(layout, length, heads, kv_heads, ranks) for layout in ("group_balanced", "sorted"))
        assert ours <= paper + 1e-12
        assert ours < paper or ranks == kv_heads  # with one group per rank the order of groups cannot matter


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_group_balanced_is_near_what_whole_groups_allow(ranks):
    """The busiest shard can't do less than the widest group, nor less than the mean."""
    widest_group = imbalance("group_balanced", 131072, 32, 8, 8) / 8
    assert imbalance("group_balanced", 131072, 32, 8, ranks) <= 1.01 * max(1.0, widest_group * ranks)


def test_group_balanced_keeps_caches_short():
    def kept(layout):
        scopes = np.array(head_scopes(Scope(layout=layout), 32, 8, 131072, 131072)).reshape(8, 4)
        return scopes.max(axis=1).mean() / 131072

    assert f"{kept('group_balanced'):.2f}" == "0.16"
    assert f"{kept('interleaved'):.2f}" == "0.38"


def test_heads_must_divide_into_kv_groups():
    with pytest.raises(ValueError, match=r"n_heads \(12\) must be a multiple of n_kv_heads \(8\)"):
        layout_order("interleaved", 12, 8)


# ── From config ───────────────────────────────────────────────────────────────────────────────────────


def test_dense_and_window_heads():
    assert head_scopes(Dense(), 4, 2, 4096, 4096) == (2**31 - 1,) * 4
    assert head_scopes(SlidingWindow(window=8192), 4, 2, 4096, 131072) == (8192,) * 4


@pytest.mark.parametrize(
    ("settings", "trained", "length", "longest"),
    [
        ({}, 4096, 4096, 4096),
        ({}, 4096, 16384, 4096),
        ({}, 4096, 1000, 4096),
        ({"s_max": 8192}, 4096, 16384, 8192),
        ({"scope_max": "length"}, 4096, 1000, 4096),
        ({"scope_max": "length"}, 4096, 4096, 4096),
        ({"scope_max": "length"}, 4096, 16384, 16384),
        ({"scope_max": "length", "s_max": 1024}, 4096, 4096, 1024),
        ({"scope_max": "length", "s_max": 1024}, 4096, 16384, 16384),
        ({"scope_max": "length", "s_max": 32768}, 4096, 16384, 32768),
    ],
)
def test_longest_scope(settings, trained, length, longest):
    scopes = head_scopes(Scope(layout="sorted", **settings), 8, 4, trained, length)
    assert scopes == geometric_scopes(longest, 8)


def test_head_scopes_are_in_layout_order():
    narrow_to_wide = geometric_scopes(4096, 8)
    scopes = head_scopes(Scope(layout="interleaved"), 8, 4, 4096, 4096)
    assert scopes == tuple(narrow_to_wide[index] for index in (0, 4, 2, 6, 1, 5, 3, 7))


@pytest.mark.parametrize(
    ("heads", "message"),
    [(SlidingWindow(window=0), "window is 0"), (Scope(s_max=-1), "s_max is -1"), (Scope(s_max=2**31), "s_max is 2147")],
)
def test_bad_settings_are_refused_by_name(heads, message):
    with pytest.raises(ValueError, match=message):
        head_scopes(heads, 8, 8, 4096, 4096)


# ── ALiBi ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n_heads", [1, 2, 3, 6, 8, 12, 16, 20, 32, 40, 64, 71])
def test_alibi_slopes_equal_bloom(n_heads):
    bias = build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), n_heads, torch.float32)  # slope · position
    slopes = alibi_slopes(n_heads)
    assert slopes.dtype == torch.float32
    torch.testing.assert_close(slopes, bias[:, 0, 1], rtol=1e-5, atol=0)


def test_alibi_slopes_of_the_paper():
    assert alibi_slopes(8).tolist() == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    assert alibi_slopes(8, uniform=True).tolist() == [1 / 256] * 8
    assert alibi_slopes(12, uniform=True).tolist() == [1 / 256] * 12
    with pytest.raises(ValueError, match="n_heads is 0"):
        alibi_slopes(0)
