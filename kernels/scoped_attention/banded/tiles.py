"""The plan of the banded backend: which rectangles of queries × keys to compute, as a pure function of integers.

Every visible pair lies in exactly one tile. A tile is `count` equal blocks, evenly spaced, that one call computes as a
batch over strided views: with narrow scopes a call has hundreds of blocks, with wide ones a few long rows. Tokens are
numbered from the first key; queries are the tokens `first` to `end - 1`.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

# Cost of a call and of a pair, forward and backward, measured on AVX2 cores in fp32: only the ratio matters. A call is about
# 130 µs of Python and several barriers between threads, which cost far more on a busy machine.
CALL_NS = 400_000.0
PAIR_NS = 1.0
PAIR_NS_PER_HEAD_DIM = 0.31
PAIR_NS_OF_DOCUMENTS = 5.0  # to build a mask for each block
CHUNKS = (32, 64, 128, 256, 512)
ONE_CHUNK = 256  # Up to this many queries one tile may cover them all, with a square mask for each head.
LEAST_SPLIT = 512  # Causal triangles are not split into fewer rows: the fused kernel steps over keys by 512.
WIDE_IN_DOCUMENTS = 128  # From this scope on, key blocks of earlier documents are skipped chunk by chunk.
# Limits that keep memory linear: the blocks of one call hold at most this many times the sequence's keys and, if each stores
# its scores or mask, at most the scores of this many rows over all keys.
KEYS_PER_CALL = 4
STORED_ROWS_PER_CALL = 128


class Mask(Enum):
    """The kind of mask that a tile needs."""

    FULL = "every pair of the block is visible"
    CAUSAL = "square on the diagonal and within every scope: row i sees keys 0 to i"
    BAND = "scopes, the diagonal, or ALiBi need a mask, the same for all blocks of the tile"
    DOCUMENTS = "a document starts among these keys: each block needs its own mask"


@dataclass(frozen=True, slots=True)
class Tile:
    """`count` equal blocks of queries × keys, for some heads and batch rows: one call of the backend."""

    first_query: int
    rows: int
    first_key: int
    keys: int
    mask: Mask
    count: int = 1
    key_step: int = 0  # from block to block; queries step by `rows`
    merges: bool = False  # an earlier tile has other keys of the same rows
    first_head: int = 0
    heads: int = 1
    first_batch: int = 0
    batches: int = 0  # 0 until the plan sets it
    first_kv_head: int = 0
    kv_heads: int = 1

    @property
    def pairs(self) -> float:
        """Query-key pairs that the fused kernel computes."""
        keys = (self.rows + min(self.rows, 512)) / 2 if self.mask is Mask.CAUSAL else self.keys
        return self.count * self.rows * keys * self.heads * self.batches


@dataclass(frozen=True, slots=True)
class Shape:
    """The inputs of a plan besides scopes and documents."""

    batch: int
    kv_group: int  # query heads per key-value head
    head_dim: int
    first: int
    end: int
    threads: int
    fused: bool  # a fused kernel computes CAUSAL and FULL tiles of any size without storing scores
    biased: bool  # every tile needs its mask
    documents: bool = False  # every block needs its own mask

    def cost(self, tiles: Sequence[Tile]) -> float:
        """Estimated time in ns; short blocks are less efficient and add to the keys' gradients more often."""
        pair = PAIR_NS + PAIR_NS_PER_HEAD_DIM * self.head_dim + PAIR_NS_OF_DOCUMENTS * self.documents
        pair /= self.threads
        return sum(CALL_NS + tile.pairs * pair * (1 + 20 / tile.rows) for tile in tiles)


def document_chunks(shape: Shape) -> list[tuple[int, int]]:
    """(first token, end) of the chunks by which heads with wide scopes are planned if there are documents."""
    chunk = 128 if shape.end - shape.first <= 2048 else 256
    return [(token, min(token + chunk, shape.end)) for token in range(shape.first, shape.end, chunk)]


