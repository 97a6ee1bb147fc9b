"""Segments: the keys that pieces of a sequence's queries see, packed for each key-value head and piece one after the other.

A call without segments has one piece, and all heads have the same keys. A rank of context parallelism holds one or two pieces
of a sequence, and a head of short scopes has few keys there beyond the piece's own.

Shape suffixes: B batch, L queries, N query heads, K key-value heads, H head dim, R rows (one token of one key-value head),
P pieces, 2 keys and values.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from farsight.kernels.scoped_attention.documents import Span
from farsight.kernels.scoped_attention.visibility import Visibility


class Part(NamedTuple):
    """Key-value heads that have the same keys, with the query heads that they serve."""

    kv_heads: tuple[int, ...]
    first_keys: tuple[int, ...]
    """By piece."""
    keys: int
    """Of all pieces."""
    first_row: int
    """Of the buffer. The heads' rows follow one another, and in a head those of the pieces."""

    def of(self, kv_R2BH: Tensor) -> tuple[Tensor, Tensor]:
        """Its keys and its values [B, keys, heads, H], as views of the buffer."""
        rows = kv_R2BH[self.first_row : self.first_row + len(self.kv_heads) * self.keys]
        k_BLKH, v_BLKH = rows.unflatten(0, (len(self.kv_heads), self.keys)).permute(2, 3, 1, 0, 4)
        return k_BLKH, v_BLKH


@dataclass(frozen=True)
class Segments:
    """The pieces of queries of a call, and the keys of each piece and key-value head. They are the same for all batch rows."""

    pieces: tuple[Span, ...]
    """Tokens [begin, end) of the sequence, in the order of the queries."""
    first_keys: tuple[tuple[int, ...], ...]
    """[P][K]: tokens. A segment is the tokens from its first key to the end of its piece."""

    @classmethod
    def plain(cls, queries: int, q_offset: int, kv_heads: int) -> "Segments":
        """Those of a call in which queries `q_offset` and later see all keys."""
        return cls(((q_offset, q_offset + queries),), ((0,) * kv_heads,))

    @staticmethod
    @lru_cache(maxsize=256)
    def of_numbers(*numbers: int) -> "Segments":
        """The value whose `numbers` these are."""
        pieces, *rest = numbers
        spans, keys = rest[: 2 * pieces], rest[2 * pieces :]
        kv_heads = len(keys) // pieces
        return Segments(
            tuple(zip(spans[::2], spans[1::2], strict=True)),
            tuple(tuple(keys[i : i + kv_heads]) for i in range(0, len(keys), kv_heads)),
        )

    @cached_property
    def numbers(self) -> list[int]:
        """The argument of a custom operator."""
        spans = [token for span in self.pieces for token in span]
        return [len(self.pieces), *spans, *(key for keys in self.first_keys for key in keys)]

    @property
    def kv_heads(self) -> int:
        """K."""
        return len(self.first_keys[0])

    @cached_property
    def first_queries(self) -> tuple[int, ...]:
        """Of each piece, and the number of all queries."""
        return (0, *accumulate(end - begin for begin, end in self.pieces))

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """In the order of their rows."""
        sharing: dict[tuple[int, ...], list[int]] = {}
        for kv_head, first_keys in enumerate(zip(*self.first_keys, strict=True)):
            sharing.setdefault(first_keys, []).append(kv_head)
        parts, row = [], 0
        for first_keys, kv_heads in sharing.items():
            keys = sum(end - first for (_, end), first in zip(self.pieces, first_keys, strict=True))
            parts.append(Part(tuple(kv_heads), first_keys, keys, row))
            row += keys * len(kv_heads)
        return tuple(parts)

    def __iter__(self) -> Iterator[tuple[int, int, Span]]:
        """Piece, key-value head and tokens of each segment, in the order of their rows."""
        for part in self.parts:
            for kv_head in part.kv_heads:
                for piece, first in enumerate(part.first_keys):
                    yield piece, kv_head, (first, self.pieces[piece][1])

    @cached_property
    def rows(self) -> int:
        """R: all keys of all segments."""
        return sum(part.keys * len(part.kv_heads) for part in self.parts)

    @cached_property
    def longest(self) -> int:
        """Keys of the longest segment."""
        return max(end - first for _, _, (first, end) in self)


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def table(segments: Segments, device: torch.device) -> Tensor:
    """int32 [P · K, 5], piece by piece: the columns of `triton.blocks.Segment`."""
    rows = torch.empty(len(segments.pieces), segments.kv_heads, 5, dtype=torch.int32)
    first_row = 0
    for piece, kv_head, (first, end) in segments:
        first_query, end_query = segments.first_queries[piece : piece + 2]
        last_row = first_row + end - first
        rows[piece, kv_head] = torch.tensor(
            (first_query, end_query, first_row, last_row - end_query, first - first_row)
        )
        first_row = last_row
    return rows.flatten(0, 1).to(device)


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def longest_first(segments: Segments, kv_heads: tuple[int, ...], device: torch.device) -> Tensor:
    """int64: rows of the table, those with most keys first, for some key-value heads, whose order settles ties."""
    found = [(first - end, kv_heads.index(k), piece) for piece, k, (first, end) in segments if k in kv_heads]
    rows = [piece * segments.kv_heads + kv_heads[place] for _, place, piece in sorted(found)]
    return torch.tensor(rows, device=device)


def in_calls(
    attend: Callable[[Tensor, Tensor, Tensor, Visibility], Tensor],
    q_BLNH: Tensor,
    kv_R2BH: Tensor,
    segments: Segments,
    visibility: Visibility,
) -> Tensor:
    """`api.segmented_attention` by a call of plain attention for each piece and part."""
    by_part = []
    for part in segments.parts:
        k_BLKH, v_BLKH = part.of(kv_R2BH)
        lengths = [end - first for (_, end), first in zip(segments.pieces, part.first_keys, strict=True)]
        heads = None if len(segments.parts) == 1 else _query_heads(part, segments, q_BLNH)
        q, seen = (
            (q_BLNH, visibility) if heads is None else (q_BLNH.index_select(2, heads), visibility.for_heads(heads))
        )
        outputs = [
            attend(q[:, a:b], k, v, seen.for_keys(slice(first, end), begin - first))
            for (a, b), k, v, first, (begin, end) in zip(
                pairwise(segments.first_queries), k_BLKH.split(lengths, 1), v_BLKH.split(lengths, 1),
                part.first_keys, segments.pieces, strict=True,
            )
        ]  # fmt: skip
        by_part.append(torch.cat(outputs, dim=1))
    if len(by_part) == 1:
        return by_part[0]
    return torch.cat(by_part, dim=2).index_select(2, _places(segments, q_BLNH.shape[2], q_BLNH.device))


def query_heads(part: Part, segments: Segments, heads: int) -> list[int]:
    """The query heads that a part serves, of all `heads`."""
    group = heads // segments.kv_heads
    return [kv_head * group + member for kv_head in part.kv_heads for member in range(group)]


def _query_heads(part: Part, segments: Segments, q_BLNH: Tensor) -> Tensor:
    return _indexes(tuple(query_heads(part, segments, q_BLNH.shape[2])), q_BLNH.device)


def _places(segments: Segments, heads: int, device: torch.device) -> Tensor:
    """int64 [N]: the place of each query head among those of all parts."""
    order = [head for part in segments.parts for head in query_heads(part, segments, heads)]
    return _indexes(tuple(order.index(head) for head in range(heads)), device)


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def _indexes(heads: tuple[int, ...], device: torch.device) -> Tensor:
    """Cached, because copying a list to a GPU waits for it."""
    return torch.tensor(heads, device=device)
