"""Documents, and what all their sources share: splits, lanes, and the handling of bad rows.

A source supplies *documents* (a name and a text) to *lanes*: each row of a global batch is a lane, and lane j of G reads
items j, j+G, j+2G, … of the source's endless shuffled sequence. So what a lane reads depends only on the seed, j and G, not on
the rank that owns it, and its position is a short list of integers. If a source has fewer rows than lanes, the lanes share its
documents (`shared.py`).

Bad input raises `DataError`, which names the file, the line and the remedy; with `on_bad_row = "skip"` the row is skipped,
counted in `skipped`, and reported once per file.
"""

import logging
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, Protocol

import numpy as np

from farsight.errors import DataError

logger = logging.getLogger(__name__)

Split = Literal["train", "validation"]
OnBadRow = Literal["error", "skip"]


_CUTS = (re.compile(r"(?<=\S)\n(?=\S)"), re.compile(r"\n"), re.compile(r"(?<=\S)(?= \S)"))
"""Places for a cut, best first: a line end without empty lines around it, any line end, before a word."""


@dataclass(frozen=True)
class Document:
    """A document, or a piece of one, before it is tokenised."""

    key: str
    """Its name in errors: "file", "file:line" or "file row n"."""
    text: str
    size: int
    """Length of the text in UTF-8 bytes."""
    begins: bool = True
    """Whether the text starts at the document's start; false for later pieces."""
    ends: bool = True
    """Whether the text ends at the document's end."""

    @property
    def whole(self) -> bool:
        """Whether this is a whole document, not a piece."""
        return self.begins and self.ends

    @property
    def length(self) -> int:
        """In characters, as `place_to_cut` and `piece` count."""
        return len(self.text)

    def place_to_cut(self, start: int, end: int) -> int:
        """The best place for a cut from `start` to `end`: the last line end, else before a word, else `end`."""
        for cut in _CUTS:
            # Look-aheads see the end of the search as the end of the text, hence one more character.
            if found := [m.end() for m in cut.finditer(self.text, start, end + 1) if m.end() <= end]:
                return found[-1]
        return end

    def piece(self, begin: int, end: int) -> "Document":
        """The characters `begin` to `end` - 1."""
        text, key = self.text[begin:end], f"{self.key}, characters {begin:,} to {end:,}"
        return Document(key, text, len(text.encode()), begins=begin == 0, ends=end == self.length)


@dataclass(frozen=True)
class TokenDocument:
    """A document, or a piece of one, that is tokenised already; otherwise like `Document`."""

    key: str
    ids: np.ndarray
    """[n], any integer type, without bos and eos."""
    decode: Callable[[np.ndarray], str]
    begins: bool = True
    ends: bool = True

    @property
    def text(self) -> str:
        return self.decode(self.ids)

    @property
    def size(self) -> int:
        return len(self.text.encode())

    @property
    def whole(self) -> bool:
        return self.begins and self.ends

    @property
    def length(self) -> int:
        """In tokens."""
        return len(self.ids)

    def place_to_cut(self, start: int, end: int) -> int:
        return end

    def piece(self, begin: int, end: int) -> "TokenDocument":
        key = f"{self.key}, tokens {begin:,} to {end:,}"
        return TokenDocument(key, self.ids[begin:end], self.decode, begins=begin == 0, ends=end == self.length)


AnyDocument = Document | TokenDocument


class DocumentLane(Protocol):
    """One lane's reading position in a source."""

    epoch: int
    """Completed passes over the source."""

    def read(self) -> AnyDocument | None:
        """The next row; None if it is skipped (in the other split, bad, or empty)."""

    def state(self) -> list[int]:
        """The position, to be saved in checkpoints."""

    def load_state(self, state: list[int]) -> None:
        """Continues from a position of `state`."""


