"""Random access to rows of JSON-lines and Parquet files.

Rows are numbered over all files of a source. Bad rows are reported to the source's `BadRows`; a bad file raises `DataError`.
"""

import codecs
import json
import os
import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from farsight.data.compressed import COMPRESSED
from farsight.data.sources.documents import BadRows, check_text
from farsight.errors import DataError
from farsight.progress import progress

_SCAN_BYTES = 16 << 20
_KEPT_BYTES = 256 << 20
EMPTY_FILE = ("empty file", "it has 0 bytes", "remove the file")
"""Reason, detail and remedy for `BadRows.bad_row`."""


@dataclass(frozen=True)
class Row:
    """A row, as sources of documents and of conversations take it."""

    key: str
    """Its name in errors: "file:line", "file row n" or, of an array, "file[n]"."""
    file: str
    value: dict[str, Any]


class JsonRows:
    """JSON objects, one per line. Opening scans the files for line ends (about 1 GB/s)."""

    def __init__(self, name: str, paths: Sequence[str], report: BadRows, arrays: bool = False):
        """`name`: the source's, for errors. `report`: receives empty files now and bad lines later. `arrays`: files may also be
        JSON arrays of objects, which opening parses once (about 0.1 GB/s)."""
        self._report = report
        self.bytes = sum(os.path.getsize(path) for path in paths)
        self.paths: list[str] = []
        """Files that are not empty."""
        self._files: list[tuple[str, np.ndarray, np.ndarray, bool]] = []
        """(path, byte offsets at which rows begin, and end; whether it is an array)"""
        with progress(desc="Indexing JSON lines", total=self.bytes, unit="B", unit_scale=True) as shown:
            for path in paths:
                if path.endswith(COMPRESSED):
                    raise DataError(
                        f"{path}: a compressed file allows no random access to lines. Decompress it, write its "
                        'tokens once with `farsight prepare` and read these (kind = "shards"), or stream it with '
                        f'kind = "huggingface", name = "json", data_files = "{path}", which can\'t skip lines that are not JSON.'
                    )
                if os.path.getsize(path) == 0:
                    report.bad_row(path, path, *EMPTY_FILE)
                    continue
                elements = _array_elements(path) if arrays else None
                edges = _line_starts(path, shown) if elements is None else elements
                begins, ends = (edges[:-1], edges[1:]) if elements is None else (elements[::2], elements[1::2])
                self._files.append((path, begins, ends, elements is not None))
                self.paths.append(path)
        if not self._files:
            raise no_rows(name)
        self._first_rows = np.cumsum([0] + [len(begins) for _, begins, _, _ in self._files])
        self.count = int(self._first_rows[-1])

    def read(self, row: int, least_bytes: int = 0) -> Row | None:
        """Row `row`; None for a blank line, a bad one that is skipped, and one of fewer bytes than `least_bytes`."""
        at = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        path, begins, ends, is_array = self._files[at]
        number = row - int(self._first_rows[at])
        begin, size = int(begins[number]), int(ends[number] - begins[number])
        if size < least_bytes:
            return None
        with open(path, "rb", buffering=0) as file:
            line = os.pread(file.fileno(), size, begin)
        if len(line) < size:
            named = f"element {number}" if is_array else f"line {number + 1}"
            raise changed_while_read(path, f"{named} had {size:,} bytes at the start of the run, {len(line):,} now")
        key = f"{path}[{number}]" if is_array else f"{path}:{number + 1}"
        return parse_line(line, path, key, self._report, first=number == 0)


def parse_line(line: bytes, path: str, key: str, report: BadRows, first: bool) -> Row | None:
    """The row of a line of JSON; None for a blank line, and for a bad one that is skipped. The first may begin with a BOM."""
    if not line.strip():
        return None
    try:
        value = json.loads(line.decode("utf-8-sig" if first else "utf-8"))
    except (ValueError, RecursionError) as error:
        report.bad_row(key, path, *_why_not_json(path, error))
        return None
    if not isinstance(value, dict):
        found = f"a JSON object was expected, found {type(value).__name__}"
        array_alone = first and isinstance(value, list)
        report.bad_row(key, path, "not an object", found, _one_per_line(path) if array_alone else _OBJECTS)
        return None
    return Row(key, path, value)


