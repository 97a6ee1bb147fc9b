"""Context parallelism: the plan against brute force over queries, the exchange on gloo ranks against the reference."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farsight.parallel.context import pieces, reaches, received_bytes, received_rows, sent
from farsight.parallel.halo import _Rows, _Take
from tests.running import forked

LAYOUTS = ["contiguous", "zigzag"]


def exponential(T, N):
    return [math.ceil(round(T ** (h / N), 9)) for h in range(1, N + 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_pieces_are_the_sequence(ranks, layout):
    held = [token for rank in range(ranks) for span in pieces(rank, ranks, 64, layout) for token in range(*span)]
    assert sorted(held) == list(range(64))
    assert pieces(0, ranks, 64, layout)[0][0] == 0


def test_zigzag_balances_what_lies_before():
    before = [sum(t + 1 for span in pieces(r, 4, 64, "zigzag") for t in range(*span)) for r in range(4)]
    assert len(set(before)) == 1


def test_tokens_that_do_not_divide():
    with pytest.raises(ValueError, match=r"100 tokens do not divide over 4 context-parallel ranks .*multiple of 8"):
        pieces(0, 4, 100, "zigzag")
    pieces(0, 4, 100, "contiguous")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_rank_receives_exactly_what_its_queries_see(data):
    ranks, layout = data.draw(st.sampled_from([1, 2, 3, 4])), data.draw(st.sampled_from(LAYOUTS))
    T = 2 * ranks * data.draw(st.integers(1, 6))
    K, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    scopes = data.draw(st.lists(st.integers(1, T + 3), min_size=K * group, max_size=K * group))
    reach = reaches(scopes, K, T)
    for rank in range(ranks):
        own = {token for span in pieces(rank, ranks, T, layout) for token in range(*span)}
        seen = {
            (n // group, i) for n, scope in enumerate(scopes) for t in own for i in range(max(0, t - scope + 1), t + 1)
        }
        found = []
        for source in range(ranks):
            theirs = {token for span in pieces(source, ranks, T, layout) for token in range(*span)}
            for rows in sent(source, rank, ranks, T, reach, layout):
                assert theirs.issuperset(range(rows.begin, rows.end))
                found += [(rows.kv_head, token) for token in range(rows.begin, rows.end)]
        assert len(found) == len(set(found)) == received_rows(rank, ranks, T, reach, layout)
        assert set(found) == {(kv_head, token) for kv_head, token in seen if token not in own}


@pytest.mark.parametrize(
    ("layout", "ranks", "mebibytes", "all_gather"),
    [
        ("contiguous", 4, 67, 384), ("contiguous", 8, 75, 448), ("contiguous", 16, 79, 480),
        ("zigzag", 4, 71, 384), ("zigzag", 8, 79, 448), ("zigzag", 16, 83, 480),
    ],
)  # fmt: skip
def test_traffic_at_128k(layout, ranks, mebibytes, all_gather):
    """32 heads on 8, head dim 128, bf16, worst rank, one layer's forward pass; computed beforehand by hand."""
    T = 131072

    def worst(reach):
        return max(received_bytes(rank, ranks, T, reach, layout, 128, 2) for rank in range(ranks)) / 2**20

    assert math.floor(worst(reaches(exponential(T, 32), 8, T))) == mebibytes
    assert worst((T,) * 8) == all_gather


@pytest.mark.parametrize(
    ("layout", "rows"), [("contiguous", (0, 1605, 2629, 3653)), ("zigzag", (3653, 3722, 3210, 2117))]
)
def test_traffic_at_4k(layout, rows):
    """16 heads on 4 of reach 8, 64, 512 and 4,096; in an all-gather every rank receives 3/4 of 4 x 4,096 rows."""
    reach = reaches(exponential(4096, 16), 4, 4096)
    assert reach == (8, 64, 512, 4096)
    assert tuple(received_rows(rank, 4, 4096, reach, layout) for rank in range(4)) == rows
    assert round(sum(rows) / (4 * 3 * 4096), 3) == {"contiguous": 0.160, "zigzag": 0.258}[layout]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("index", [[3, 0, 3, 3, 5, 1, 0, 3], []])
def test_rows_taken_more_than_once_are_summed_exactly(dtype, index):
    x = torch.randn(6, 2, 3, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    taken = _Take.apply(x, _Rows.of(torch.tensor(index, dtype=torch.int64), len(x), x.device))
    assert torch.equal(taken, x[index])
    grad = torch.randn(taken.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    (found,) = torch.autograd.grad(taken, x, grad)
    exact = [sum((grad[i].double() for i, row in enumerate(index) if row == n), torch.zeros(2, 3)) for n in range(6)]
    assert found.dtype == dtype
    torch.testing.assert_close(found, torch.stack(exact).to(dtype), rtol=0, atol=1e-15)


def test_ranks_equal_the_reference(tmp_path):
    """Halo attention on two and four ranks, both layouts, scopes of all kinds, documents, ALiBi: outputs, gradients, bytes.

    Also the loss on a sharded vocabulary, and the logits of a sharded model.
    """
    done = forked([], tmp_path, ranks=4, script="tests/parallel/rank_checks.py")
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(4):
        assert f"rank {rank}: equal" in done.stdout
