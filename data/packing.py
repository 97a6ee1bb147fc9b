"""Packing: documents of any length into rows of exactly L tokens.

A lane's documents, one after the other, are one endless run of tokens; a row is the next L of it. Nothing is dropped
and nothing is padded: a document that does not fit in what is left of a row goes on in the next. The label of a token
is the token after it in its document, also across the end of a row, so that every transition is trained exactly once.

    documents      a b c d e | f g |            L = 4
    inputs         a b c d     e f g …
    labels         b c d e     · g ·            · is IGNORE
    positions      0 1 2 3     0 0 1
    starts         0 0 0 0     0 1 1
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from farsight.data.sources.documents import DataError

IGNORE = -100
"""Label that the loss leaves out, as in PyTorch."""


@dataclass(frozen=True)
class Rows:
    """B rows of L tokens. All arrays are [B, L]."""

    inputs: np.ndarray
    """int64 token ids."""
    labels: np.ndarray
    """int64 token ids, or IGNORE after the last token of a document."""
    positions: np.ndarray
    """int64, 0 at the first token of each document, or of the piece of it that is in this row."""
    document_starts: np.ndarray
    """int32, where in the row the document of a token (or its piece) starts."""

    @classmethod
    def empty(cls, rows: int, seq_len: int) -> "Rows":
        shape = (rows, seq_len)
        return cls(
            np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape, np.int32)
        )


class Packer:
    """Cuts one lane's documents into rows."""

    def __init__(self, draw: Callable[[], np.ndarray], mask_documents: bool):
        """`draw`: the tokens of the lane's next document, at least one, special tokens included.

        `mask_documents`: false makes a row one document: labels go on across document ends and positions never restart.
        """
        self._draw = draw
        self._mask_documents = mask_documents
        self._document = np.empty(0, np.int64)
        self.offset = 0
        """Tokens of the document drawn last that have been packed."""

    def resume(self, offset: int) -> None:
        """Draws a document and takes its first `offset` tokens as packed."""
        self._document = self._draw()
        if offset > len(self._document):
            raise DataError(
                f"a document of which {offset} tokens were read before now has {len(self._document)}: the data files "
                "were changed since the checkpoint. Put them back, or begin a new order of data."
            )
        self.offset = offset

    def fill(self, rows: Rows, row: int) -> None:
        """Packs the next row into row `row` of `rows`."""
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
        """The document that the next token is of; `offset` is where in it."""
        if self.offset == len(self._document):
            self.resume(0)
        return self._document
