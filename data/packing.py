"""Packs documents of any length into rows of exactly L tokens.

Each document of a lane waits until it is packed. Those of sources with `packing = "cut"` wait in line. They fill a row one after
the other, and the last one is cut there and continues in the next. A token's label is the next token of its document,
even across the end of a row, so every transition is trained exactly once.

    documents      a b c d e | f g |            L = 4
    inputs         a b c d     e f g …
    labels         b c d e     · g ·            · is IGNORE
    positions      0 1 2 3     0 0 1
    starts         0 0 0 0     0 1 1

Those of sources with `packing = "best_fit"` wait in a pool, and are cut only if they are longer than a row: into rows of L tokens
and a rest, which waits like a document (Ding et al. 2024, "Fewer Truncations Improve Language Modeling"). A row begins with the one
that has waited longest, so that none waits forever; then the longest one that fits goes next. What stays empty when none fits
is a document of padding (∅), with no labels.

    documents      a b c | d e f | g | …        L = 4
    inputs         a b c g     d e f ∅          if no other document of one token waits
    labels         b c · ·     e f · ·
    positions      0 1 2 0     0 1 2 0
    starts         0 0 0 3     0 0 0 3

In a mixture of both, a row is filled from the line or from the pool, from where more tokens wait for the sources' weights. The line also
fills what stays empty in a row from the pool.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from farsight.errors import DataError

IGNORE = -100
"""Label that the loss ignores, as in PyTorch."""
POOL = 64
"""Documents in the pool of a lane. Twice as many would save less than a third of the padding; resuming reads all of them again."""
CHANGED = "the data files were changed since the checkpoint. Put them back, or begin a new order of data."


@dataclass(frozen=True)
class Rows:
    """B rows of L tokens, as loaders fill them before `to_batch`. All arrays are [B, L]."""

    inputs: np.ndarray
    """int64 token ids."""
    labels: np.ndarray
    """int64 token ids, or IGNORE after the last token of a document."""
    positions: np.ndarray
    """int64, counted from the start of each document, or of its piece in this row."""
    document_starts: np.ndarray
    """int32, index in the row at which the token's document (or its piece) starts."""

    @classmethod
    def empty(cls, rows: int, seq_len: int) -> "Rows":
        """Uninitialised arrays [rows, seq_len], to be filled row by row."""
        shape = (rows, seq_len)
        return cls(
            np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape, np.int32)
        )

    @classmethod
    def joined(cls, parts: "Sequence[Rows]") -> "Rows":
        """The rows of several, one after the other."""
        return cls(*(np.concatenate(arrays) for arrays in zip(*(vars(part).values() for part in parts), strict=True)))


@dataclass(frozen=True)
class Drawn:
    """A document of a lane, tokenised."""

    tokens: np.ndarray
    """int64 [n ≥ 1], special tokens included."""
    place: list[int]
    """The source and the position in it, from which it can be read again."""
    best_fit: bool = False
    """False: it may be cut at the end of any row."""


class Packed(NamedTuple):
    """Padding and cut documents in some rows."""

    padding: int = 0
    """Tokens of padding."""
    cut: int = 0
    """Documents that go on in another row, once for each row that they do not end in."""

    @classmethod
    def all_of(cls, parts: "Iterable[Packed]") -> "Packed":
        """The sum of several."""
        return cls(*map(sum, zip(*parts, strict=True)))


