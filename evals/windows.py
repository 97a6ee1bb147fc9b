"""Which windows of documents perplexity is measured on, and which of their tokens count."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

TARGETS = 256
"""Tokens at the end of each window that count."""


def first_target(length: int) -> int:
    """Of a window whose last 256 tokens count; nothing predicts its first."""
    return max(1, length - TARGETS)


@dataclass(frozen=True)
class Windows:
    """Which windows of the documents are measured, and how.

    The work is shared by `world` processes, of which this is number `rank`; all of them get all figures.
    """

    limit: int = 0
    """At most this many a length; 0 takes all."""
    final: bool = False
    """Only the last window of each document that is as long as the longest length."""
    buckets: int = 0
    """Also by position, in this many parts of equal size and as many of equal ratio; 0 leaves that out."""
    stride: int = 0
    """Windows slide by so many tokens; 0 has them lie side by side."""
    rank: int = 0
    world: int = 1

    def of(self, documents: Sequence[Tensor], length: int) -> list[Tensor]:
        """[length] ids each; the last sliding window of a document may be shorter."""
        return [row for row, _ in self.with_first_targets(documents, length)]

    def with_first_targets(self, documents: Sequence[Tensor], length: int) -> list[tuple[Tensor, int]]:
        """The windows, each with the first of its tokens that counts."""
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
        """By position: first target and the one after the last of each part; those of equal size, then of equal ratio."""
        return [*itertools.pairwise(self.edges(length)), *itertools.pairwise(self.log_edges(length))]

    def edges(self, length: int) -> list[int]:
        """Of the parts of equal size, as tokens before the target, and one."""
        return [1 + round(i * (length - 1) / self.buckets) for i in range(self.buckets + 1)] if self.buckets else []

    def log_edges(self, length: int) -> list[int]:
        """Of the parts of equal ratio; fewer where some would be empty."""
        return sorted({round(length ** (i / self.buckets)) for i in range(self.buckets + 1)}) if self.buckets else []


SIDE_BY_SIDE = Windows()