@lru_cache(maxsize=64)  # all layers of a step have the same documents, forward and backward
def plan(scopes: tuple[int, ...], shape: Shape, starts: tuple[tuple[int, ...], ...] | None = None) -> tuple[Tile, ...]:
    """The tiles for all heads.

    Args:
        starts: the document start of each batch row at the first token of every chunk of `document_chunks`, then at the
            last token of every chunk; None if there are no documents.
    """
    scopes = tuple(min(s, shape.end) for s in scopes)
    if starts is None or max(starts[-1]) == 0:
        return _plan_bands(scopes, shape, 0, len(scopes))
    masked = replace(shape, biased=True, documents=True)
    tiles: list[Tile] = []
    for wide, run in itertools.groupby(range(len(scopes)), lambda head: scopes[head] >= WIDE_IN_DOCUMENTS):
        heads = list(run)
        if wide:
            tiles += _plan_documents(scopes, masked, starts, heads)
        else:
            bands = _plan_bands(scopes, masked, heads[0], heads[-1] + 1)
            tiles += [replace(tile, mask=Mask.DOCUMENTS) for tile in bands]
    return tuple(tiles)


def _plan_bands(scopes: tuple[int, ...], shape: Shape, first_head: int, end_head: int) -> tuple[Tile, ...]:
    """Tiles without documents. Neighbouring heads share tiles if computing all at the widest scope is cheaper than another call."""
    tiles: list[Tile] = []
    start, best = first_head, _band_tiles(scopes, first_head, first_head + 1, shape)
    for head in range(first_head + 1, end_head):
        alone = _band_tiles(scopes, head, head + 1, shape)
        merged = _band_tiles(scopes, start, head + 1, shape)
        if shape.cost(merged) <= shape.cost(best) + shape.cost(alone):
            best = merged
        else:
            tiles += best
            start, best = head, alone
    return (*tiles, *best)


def _band_tiles(scopes: tuple[int, ...], first_head: int, end_head: int, shape: Shape) -> list[Tile]:
    """The cheapest tiles for neighbouring heads: over the keys of the widest scope, masked for the others."""
    group = scopes[first_head:end_head]
    scope, equal = max(group), len(set(group)) == 1
    queries = shape.end - shape.first
    chunks = {c for c in CHUNKS if c < queries} | ({queries} if queries <= ONE_CHUNK else set())
    plans = [
        [
            tile
            for span in _spans(scope, equal, chunk, shape, len(group))
            for tile in _over_heads(span, first_head, end_head, shape)
        ]
        for chunk in chunks
    ]
    return min(plans, key=shape.cost)


