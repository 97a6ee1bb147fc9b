"""Sources in local files: text files, JSON lines, Parquet, and the standard library's modules.

Any row can be read at any time, so the order of a local source is a full shuffle of its rows (of row groups, and of the
rows in each, for Parquet).
"""

import glob
import json
import os
import sysconfig
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data.documents import DataError, Document, DocumentSource, missing_field, text_of
from data.order import EpochOrder

_SCAN_BYTES = 16 << 20
_KEPT_BYTES = 256 << 20
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz")


class LocalSource(DocumentSource):
    """A source with a known number of rows, any of which can be read at any time."""

    _order: EpochOrder
    _bytes: int

    @property
    def mean_size(self) -> float:
        return self._bytes / self._order.rows

    @abstractmethod
    def _read(self, row: int) -> Document | None: ...

    def read_row(self, row: int) -> Document | None:
        """Row `row`, counted from 0 over all files; None when it is passed over."""
        try:
            return self._read(row)
        except OSError as error:
            raise DataError(f"{self.name}: {error}. Put the file back, or begin a new order of data.") from error

    def lane(self, lane: int, lanes: int) -> "LocalLane":
        return LocalLane(self, self._order, lane, lanes)

    def documents(self) -> Iterator[Document]:
        for row in range(self._order.rows):
            if (document := self.read_row(row)) is not None:
                yield document

    def describe(self) -> dict[str, Any]:
        return {"rows": self._order.rows, "bytes": self._bytes}


class LocalLane:
    """Items lane, lane + lanes, lane + 2·lanes, … of a local source's endless sequence."""

    def __init__(self, source: LocalSource, order: EpochOrder, lane: int, lanes: int):
        self.epoch = lane // order.rows
        self._source, self._order, self._lane, self._lanes = source, order, lane, lanes
        self._count = 0

    def read(self) -> Document | None:
        self.epoch, row = self._order.row(self._lane + self._lanes * self._count)
        self._count += 1
        return self._source.read_row(row)

    def state(self) -> list[int]:
        return [self._count]

    def load_state(self, state: list[int]) -> None:
        (self._count,) = state
        self.epoch = (self._lane + self._lanes * self._count) // self._order.rows


class TextFiles(LocalSource):
    """Whole files, one document each."""

    def __init__(self, files: Sequence[tuple[str, Path]], seed: int, **shared: Any):
        """`files`: (name for errors and order, path); empty ones are reported here."""
        super().__init__(**shared)
        self._files = []
        self._bytes = 0
        for key, path in files:
            if (size := path.stat().st_size) == 0:
                self.bad_row(key, key, "empty file", "it has 0 bytes", "remove the file")
                continue
            self._files.append((key, path))
            self._bytes += size
        if not self._files:
            raise _no_documents(self.name)
        self._order = EpochOrder([len(self._files)], seed)

    def _read(self, row: int) -> Document | None:
        key, path = self._files[row]
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError as error:
            return self.bad_row(key, key, "not UTF-8", str(error), "convert the file to UTF-8")
        return self.admit(key, text, key)


class JsonLines(LocalSource):
    """JSON objects, one a line. Opening it scans the files once for line ends (about 1 GB/s)."""

    def __init__(self, paths: Sequence[str], field: str, seed: int, **shared: Any):
        super().__init__(**shared)
        self._field = field
        self._bytes = sum(os.path.getsize(path) for path in paths)
        self._files: list[tuple[str, np.ndarray]] = []
        """(path, byte offset of each line's start, with the file's size as the last element)"""
        with tqdm(
            total=self._bytes, desc="Indexing JSON lines", unit="B", unit_scale=True, delay=2, disable=None
        ) as progress:
            for path in paths:
                if path.endswith(_COMPRESSED):
                    raise DataError(
                        f"{path}: a compressed file can't be read at any line. Decompress it, or stream it with "
                        f'kind = "huggingface", name = "json", data_files = "{path}".'
                    )
                if os.path.getsize(path) == 0:
                    self.bad_row(path, path, "empty file", "it has 0 bytes", "remove the file")
                else:
                    self._files.append((path, _line_starts(path, progress)))
        if not self._files:
            raise _no_documents(self.name)
        self._first_rows = np.cumsum([0] + [len(starts) - 1 for _, starts in self._files])
        self._order = EpochOrder([int(self._first_rows[-1])], seed)

    def _read(self, row: int) -> Document | None:
        at = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        path, starts = self._files[at]
        number = row - int(self._first_rows[at])
        with open(path, "rb", buffering=0) as file:
            line = os.pread(file.fileno(), int(starts[number + 1] - starts[number]), int(starts[number]))
        if not line.strip():
            return None
        key = f"{path}:{number + 1}"
        try:
            value = json.loads(line.decode("utf-8-sig" if number == 0 else "utf-8"))
        except UnicodeDecodeError as error:
            return self.bad_row(key, path, "not UTF-8", str(error), "convert the file to UTF-8")
        except (ValueError, RecursionError) as error:
            return self.bad_row(key, path, "bad JSON", str(error), "repair the line")
        if not isinstance(value, dict):
            found = f"a JSON object was expected, found {type(value).__name__}"
            return self.bad_row(key, path, "not an object", found, 'write each line as {"text": "…"}')
        return text_of(self, value, self._field, key, path)


