"""The split of a sequence over context-parallel ranks, and the keys each rank needs: plain integers, no tensors.

In a key-value head whose widest query head has reach R, a rank's queries see the R - 1 tokens before them. The rank receives
those that other ranks hold: a halo if R is short, everything before its tokens if R is the whole sequence. All of it follows
from (rank, ranks, tokens, scopes), so that every rank knows what all others send and receive.

Terms: a span is a range of tokens [begin, end); a rank's pieces are the spans whose queries, keys and values it holds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

SequenceLayout = Literal["contiguous", "zigzag"]
"""Division of a sequence over the ranks: see `pieces`."""
Span = tuple[int, int]


def pieces(rank: int, ranks: int, tokens: int, layout: SequenceLayout) -> tuple[Span, ...]:
    """The spans of a rank, in the order in which it holds them.

    "contiguous" cuts the sequence into one span per rank. "zigzag" cuts it into two per rank and gives rank r the r-th from
    the front and the r-th from the back, so that all ranks see equally many earlier tokens.

    Raises:
        ValueError: if the tokens do not divide.
    """
    parts = ranks if layout == "contiguous" else 2 * ranks
    if tokens % parts:
        raise ValueError(
            f"{tokens} tokens do not divide over {ranks} context-parallel ranks ({layout}): use a multiple of {parts}"
        )
    length = tokens // parts
    numbers = (rank,) if layout == "contiguous" else (rank, parts - 1 - rank)
    return tuple((number * length, (number + 1) * length) for number in numbers)


def reaches(scopes: Sequence[int], kv_heads: int, tokens: int) -> tuple[int, ...]:
    """Tokens that the widest query head of each key-value head sees, the query's own included, [K].

    Args:
        scopes: scopes of all query heads, in tokens.
        tokens: length of the whole sequence, which bounds every reach.
    """
    group = len(scopes) // kv_heads
    return tuple(min(tokens, max(scopes[head * group : (head + 1) * group])) for head in range(kv_heads))


def keys_seen(piece: Span, reach: int) -> Span:
    """The keys that the queries of a piece see."""
    return max(0, piece[0] - reach + 1), piece[1]


@dataclass(frozen=True)
class Rows:
    """Tokens [begin, end) of one key-value head, whose keys and values one rank sends to another."""

    kv_head: int
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


@lru_cache(maxsize=256)
def sent(
    source: int, target: int, ranks: int, tokens: int, reach: tuple[int, ...], layout: SequenceLayout
) -> tuple[Rows, ...]:
    """The rows that `source` sends to `target`, in order: for each key-value head, the spans it holds that `target` lacks."""
    if source == target:
        return ()
    own, others = pieces(source, ranks, tokens, layout), pieces(target, ranks, tokens, layout)
    rows = []
    for kv_head, far in enumerate(reach):
        lacking = without(union(keys_seen(piece, far) for piece in others), others)
        rows += [Rows(kv_head, *span) for span in overlap(lacking, own)]
    return tuple(rows)


def received_rows(rank: int, ranks: int, tokens: int, reach: tuple[int, ...], layout: SequenceLayout) -> int:
    """Number of tokens that a rank receives, summed over key-value heads."""
    return sum(len(rows) for source in range(ranks) for rows in sent(source, rank, ranks, tokens, reach, layout))


def received_bytes(
    rank: int, ranks: int, tokens: int, reach: tuple[int, ...], layout: SequenceLayout, head_dim: int, itemsize: int
) -> int:
    """Bytes of keys and values that a rank receives in one layer's forward pass over one row; backward it sends as many."""
    return 2 * head_dim * itemsize * received_rows(rank, ranks, tokens, reach, layout)


# Spans


def union(spans: Iterable[Span]) -> list[Span]:
    """The same tokens in spans that neither touch nor overlap, in order."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif begin < end:
            merged.append((begin, end))
    return merged


def overlap(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """The tokens that are in both, as spans in order."""
    others = list(others)
    found = [(max(a, c), min(b, d)) for a, b in spans for c, d in others]
    return sorted((begin, end) for begin, end in found if begin < end)


def without(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """The tokens of `spans` that are not in `others`."""
    left = list(spans)
    for c, d in others:
        left = [part for a, b in left for part in ((a, min(b, c)), (max(a, d), b)) if part[0] < part[1]]
    return left
