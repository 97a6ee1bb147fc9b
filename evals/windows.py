"""The windows of documents that perplexity is measured on, and which of their tokens count."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

TARGETS = 256
"""How many tokens at the end of each window count."""


def first_target(length: int) -> int:
    """The first token that counts in a window whose last 256 do; a window's first token is never predicted."""
    return max(1, length - TARGETS)


@dataclass(frozen=True)
class Windows:
    """The choice of windows to measure.

    `world` processes share the work, this one being number `rank`; every process gets all figures.
    """

    limit: int = 0
    """Most windows of each length; 0 takes all."""
    final: bool = False
    """Take only the last window of each document, of those at least as long as the longest length."""
    buckets: int = 0
    """Measure by position too, in this many parts of equal size and as many of equal ratio; 0 does not."""
    stride: int = 0
    """Tokens that a window slides by; 0 places windows side by side."""
    rank: int = 0
    world: int = 1

    def of(self, documents: Sequence[Tensor], length: int) -> list[Tensor]:
        """The windows, ids [length] each; a document's last sliding window may be shorter."""
        return [row for row, _ in self.with_first_targets(documents, length)]

    def with_first_targets(self, documents: Sequence[Tensor], length: int) -> list[tuple[Tensor, int]]:
        """The windows, each with the first token that counts in it."""
        if self.stride:
            found = self._sliding(documents, length)
        elif self.final:
            found = ((document[-length:], first_target(length)) for document in documents)
        else:
            found = (
                (row, first_target(length))
                for document in documents
                for row in document[: len(document) // length * length].view(-1, length)
            )
        return list(itertools.islice(found, self.limit or None))

    def _sliding(self, documents: Sequence[Tensor], length: int) -> Iterator[tuple[Tensor, int]]:
        for document in documents:
            if len(document) < 2:
                continue
            first = 1  # nothing predicts the first token of a document
            for start in itertools.count(step=self.stride):
                yield document[start : start + length], first
                if start + length >= len(document):
                    break
                first = length - self.stride

    def parts(self, length: int) -> list[tuple[int, int]]:
        """Start and stop of each part by position: the parts of equal size, then those of equal ratio."""
        return [*itertools.pairwise(self.edges(length)), *itertools.pairwise(self.log_edges(length))]

    def edges(self, length: int) -> list[int]:
        """Edges of the parts of equal size, as indices of targets in a window."""
        return [1 + round(i * (length - 1) / self.buckets) for i in range(self.buckets + 1)] if self.buckets else []

    def log_edges(self, length: int) -> list[int]:
        """Edges of the parts of equal ratio; parts that would be empty are left out."""
        return sorted({round(length ** (i / self.buckets)) for i in range(self.buckets + 1)}) if self.buckets else []


SIDE_BY_SIDE = Windows()