class ParquetTables:
    """Rows of Parquet files, a row group at a time."""

    def __init__(self, name: str, paths: Sequence[str], report: BadRows, column: str | None = None):
        """`column`: the text column to read; None reads all columns."""
        self._column = column
        self.bytes = sum(os.path.getsize(path) for path in paths)
        self.paths = paths
        self.group_sizes: list[int] = []
        """Number of rows of each row group."""
        self._groups: list[tuple[str, int, int]] = []
        """(path, row group of the file, first row of the group within the file)"""
        for path in paths:
            first_row = 0
            for group, rows in enumerate(self._row_groups(path)):
                if rows:
                    self._groups.append((path, group, first_row))
                    self.group_sizes.append(rows)
                    first_row += rows
            if first_row == 0:
                report.bad_row(path, path, "empty file", "it has no rows", "remove the file")
        if not self.group_sizes:
            raise no_rows(name)
        self._first_rows = np.cumsum([0, *self.group_sizes])
        self.count = int(self._first_rows[-1])
        self._tables: OrderedDict[int, Any] = OrderedDict()
        """Most recently read row groups (Arrow tables); the lanes of a rank need the same few."""
        self._kept_bytes = 0

    def read(self, row: int) -> Row:
        """Row `row`, with the requested columns."""
        at = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        path, _, first_row = self._groups[at]
        within = row - int(self._first_rows[at])
        table = self._table(at)
        value = {name: table.column(name)[within].as_py() for name in table.column_names}
        return Row(f"{path} row {first_row + within}", path, value)

    def _table(self, at: int) -> Any:
        if at in self._tables:
            self._tables.move_to_end(at)
            return self._tables[at]
        import pyarrow as pa
        import pyarrow.parquet as pq

        path, group, _ = self._groups[at]
        try:
            with pq.ParquetFile(path) as file:
                table = file.read_row_group(group, columns=[self._column] if self._column else None)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}, row group {group}: can't be read ({error}). Replace the file.") from error
        self._tables[at] = table
        self._kept_bytes += table.nbytes
        while self._kept_bytes > _KEPT_BYTES and len(self._tables) > 1:
            self._kept_bytes -= self._tables.popitem(last=False)[1].nbytes
        return table

    def _row_groups(self, path: str) -> list[int]:
        """Number of rows of each row group, after checking that the file has the column, with text in it."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(path) as file:
                columns, metadata = file.schema_arrow, file.metadata
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: not a Parquet file ({error}). Correct the source's path.") from error
        if self._column is not None:
            check_text(path, self._column, columns)
        return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def no_rows(name: str) -> DataError:
    """The error for a source whose files are all empty."""
    return DataError(f"{name}: no documents; every file is empty. Correct the source's path or fill the files.")


def changed_while_read(path: str | Path, how: str) -> DataError:
    """The error for a file that changed during the run."""
    return DataError(
        f"{path} was changed while it is being read: {how}. Put the file back, or begin a new order of data."
    )


def why_not_utf8(raw: bytes, error: Exception) -> str:
    """Says why bytes are not UTF-8, recognising UTF-16 by its first two bytes."""
    if is_utf16(raw):
        return "it is UTF-16 (iconv -f UTF-16 -t UTF-8 converts it)"
    return str(error)


def is_utf16(raw: bytes) -> bool:
    """Whether a file's first bytes are a UTF-16 byte order mark."""
    return raw[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def _why_not_json(path: str, error: Exception) -> tuple[str, str, str]:
    """Reason, detail and remedy for an unreadable line."""
    start = _start(path)
    if isinstance(error, UnicodeDecodeError) or is_utf16(start):
        return "not UTF-8", why_not_utf8(start, error), "convert the file to UTF-8"
    return "bad JSON", str(error), _one_per_line(path) if start.lstrip()[:1] == b"[" else "repair the line"


_OBJECTS = 'write each row as a JSON object, such as {"text": "…"}'


def _one_per_line(path: str) -> str:
    return f"write the elements of this JSON array one per line, without commas (jq -c '.[]' '{path}' does so)"


def _start(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(64).removeprefix(codecs.BOM_UTF8)


def _array_elements(path: str) -> np.ndarray | None:
    """Byte offsets at which the elements of a file's JSON array begin and end, in turn: int64 [2 · elements].

    None if the file is none: its first line may be an array, and others follow. The file is in memory while it is parsed.

    Raises `DataError` for an array that is damaged, or breaks off.
    """
    if not re.match(rb"\s*\[\s*[{\]]", _start(path)):
        return None
    # Every byte as one character, so that places in the text are those in the file; what strings hold does not matter here.
    text = Path(path).read_bytes().decode("latin-1")
    spaces, decode = re.compile(r"[ \t\r\n]*"), json.JSONDecoder().raw_decode

    def beyond_space(at: int) -> int:
        found = spaces.match(text, at)
        assert found is not None  # it matches no space, too
        return found.end()

    at, edges = beyond_space(text.index("[") + 1), array("q")
    with progress(desc=f"Indexing {os.path.basename(path)}", total=len(text), unit="B", unit_scale=True) as shown:
        try:
            while text[at : at + 1] != "]":
                if edges:
                    if text[at : at + 1] != ",":
                        raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
                    at = beyond_space(at + 1)
                _, end = decode(text, at)
                edges.extend((at, end))
                shown.update(end - shown.n)
                at = beyond_space(end)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path}: its JSON array can't be read after {len(edges) // 2} elements: {error}. Repair the file."
            ) from None
    return None if text[at + 1 :].strip() else np.array(edges, np.int64)


def _line_starts(path: str, shown: "tqdm[Any]") -> np.ndarray:
    """Byte offset of each line of a file, then the file's size: int64 [lines + 1]."""
    starts = [np.zeros(1, dtype=np.int64)]
    size = 0
    with open(path, "rb") as file:
        while chunk := file.read(_SCAN_BYTES):
            starts.append(np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n")) + size + 1)
            size += len(chunk)
            shown.update(len(chunk))
    if starts[-1].size == 0 or starts[-1][-1] != size:
        starts.append(np.array([size]))
    return np.concatenate(starts)
