"""Documents, and what every source of them shares: the split, the lanes, and what happens to a broken row.

A source hands out *documents* (a name and a text) to *lanes*: each row of a global batch is a lane, and lane j of G
reads items j, j+G, j+2G, … of the source's endless shuffled sequence. That makes what a lane reads a function of
the seed, j and G alone, whichever rank owns it. Where a lane stands is a short list of integers. The lanes of a source with
fewer rows than lanes share its documents (`data.shared`).

Broken input raises `DataError`, which names the file, the line and the remedy; with `on_bad_row = "skip"` the row is
passed over, counted in `skipped`, and reported once per file.
"""

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, Protocol

from farsight.errors import UserError

logger = logging.getLogger(__name__)

Split = Literal["train", "validation"]


class DataError(UserError):
    """Data, or settings of it, that can't be used. The message names the place and what to do about it."""


@dataclass(frozen=True)
class Document:
    key: str
    """Names it in errors: "file", "file:line" or "file row n"."""
    text: str
    size: int
    """Bytes of the text in UTF-8."""
    begins: bool = True
    """Whether the text starts where the document does; a piece of a document may not."""
    ends: bool = True
    """Whether the text ends where the document does."""

    @property
    def whole(self) -> bool:
        return self.begins and self.ends


class DocumentLane(Protocol):
    """One lane's reading position in a source."""

    epoch: int
    """Passes over the source that the lane has begun, less one."""

    def read(self) -> Document | None:
        """The next row; None when it is passed over (of the other split, broken and skipped, empty)."""

    def state(self) -> list[int]: ...

    def load_state(self, state: list[int]) -> None: ...


class BadRows:
    """Rows that can't be used: the first stops the run, or each is passed over and counted."""

    def __init__(self, on_bad_row: Literal["error", "skip"]):
        self.skipped: Counter[str] = Counter()
        """Rows passed over because they could not be read, by reason; each row is counted once."""
        self._on_bad_row = on_bad_row
        self._reported_files: set[str] = set()
        self._bad_rows: set[str] = set()

    def bad_row(self, key: str, file: str, reason: str, detail: str, remedy: str) -> None:
        """Raises `DataError`, or counts the row under `reason` and reports the first of its file."""
        message = f"{key}: {reason}: {detail}."
        if self._on_bad_row == "error":
            raise DataError(f'{message} To go on, {remedy}, or set data.on_bad_row = "skip" to leave such rows out.')
        if key not in self._bad_rows:
            self._bad_rows.add(key)
            self.skipped[reason] += 1
        if file not in self._reported_files:
            self._reported_files.add(file)
            logger.warning("%s Skipped, as further bad rows of this file will be without a message.", message)


class DocumentSource(BadRows, ABC):
    """Documents of one split of one source."""

    def __init__(self, name: str, held_out: float, split: Split, on_bad_row: Literal["error", "skip"]):
        super().__init__(on_bad_row)
        self.name = name
        self.split = split
        self._held_out = held_out

    @property
    def mean_size(self) -> float:
        """Bytes of a row on average; a guess where it is not known without reading."""
        return 4096.0

    @abstractmethod
    def lane(self, lane: int, lanes: int) -> DocumentLane:
        """Reading position of lane `lane` of `lanes`, at the start of the sequence."""

    def documents(self) -> Iterator[Document]:
        """Every document of the split, once, in file order."""
        return (document for document in self.read_rows() if document is not None)

    @abstractmethod
    def read_rows(self) -> Iterator[Document | None]:
        """Every row, once, in file order; None for one that is passed over."""

    @abstractmethod
    def rows_if_fewer(self, than: int) -> int | None:
        """The number of rows, both splits together, where it is less than `than`; else None."""

    @abstractmethod
    def read_row(self, row: int) -> Document | None:
        """Row `row`, counted from 0 over all files; None when it is passed over."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What has to be the same for a run to be resumed on this source."""

    def admit(self, key: str, text: str, file: str) -> Document | None:
        """The document, or None if it belongs to the other split or is empty."""
        try:
            encoded = text.encode()
        except UnicodeEncodeError:
            self.bad_row(key, file, "not UTF-8", "the text holds a lone surrogate", "repair the row")
            return None
        if not encoded:
            return None
        if split_of(encoded, self._held_out) != self.split:
            return None
        return Document(key, text, len(encoded))


def split_of(text: bytes, held_out: float) -> Split:
    """The side a text is on. Its hash alone decides, so that copies are always on the same side."""
    place = int.from_bytes(blake2b(text, digest_size=8).digest(), "big") / 2**64
    return "validation" if place < held_out else "train"


def missing_field(place: str, field: str, present: Sequence[str]) -> DataError:
    there = ", ".join(sorted(present)) or "none"
    return DataError(f"{place}: no column '{field}'. Set the source's `field` to one of those there: {there}.")


def text_of(source: DocumentSource, row: dict[str, Any], field: str, key: str, file: str) -> Document | None:
    """The document of a row, whose `field` has to be a string."""
    if field not in row:
        there = ", ".join(sorted(row)) or "none"
        source.bad_row(key, file, "missing field", f"no '{field}'; there are: {there}", "set the source's `field`")
        return None
    text = row[field]
    if not isinstance(text, str):
        found = "null" if text is None else type(text).__name__
        remedy = "set the source's `field` to one that holds text"
        source.bad_row(key, file, "not a string", f"'{field}' is {found}", remedy)
        return None
    return source.admit(key, text, file)