class ParquetRows(LocalSource):
    """Rows of Parquet files, a row group at a time."""

    def __init__(self, paths: Sequence[str], field: str, seed: int, **shared: Any):
        super().__init__(**shared)
        self._field = field
        self._bytes = sum(os.path.getsize(path) for path in paths)
        self._groups: list[tuple[str, int, int]] = []
        """(path, row group of the file, first row of the group within the file)"""
        sizes = []
        for path in paths:
            first_row = 0
            for group, rows in enumerate(self._row_groups(path)):
                if rows:
                    self._groups.append((path, group, first_row))
                    sizes.append(rows)
                    first_row += rows
            if first_row == 0:
                self.bad_row(path, path, "empty file", "it has no rows", "remove the file")
        if not sizes:
            raise _no_documents(self.name)
        self._first_rows = np.cumsum([0, *sizes])
        self._order = EpochOrder(sizes, seed)
        self._columns: OrderedDict[int, Any] = OrderedDict()
        """The text columns read last (Arrow arrays), by row group; the lanes of a rank need the same few."""
        self._kept_bytes = 0

    def _read(self, row: int) -> Document | None:
        at = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        path, _, first_row = self._groups[at]
        within = row - int(self._first_rows[at])
        key = f"{path} row {first_row + within}"
        value = {self._field: self._column(at)[within].as_py()}
        return text_of(self, value, self._field, key, path)

    def _column(self, at: int) -> Any:
        if at in self._columns:
            self._columns.move_to_end(at)
            return self._columns[at]
        import pyarrow as pa
        import pyarrow.parquet as pq

        path, group, _ = self._groups[at]
        try:
            with pq.ParquetFile(path) as file:
                column = file.read_row_group(group, columns=[self._field]).column(self._field)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}, row group {group}: can't be read ({error}). Replace the file.") from error
        self._columns[at] = column
        self._kept_bytes += column.nbytes
        while self._kept_bytes > _KEPT_BYTES and len(self._columns) > 1:
            self._kept_bytes -= self._columns.popitem(last=False)[1].nbytes
        return column

    def _row_groups(self, path: str) -> list[int]:
        """Rows of each row group, after checking that the file has the field and that it is text."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(path) as file:
                columns, metadata = file.schema_arrow, file.metadata
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: not a Parquet file ({error}). Correct the source's path.") from error
        if self._field not in columns.names:
            raise missing_field(path, self._field, columns.names)
        kind = columns.field(self._field).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise DataError(
                f"{path}: column '{self._field}' holds {kind}, not text. Set the source's `field` to a column of "
                f"strings; it has {', '.join(columns.names)}."
            )
        return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def _no_documents(name: str) -> DataError:
    return DataError(f"{name}: no documents; every file is empty. Correct the source's path or fill the files.")


@cache
def stdlib_files() -> list[tuple[str, Path]]:
    """The standard library's modules by their relative path; files that are not UTF-8 (test data) are left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in ("site-packages", "dist-packages")]
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            try:
                text = path.read_bytes().decode()
            except UnicodeDecodeError:
                continue
            if text:
                files.append((path.relative_to(root).as_posix(), path))
    if not files:
        raise DataError(
            f'stdlib source: {root} has no .py files. Use a Python installed with its sources, or kind = "text".'
        )
    return sorted(files)


def match_files(name: str, pattern: str, directory_suffixes: tuple[str, ...] = ()) -> list[str]:
    """The files that a path, directory or glob names, sorted."""
    if not pattern:
        raise DataError(f'{name}: path is empty. Set it to a file or a glob such as "data/*.jsonl".')
    pattern = os.path.expanduser(pattern)
    if os.path.isdir(pattern):
        if not directory_suffixes:
            raise DataError(f'{name}: it is a directory. Name its files with a glob, e.g. path = "{pattern}/*".')
        found = [str(p) for p in Path(pattern).rglob("*") if p.suffix in directory_suffixes and p.is_file()]
        if not found:
            raise DataError(f"{name}: no {' or '.join('*' + s for s in directory_suffixes)} file in this directory.")
        return sorted(found)
    matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    if not matches:
        raise DataError(f"{name}: no such file (working directory {os.getcwd()}). Correct the source's path.")
    directories = [match for match in matches if os.path.isdir(match)]
    if directories and "**" not in pattern:
        raise DataError(f"{name}: the glob matches a directory, {directories[0]}. Make it match files only.")
    return [match for match in matches if not os.path.isdir(match)]


def _line_starts(path: str, progress: "tqdm[Any]") -> np.ndarray:
    """Byte offset of each line of a file, and of the file's end."""
    starts = [np.zeros(1, dtype=np.int64)]
    size = 0
    with open(path, "rb") as file:
        while chunk := file.read(_SCAN_BYTES):
            starts.append(np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n")) + size + 1)
            size += len(chunk)
            progress.update(len(chunk))
    if starts[-1].size == 0 or starts[-1][-1] != size:
        starts.append(np.array([size]))
    return np.concatenate(starts)