class Packer:
    """Packs one lane's documents into rows: `fill` writes the next row, `waiting` is the state to save."""

    def __init__(self, draw: Callable[[], Drawn], mask_documents: bool, padding_id: int, best_fit_share: float):
        """`draw`: returns the lane's next document. `padding_id`: token that fills what stays empty. `best_fit_share`: share of
        "best_fit" documents in the tokens drawn, 0 … 1.

        `mask_documents`: if false, a row counts as one document: labels cross document ends, positions don't restart. No
        document may be "best_fit" then.
        """
        self._draw, self._mask_documents, self._padding_id = draw, mask_documents, padding_id
        self._best_fit_share = best_fit_share
        self._pool, self._line = _Queue(), _Queue()

    @property
    def waiting(self) -> list[tuple[list[int], int]]:
        """The place of each document that is drawn and not all packed, and how many of its tokens are."""
        return [(one.drawn.place, one.begin) for one in (*self._pool.documents, *self._line.documents)]

    def resume(self, waiting: Iterable[tuple[Drawn, int]]) -> None:
        """Continues from a state: the documents of `waiting`, read again, and how many of their tokens were packed.

        Raises `DataError` for a document that has become shorter.
        """
        for drawn, begin in waiting:
            if begin > len(drawn.tokens):
                raise DataError(
                    f"a document of which {begin} tokens were read before now has {len(drawn.tokens)}: {CHANGED}"
                )
            if begin < len(drawn.tokens):
                one = _Waiting(drawn, begin)
                self._queue(one).add(one)

    def fill(self, rows: Rows, row: int) -> Packed:
        """Writes the next L tokens into row `row` of `rows`."""
        inputs, labels = rows.inputs[row], rows.labels[row]
        positions, starts = rows.positions[row], rows.document_starts[row]
        filled, length, cut = 0, len(inputs), 0
        self._draw_for(length)
        waiting = self._line.tokens * self._best_fit_share, self._pool.tokens * (1 - self._best_fit_share)
        from_pool = self._line.tokens < length or waiting[0] < waiting[1]
        while filled < length and (one := self._take(length - filled, from_pool, first=not filled)) is not None:
            tokens, begin = one.drawn.tokens, one.begin
            one.begin = after = min(len(tokens), begin + length - filled)
            end = filled + after - begin
            inputs[filled:end] = tokens[begin:after]
            labels[filled : end - 1] = tokens[begin + 1 : after]
            labels[end - 1] = tokens[after] if after < len(tokens) else IGNORE
            positions[filled:end] = np.arange(end - filled)
            starts[filled:end] = filled
            filled = end
            if one.left:
                self._queue(one).add(one, first=True)
                cut += 1
        inputs[filled:], labels[filled:], starts[filled:] = self._padding_id, IGNORE, filled
        positions[filled:] = np.arange(length - filled)
        if not self._mask_documents:
            self._draw_for(1)
            following = self._line.documents[0]
            labels[:-1] = inputs[1:]
            labels[-1] = following.drawn.tokens[following.begin]
            positions[:] = np.arange(length)
            starts[:] = 0
        return Packed(length - filled, cut)

    def _queue(self, one: "_Waiting") -> "_Queue":
        return self._pool if one.drawn.best_fit else self._line

    def _draw_for(self, room: int) -> None:
        """Draws until the pool is full, or the line has enough for the rest of a row."""
        while len(self._pool.documents) < POOL and self._line.tokens < room:
            one = _Waiting(self._draw())
            self._queue(one).add(one)

    def _take(self, room: int, from_pool: bool, first: bool) -> "_Waiting | None":
        """Takes out the document that goes next, into the last `room` tokens of a row; None if nothing fits."""
        self._draw_for(room)
        pool = self._pool.documents if from_pool else []
        fitting = [i for i, one in enumerate(pool) if first or one.left <= room]
        if fitting:
            return self._pool.take(fitting[0] if first else max(fitting, key=lambda i: pool[i].left))
        return self._line.take(0) if self._line.documents else None


@dataclass
class _Waiting:
    """A document that is not all packed yet."""

    drawn: Drawn
    begin: int = 0
    """Number of its tokens that are packed."""

    @property
    def left(self) -> int:
        return len(self.drawn.tokens) - self.begin


class _Queue:
    """Waiting documents in the order in which they were drawn, and the number of tokens left of them."""

    def __init__(self) -> None:
        self.documents: list[_Waiting] = []
        self.tokens = 0

    def add(self, one: _Waiting, first: bool = False) -> None:
        self.documents.insert(0 if first else len(self.documents), one)
        self.tokens += one.left

    def take(self, place: int) -> _Waiting:
        one = self.documents.pop(place)
        self.tokens -= one.left
        return one
