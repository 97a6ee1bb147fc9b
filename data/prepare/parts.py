"""Divides a source into parts that processes read on their own: ranges of rows, of bytes, or streamed files.

The division depends on the source alone, not on the number of processes, so that an interrupted preparation goes on with the
same parts.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from farsight.configs import schema
from farsight.data.compressed import COMPRESSED, DAMAGE, open_unpacked
from farsight.data.sources.build import open_source
from farsight.data.sources.documents import AnyDocument, BadRows, DocumentSource, OnBadRow, SplitRows, text_of
from farsight.data.sources.files import LocalSource, match_files
from farsight.data.sources.identity import identify
from farsight.data.sources.rows import EMPTY_FILE, no_rows, parse_line
from farsight.data.sources.streamed import StreamedDataset
from farsight.errors import DataError

Row = tuple[AnyDocument | None, int]
"""A row's document, or None if it is skipped; and how much of the part's `size` is read."""


class Part(Protocol):
    """Rows of a source that one process reads in order."""

    @property
    def name(self) -> str:
        """The rows in messages."""

    @property
    def size(self) -> int:
        """Amount of work: bytes; 1 if these are not known."""

    def open(self, source: schema.Source, on_bad_row: OnBadRow) -> tuple[BadRows, Iterator[Row]]:
        """Begins to read; returns the counter of rows that can't be used, too."""


@dataclass(frozen=True)
class RowRange:
    """Rows of a source with random access."""

    first: int
    end: int
    size: int

    @property
    def name(self) -> str:
        return f"rows {self.first} to {self.end - 1}"

    def open(self, source: schema.Source, on_bad_row: OnBadRow) -> tuple[BadRows, Iterator[Row]]:
        opened = _opened(source, on_bad_row)
        done = self.size / (self.end - self.first)
        numbers = range(self.first, self.end)
        return opened, ((opened.read_row(n), int((n + 1 - self.first) * done)) for n in numbers)


@dataclass(frozen=True)
class JsonBytes:
    """The JSON lines that begin at the bytes `begin` to `end` - 1 of a file."""

    path: str
    begin: int
    end: int

    @property
    def name(self) -> str:
        return f"{self.path}, bytes {self.begin} to {self.end - 1}"

    @property
    def size(self) -> int:
        return self.end - self.begin

    def open(self, source: schema.Source, on_bad_row: OnBadRow) -> tuple[BadRows, Iterator[Row]]:
        assert isinstance(source, schema.JsonlSource)
        lines = SplitRows(source.path, 0, "train", on_bad_row)
        return lines, self._rows(source.field, lines)

    def _rows(self, field: str, lines: SplitRows) -> Iterator[Row]:
        with open_unpacked(self.path) as (file, place):
            if self.begin:  # a line belongs to the part that it begins in
                file.seek(self.begin - 1)
                file.readline()
            number = 0
            while self.path.endswith(COMPRESSED) or place() < self.end:
                try:
                    line = file.readline()
                except DAMAGE as error:
                    raise DataError(f"{self.path}: can't be read ({error}). Replace the file.") from error
                if not line:
                    return
                number += 1
                key = f"{self.path}:{number}" + (f" from byte {self.begin}" if self.begin else "")
                found = parse_line(line, self.path, key, lines, first=number == 1 and not self.begin)
                document = None if found is None else text_of(lines, found.value, field, key, self.path)
                yield document, min(place() - self.begin, self.size)


@dataclass(frozen=True)
class StreamedFile:
    """A file of a streamed dataset."""

    shard: int
    size: int = 1

    @property
    def name(self) -> str:
        return f"file {self.shard}"

    def open(self, source: schema.Source, on_bad_row: OnBadRow) -> tuple[BadRows, Iterator[Row]]:
        opened = _opened(source, on_bad_row)
        assert isinstance(opened, StreamedDataset)
        return opened, ((opened.document(self.shard, row, value), 0) for row, value in opened.rows(self.shard))


def parts_of(source: schema.Source, on_bad_row: OnBadRow, part_bytes: int) -> tuple[list[Part], BadRows]:
    """The parts of a source in order, each of about `part_bytes` where it can be cut; and its files that can't be used.

    Raises `DataError` if there is nothing to read.
    """
    if isinstance(source, schema.JsonlSource):
        return _parts_of_lines(source, on_bad_row, part_bytes)
    opened = _opened(source, on_bad_row)
    if isinstance(opened, StreamedDataset):
        return [StreamedFile(shard) for shard in range(opened.shards)], opened
    assert isinstance(opened, LocalSource)
    step = max(1, int(part_bytes / opened.mean_size))
    size = int(step * opened.mean_size) or 1
    return [RowRange(first, min(first + step, opened.rows), size) for first in range(0, opened.rows, step)], opened


def identity_of(source: schema.Source, on_bad_row: OnBadRow) -> tuple[list[int], dict[str, Any]]:
    """Sizes of the blocks of rows that a source's order keeps together, if there are several; and what identifies its content."""
    if isinstance(source, schema.JsonlSource):
        paths = match_files(f"jsonl source '{source.path}'", source.path)
        return [], {"bytes": sum(map(os.path.getsize, paths)), "files": identify(paths)}
    opened = _opened(source, on_bad_row)
    blocks = opened.block_sizes if isinstance(opened, LocalSource) else []
    return blocks if len(blocks) > 1 else [], opened.describe()


def _parts_of_lines(source: schema.JsonlSource, on_bad_row: OnBadRow, part_bytes: int) -> tuple[list[Part], BadRows]:
    name = f"jsonl source '{source.path}'"
    lines = SplitRows(name, 0, "train", on_bad_row)
    parts: list[Part] = []
    for path in match_files(name, source.path):
        size = os.path.getsize(path)
        if not size:
            lines.bad_row(path, path, *EMPTY_FILE)
        step = size if path.endswith(COMPRESSED) else part_bytes
        parts += [JsonBytes(path, begin, min(begin + step, size)) for begin in range(0, size, step)]
    if not parts:
        raise no_rows(name)
    return parts, lines


@lru_cache(maxsize=1)
def _opened(source: schema.Source, on_bad_row: OnBadRow) -> DocumentSource:
    """A source with the rows of both splits."""
    return open_source(source, held_out=0, split="train", seed=0, on_bad_row=on_bad_row)