def _spans(scope: int, equal: bool, chunk: int, shape: Shape, heads: int) -> Iterator[Tile]:
    """Tiles of one scope: the front, whose tokens see everything before them, then windows over chunk + scope - 1 keys."""
    token, end = shape.first, shape.end
    whole_front = equal and shape.fused and not shape.biased and (scope - 1 > chunk or scope == end)
    if whole_front and token < scope:
        yield from _causal(token, scope - token, shape, heads)
        if token > 0:
            yield Tile(token, scope - token, 0, token, Mask.FULL, merges=True)
        token = scope
    while token < min(scope - 1, end):
        rows = min(chunk, end - token)
        yield Tile(token, rows, 0, token + rows, Mask.BAND)
        token += rows
    keys = chunk + scope - 1
    a_call = KEYS_PER_CALL * end // keys
    if shape.documents or not shape.fused:
        a_call = min(a_call, STORED_ROWS_PER_CALL * end // (chunk * keys))
    a_call = max(a_call, shape.threads)
    while end - token >= chunk:
        count = min((end - token) // chunk, a_call)
        yield Tile(token, chunk, token - scope + 1, keys, Mask.BAND, count, key_step=chunk)
        token += count * chunk
    if token < end:
        yield Tile(token, end - token, token - scope + 1, end - token + scope - 1, Mask.BAND)


def _plan_documents(
    scopes: tuple[int, ...], shape: Shape, starts: tuple[tuple[int, ...], ...], heads: list[int]
) -> list[Tile]:
    """Tiles of wide heads, chunk by chunk: keys begin at the chunk's earliest document, per batch row if that is cheaper."""
    chunks = document_chunks(shape)
    found: list[Tile] = []
    for (token, end), begin, last in zip(chunks, starts[: len(chunks)], starts[len(chunks) :], strict=True):

        def tiles(first_batch: int, end_batch: int, token=token, end=end, begin=begin, last=last) -> list[Tile]:
            earliest, latest = min(begin[first_batch:end_batch]), max(last[first_batch:end_batch])
            same_keys: list[Tile] = []
            for key, run in itertools.groupby(heads, lambda head: max(earliest, token - scopes[head] + 1)):
                same = list(run)
                mask = Mask.DOCUMENTS if latest > key else Mask.BAND
                rows, keys, batches = end - token, end - key, end_batch - first_batch
                span = Tile(token, rows, key, keys, mask, first_batch=first_batch, batches=batches)
                same_keys += _over_heads(span, same[0], same[-1] + 1, shape)
            return same_keys

        together = tiles(0, shape.batch)
        apart = [tile for b in range(shape.batch) for tile in tiles(b, b + 1)] if shape.batch > 1 else together
        found += together if shape.cost(together) <= shape.cost(apart) else apart
    return sorted(found, key=lambda tile: (tile.first_head, tile.heads))  # so that a head's mask is built once


def _causal(first: int, rows: int, shape: Shape, heads: int) -> Iterator[Tile]:
    """The triangle on the diagonal, cut into enough equal pieces to keep all threads busy even with few heads.

    Cut in `pieces`: that many triangles, then squares of half, a quarter, … of the whole, each over `pieces` row blocks.
    """
    pieces = 2 ** math.ceil(math.log2(max(1, shape.threads / (heads * shape.batch))))
    while pieces > 1 and rows < pieces * LEAST_SPLIT:
        pieces //= 2
    block = rows // pieces // pieces * pieces
    yield Tile(first, block, first, block, Mask.CAUSAL, pieces, key_step=block)
    square = block
    while square < pieces * block:
        for start in range(0, pieces * block, 2 * square):
            query = first + start + square
            yield Tile(query, square // pieces, first + start, square, Mask.FULL, pieces, merges=True)
        square *= 2
    rest = rows - pieces * block
    if rest:
        yield Tile(first + rows - rest, rest, first, rows, Mask.BAND)


def _over_heads(span: Tile, first_head: int, end_head: int, shape: Shape) -> Iterator[Tile]:
    """The tile for a range of heads, split so that strided views can represent each call: see `banded._blocks`."""
    batches = span.batches or shape.batch
    head = first_head
    while head < end_head:
        in_group = head % shape.kv_group
        whole_groups = (end_head - head) // shape.kv_group * shape.kv_group
        if span.count > 1 and batches > 1:
            heads = 1
        elif in_group == 0 and whole_groups:
            heads = whole_groups
        else:
            heads = min(end_head - head, shape.kv_group - in_group)
        if span.count == 1 and span.mask is not Mask.CAUSAL and min(batches, heads) == 1:
            blocks = _row_blocks(span.rows, shape.threads // (batches * heads))
            split = replace(span, rows=span.rows // blocks, count=blocks, key_step=0)
        else:
            split = span
        yield replace(
            split,
            first_head=head,
            heads=heads,
            batches=batches,
            first_kv_head=head // shape.kv_group,
            kv_heads=max(1, heads // shape.kv_group),
        )
        head += heads


def _row_blocks(rows: int, most: int) -> int:
    """Number of equal blocks of at least 32 rows, at most `most`: the kernel's backward pass uses one thread per block."""
    return next((n for n in range(min(most, rows // 32), 1, -1) if rows % n == 0), 1)
