"""The cost model of the hybrid backend against sums written out here, and against the predictions it is meant to give."""

import itertools
import math
from dataclasses import replace

import pytest

from farsight.benchmarks import attention_split
from farsight.kernels.scoped_attention.cost import Gpu, Shape, Speed, best_split, gpu_of, split_seconds
from farsight.kernels.scoped_attention.documents import Documents

PASSES = ("forward", "backward")
KERNELS = {
    "triton": {"forward": Speed(400.0, 200.0), "backward": Speed(100.0, 50.0)},
    "FA3": {"forward": Speed(800.0, 400.0), "backward": Speed(500.0, 250.0)},
}
"""Half the speed with windows: a window of S costs S + 1,024 keys a query."""
GPU = Gpu("round", False, "", 1000.0, 1e30, 10, 0.0, 0.0, KERNELS)
SHAPE = Shape(1, 4096, head_dim=1)


def scope_scopes(T, N=32):
    return tuple(math.ceil(round(T ** (h / N), 9)) for h in range(1, N + 1))


def test_work_of_both_kernels_is_a_sum():
    """A head that sees all of 4,096 tokens, and one of 1,024, written out pair by pair."""
    dense = sum(t + 1 for t in range(4096))
    window = sum(min(t + 1, 1024) + 1024 for t in range(4096))
    for scopes, wide_from, per_pass in (
        ((4096,), 1, [4 * dense / 800, 10 * dense / 500]),
        ((1024,), 1, [4 * window / 800, 10 * window / 500]),
        ((4096, 1024, 1024), 4096, [4 * (dense / 800 + 2 * window / 400), 10 * (dense / 500 + 2 * window / 100)]),
        ((4096, 1024, 1024), 9999, [4 * (dense + 2 * window) / 400, 10 * (dense + 2 * window) / 100]),
    ):
        for pass_, expected in zip(PASSES, per_pass, strict=True):
            assert split_seconds(scopes, SHAPE, GPU, "FA3", pass_, wide_from) == pytest.approx(expected)


def test_a_call_lasts_as_long_as_its_longest_block_and_its_launch():
    """Many processors: 128 rows of a head on one of them. Calls of different windows follow each other."""
    gpu = replace(GPU, processors=10**9, launch=0.5)
    block = 128 * 4 / (800 / 10**9)  # for one key

    def seconds(scopes, wide_from):
        return split_seconds(scopes, SHAPE, gpu, "FA3", "forward", wide_from)

    assert seconds((4096, 4096), 1) == pytest.approx(4096 * block + 0.5)
    assert seconds((4096, 1000), 1) == pytest.approx((4096 + 1000 + 1024) * block + 1.0)
    assert seconds((4096, 1000), 9999) == pytest.approx(4096 * 2 * block + 0.5)  # one launch, at half the speed
    assert seconds((4096, 1000), 2000) == pytest.approx(4096 * block + 0.5)  # the other stream takes 2024 * 2


def test_narrow_heads_take_as_long_as_their_bytes():
    gpu = replace(GPU, memory=1e3)
    moved = 4096 * 64 * 2 * (2 + 2 / 4)  # queries and output; a fourth of keys and values
    shape = Shape(1, 4096, group=4, head_dim=64)
    speeds = {"triton": {pass_: Speed(1e12, 1e12) for pass_ in PASSES}}
    found = split_seconds((1,) * 3, shape, replace(gpu, kernels=speeds), "", "forward", 2)
    assert found == pytest.approx(3 * moved / 1e3)


