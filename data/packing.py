"""Packs documents of any length into rows of exactly L tokens.

A lane's concatenated documents are one endless stream of tokens, and a row is the next L of them. Nothing is dropped or
padded: a document that does not fit into the rest of a row continues in the next. A token's label is the next token of its
document, even across the end of a row, so every transition is trained exactly once.

    documents      a b c d e | f g |            L = 4
    inputs         a b c d     e f g …
    labels         b c d e     · g ·            · is IGNORE
    positions      0 1 2 3     0 0 1
    starts         0 0 0 0     0 1 1
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from farsight.errors import DataError

IGNORE = -100
"""Label that the loss ignores, as in PyTorch."""


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


class Packer:
    """Packs one lane's documents into rows; `fill` writes the next row, `offset` is the state to save."""

    def __init__(self, draw: Callable[[], np.ndarray], mask_documents: bool):
        """`draw`: returns the lane's next document, int64 [n ≥ 1], special tokens included.

        `mask_documents`: if false, a row counts as one document: labels cross document ends, positions don't restart.
        """
        self._draw = draw
        self._mask_documents = mask_documents
        self._document = np.empty(0, np.int64)
        self.offset = 0
        """Number of tokens of the last drawn document that have been packed."""

    def resume(self, offset: int) -> None:
        """Draws a document and skips its first `offset` tokens, which were packed before."""
        self._document = self._draw()
        if offset > len(self._document):
            raise DataError(
                f"a document of which {offset} tokens were read before now has {len(self._document)}: the data files "
                "were changed since the checkpoint. Put them back, or begin a new order of data."
            )
        self.offset = offset

    def fill(self, rows: Rows, row: int) -> None:
        """Writes the next L tokens into row `row` of `rows`."""
        inputs, labels = rows.inputs[row], rows.labels[row]
        positions, starts = rows.positions[row], rows.document_starts[row]
        filled, length = 0, len(inputs)
        while filled < length:
            document = self._next_document()
            end = min(length, filled + len(document) - self.offset)
            after = self.offset + end - filled
            inputs[filled:end] = document[self.offset : after]
            labels[filled : end - 1] = document[self.offset + 1 : after]
            labels[end - 1] = document[after] if after < len(document) else IGNORE
            positions[filled:end] = np.arange(end - filled)
            starts[filled:end] = filled
            filled, self.offset = end, after
        if not self._mask_documents:
            labels[:-1] = inputs[1:]
            labels[-1] = self._next_document()[self.offset]
            positions[:] = np.arange(length)
            starts[:] = 0

    def _next_document(self) -> np.ndarray:
        """The document of the next token, which is at `offset` in it."""
        if self.offset == len(self._document):
            self.resume(0)
        return self._document