class BadRows:
    """Handles unusable rows: the first one stops the run, or they are skipped and counted."""

    def __init__(self, on_bad_row: OnBadRow):
        self.skipped: Counter[str] = Counter()
        """Number of unusable rows by reason; each row is counted once."""
        self._on_bad_row = on_bad_row
        self._reported_files: set[str] = set()
        self._bad_rows: set[str] = set()

    def bad_row(self, key: str, file: str, reason: str, detail: str, remedy: str) -> None:
        """Raises `DataError`; or counts the row under `reason`, and logs the first one of each file."""
        message = f"{key}: {reason}: {detail}."
        if self._on_bad_row == "error":
            raise DataError(f'{message} To go on, {remedy}, or set data.on_bad_row = "skip" to leave such rows out.')
        if key not in self._bad_rows:
            self._bad_rows.add(key)
            self.skipped[reason] += 1
        if file not in self._reported_files:
            self._reported_files.add(file)
            logger.warning("%s Skipped; further bad rows of this file are skipped without a message.", message)


class SplitRows(BadRows):
    """Turns rows into the documents of one split."""

    least_bytes = 1
    """Rows whose text has fewer bytes are skipped before anything that costs time, even before they are read and checked."""

    def __init__(self, name: str, held_out: float, split: Split, on_bad_row: OnBadRow):
        super().__init__(on_bad_row)
        self.name = name
        self.split = split
        self._held_out = held_out

    def admit(self, key: str, text: str, file: str) -> Document | None:
        """The document of a text, or None if it belongs to the other split or is empty."""
        try:
            encoded = text.encode()
        except UnicodeEncodeError:
            self.bad_row(key, file, "not UTF-8", "the text holds a lone surrogate", "repair the row")
            return None
        if len(encoded) < self.least_bytes:
            return None
        if split_of(encoded, self._held_out) != self.split:
            return None
        return Document(key, text, len(encoded))


class DocumentSource(SplitRows, ABC):
    """Documents of one split of one source."""

    @property
    def mean_size(self) -> float:
        """Average bytes of a row; a guess if that is unknown without reading."""
        return 4096.0

    @abstractmethod
    def lane(self, lane: int, lanes: int) -> DocumentLane:
        """A new reading position of lane `lane` of `lanes`, at the start of the sequence."""

    def documents(self) -> Iterator[AnyDocument]:
        """Every document of the split, once, in file order."""
        return (document for document in self.read_rows() if document is not None)

    @abstractmethod
    def read_rows(self) -> Iterator[AnyDocument | None]:
        """Every row, once, in file order; None for a skipped one."""

    @abstractmethod
    def rows_if_fewer(self, than: int) -> int | None:
        """The number of rows of both splits if that is less than `than`, else None."""

    @abstractmethod
    def read_row(self, row: int) -> AnyDocument | None:
        """Row `row`, counted from 0 over all files; None if it is skipped."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The properties of the source that must not change between save and resume."""


def text_hash(text: bytes) -> int:
    """A 64-bit hash of a text (UTF-8)."""
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")


def split_of(text: bytes, held_out: float) -> Split:
    """The split of a text (UTF-8). Its hash alone decides, so copies are always in the same split."""
    return "validation" if text_hash(text) / 2**64 < held_out else "train"


def check_text(place: str, field: str, columns: Any) -> None:
    """Raises `DataError` if a table with these columns (a `pyarrow.Schema`) has no `field`, or one without text."""
    import pyarrow as pa

    if field not in columns.names:
        there = ", ".join(sorted(columns.names)) or "none"
        raise DataError(f"{place}: no column '{field}'. Set the source's `field` to one of those there: {there}.")
    kind = columns.field(field).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise DataError(
            f"{place}: column '{field}' holds {kind}, not text. Set the source's `field` to a column of "
            f"strings; it has {', '.join(columns.names)}."
        )


def text_of(source: SplitRows, row: dict[str, Any], field: str, key: str, file: str) -> Document | None:
    """The document of a row, from its `field`, which must be a string; None if it is skipped."""
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