def test_documents_of_equal_length_are_that_many_rows():
    whole, packed = Shape(8, 512, head_dim=1), Shape(2, 2048, head_dim=1, documents=Documents(8, 512, 512.0))
    for scopes, pass_ in itertools.product(((512, 4096), (100, 300)), PASSES):
        times = [split_seconds(scopes, shape, GPU, "FA3", pass_, 256) for shape in (whole, packed)]
        assert times[0] == pytest.approx(times[1])
    # One long document among short ones: blocks past their ends cost FlashAttention time, and Triton none.
    uneven = replace(packed, documents=Documents(8, 2048, 512.0))
    gpu = replace(GPU, empty_block=1e9)
    extra = 8 * (2048 // 128) - 2 * 2048 // 128
    assert split_seconds((2048,), uneven, gpu, "FA3", "forward", 1) > 1e9 * extra
    assert split_seconds((2048,), uneven, gpu, "FA3", "forward", 9999) < 1e9


@pytest.mark.parametrize("major", [8, 9, 10])
@pytest.mark.parametrize("T", [2048, 32768, 131072])
def test_the_split_is_the_fastest_that_matters(major, T):
    gpu, shape, scopes = gpu_of(major), Shape(1, T, group=4), scope_scopes(T)
    for kernel, pass_ in itertools.product(set(gpu.kernels) - {"triton"}, PASSES):
        times = {s: split_seconds(scopes, shape, gpu, kernel, pass_, s) for s in (*scopes, T + 1)}
        split = best_split(scopes, shape, gpu, kernel, pass_)
        assert split.seconds == times[split.wide_from] <= 1.02 * min(times.values())
        # No split with fewer wide heads is as near.
        assert all(times[s] > 1.02 * min(times.values()) for s in times if s > split.wide_from)
        assert best_split(scopes, shape, gpu, None, pass_).seconds == times[T + 1]


def test_more_work_takes_longer():
    gpu = gpu_of(9)
    for pass_ in PASSES:
        by_length = [
            best_split(scope_scopes(T), Shape(1, T, group=4), gpu, "FA3", pass_).seconds
            for T in (2**k for k in range(10, 20))
        ]
        by_scope = [
            best_split((s,) * 32, Shape(1, 65536, group=4), gpu, "FA3", pass_).seconds for s in (1, 100, 1000, 20000)
        ]
        by_rows = [
            best_split(scope_scopes(8192), Shape(B, 8192, group=4), gpu, "FA3", pass_).seconds for B in (1, 2, 4, 8)
        ]
        for times in (by_length, by_scope, by_rows):
            assert times == sorted(times)
            assert times[0] < times[-1]


def test_extremes():
    """Equal wide heads are one call and FlashAttention's; narrow heads, and short sequences, are Triton's."""
    gpu = gpu_of(9)
    for pass_ in PASSES:
        for scopes in ((131072,) * 32, (4096,) * 32):
            assert best_split(scopes, Shape(1, 131072, group=4), gpu, "FA3", pass_).wide_from <= min(scopes)
        assert best_split((16,) * 32, Shape(1, 131072, group=4), gpu, "FA3", pass_).wide_from > 16
        assert best_split(scope_scopes(1024), Shape(1, 1024, group=4), gpu, "FA3", pass_).wide_from > 1024


def test_a_gpu_like_another_reaches_the_same_shares():
    gpu = gpu_of(9)
    twice = gpu.like(2 * gpu.peak, 2 * gpu.memory)
    scopes, shape = scope_scopes(131072), Shape(1, 131072, group=4)
    for pass_ in PASSES:
        times = [best_split(scopes, shape, replace(g, launch=0.0), "FA3", pass_).seconds for g in (gpu, twice)]
        assert times[0] == pytest.approx(2 * times[1])


def test_predictions_at_131072_tokens():
    """Published kernel speeds give these by hand, 32 heads on 8, head dim 128, H200: 20.1 TFLOP forward, 50.3 backward."""
    gpu, shape, scopes = gpu_of(9), Shape(1, 131072, group=4), scope_scopes(131072)

    def ms(kernel, pass_, wide_heads, heads=scopes):
        return 1e3 * split_seconds(heads, shape, gpu, kernel, pass_, sorted(heads)[-wide_heads])

    assert 33 < ms("FA3", "forward", 12) < 37
    assert ms("FA3", "backward", 12) == pytest.approx(105, rel=0.05)
    assert ms("FA3", "forward", 32, (131072,) * 32) == pytest.approx(220, rel=0.05)
    assert ms("FA3", "backward", 32, (131072,) * 32) == pytest.approx(660, rel=0.05)
    assert ms("FA2", "forward", 32) == pytest.approx(57, rel=0.05)
    assert ms("FA2", "backward", 32) == pytest.approx(175, rel=0.07)
    assert 45 < 1e3 * split_seconds(scopes, shape, gpu, "FA3", "forward", 131073) < 53
    assert 185 < 1e3 * split_seconds(scopes, shape, gpu, "FA3", "backward", 131073) < 215


def test_the_table(capsys):
    assert attention_split.main(["--lengths", "8192", "131072", "--rows", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[:2] for line in lines[2:6]] == [
        ["| 8,192", "forward"], ["| 8,192", "backward"], ["| 131,072", "forward"], ["| 131,072", "backward"],
    ]  # fmt: skip
    assert lines[-1].startswith("H200 SXM, not measured: ")
