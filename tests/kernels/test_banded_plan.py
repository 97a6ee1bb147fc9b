"""The plan of the banded backend: every visible pair in exactly one tile, and few invisible ones."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farsight.kernels.scoped_attention import Visibility, visible_pairs
from farsight.kernels.scoped_attention.banded import tiles
from farsight.kernels.scoped_attention.banded.tiles import Mask, Shape
from tests.kernels.test_scoped_attention import documents


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_plan_covers_every_visible_pair_once(data):
    B, group, heads = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 2, 3])), 6
    first = data.draw(st.sampled_from([0, 0, 5, 60]))
    end = first + data.draw(st.sampled_from([1, 31, 64, 130, 257]))
    scopes = data.draw(st.lists(st.integers(1, end + 3), min_size=heads, max_size=heads))
    threads, fused, biased = data.draw(st.sampled_from([1, 2, 16])), data.draw(st.booleans()), data.draw(st.booleans())
    starts = documents(B, end, 0.03, seed=data.draw(st.integers(0, 9))) if data.draw(st.booleans()) else None
    shape = Shape(B, group, 16, first, end, threads, fused, biased)
    seen = Visibility(torch.tensor(scopes), q_offset=first).mask(end - first).expand(B, -1, -1, -1)
    if starts is not None:
        seen = Visibility(torch.tensor(scopes), starts, q_offset=first).mask(end - first)
    covered, written = torch.zeros_like(seen, dtype=torch.int), torch.zeros(B, heads, end - first, dtype=torch.int)
    edges = None
    if starts is not None:
        chunks = tiles.document_chunks(shape)
        edges = tuple(tuple(starts[:, t].tolist()) for t in [c[0] for c in chunks] + [c[1] - 1 for c in chunks])
    for tile in tiles.plan(tuple(scopes), shape, edges):
        assert fused or tile.mask not in (Mask.CAUSAL, Mask.FULL)
        assert min(tile.heads, tile.batches, tile.count) == 1
        assert tile.first_kv_head == tile.first_head // group
        assert tile.kv_heads == len({h // group for h in range(tile.first_head, tile.first_head + tile.heads)})
        b = slice(tile.first_batch, tile.first_batch + tile.batches)
        n = slice(tile.first_head, tile.first_head + tile.heads)
        for block in range(tile.count):
            row, key = tile.first_query - first + block * tile.rows, tile.first_key + block * tile.key_step
            assert 0 <= row <= row + tile.rows <= end - first
            assert 0 <= key <= key + tile.keys <= end
            rows, keys = slice(row, row + tile.rows), slice(key, key + tile.keys)
            part = covered[b, n, rows, keys]
            inside = seen[b, n, rows, keys]
            if tile.mask is Mask.FULL:
                assert inside.all()
            if tile.mask is Mask.CAUSAL:
                assert (inside == torch.ones(tile.rows, tile.keys).tril().bool()).all()
            part += inside
            if not tile.merges:
                assert (written[b, n, rows] == 0).all()
                written[b, n, rows] += 1
            assert (written[b, n, rows] == 1).all()  # a tile that merges comes after one that wrote its rows
    assert (covered == seen).all()
    assert (written == 1).all()


def test_plan_is_in_proportion_to_what_is_seen():
    scopes = [math.ceil(round(8192 ** (h / 16), 9)) for h in range(1, 17)]
    plan = tiles.plan(tuple(scopes), Shape(1, 1, 64, 0, 8192, threads=2, fused=True, biased=False))
    assert sum(tile.pairs for tile in plan) < 1.35 * visible_pairs(scopes, 8192)
    assert len(plan) < 100
