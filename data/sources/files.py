"""Sources in local files: text files, JSON lines, Parquet, and the standard library's modules.

Rows allow random access, so a local source is read in a full shuffle of its rows (for Parquet: of its row groups, and of
the rows within each).
"""

import glob
import os
import sysconfig
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from farsight.configs import schema
from farsight.data.order import EpochOrder
from farsight.data.sources.documents import Document, DocumentSource, text_of
from farsight.data.sources.identity import identify
from farsight.data.sources.rows import EMPTY_FILE, JsonRows, ParquetTables, changed_while_read, no_rows, why_not_utf8
from farsight.errors import DataError


class LocalSource(DocumentSource):
    """A source with a known number of rows and random access to them."""

    _order: EpochOrder
    _paths: Sequence[str | Path]
    _bytes: int

    @property
    def mean_size(self) -> float:
        return self._bytes / self._order.rows

    @property
    def rows(self) -> int:
        """Number of rows of both splits."""
        return self._order.rows

    @property
    def block_sizes(self) -> list[int]:
        """Rows of each block that the order keeps together."""
        return self._order.block_sizes.tolist()

    @abstractmethod
    def _read(self, row: int) -> Document | None: ...

    def rows_if_fewer(self, than: int) -> int | None:
        return self._order.rows if self._order.rows < than else None

    def read_row(self, row: int) -> Document | None:
        try:
            return self._read(row)
        except OSError as error:
            raise DataError(f"{self.name}: {error}. Put the file back, or begin a new order of data.") from error

    def lane(self, lane: int, lanes: int) -> "LocalLane":
        return LocalLane(self, self._order, lane, lanes)

    def read_rows(self) -> Iterator[Document | None]:
        return map(self.read_row, range(self._order.rows))

    def describe(self) -> dict[str, Any]:
        return {"rows": self._order.rows, "bytes": self._bytes, "files": identify(self._paths)}


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
        """`files`: (name for errors and order, path); empty ones are reported as bad rows now."""
        super().__init__(**shared)
        self._files = []
        for key, path in files:
            if (size := path.stat().st_size) == 0:
                self.bad_row(key, key, *EMPTY_FILE)
                continue
            self._files.append((key, path, size))
        if not self._files:
            raise no_rows(self.name)
        self._paths = [path for _, path, _ in self._files]
        self._bytes = sum(size for *_, size in self._files)
        self._order = EpochOrder([len(self._files)], seed)

    def _read(self, row: int) -> Document | None:
        key, path, size = self._files[row]
        if size < self.least_bytes:
            return None
        raw = path.read_bytes()
        if len(raw) != size:
            raise changed_while_read(path, f"{size:,} bytes at the start of the run, {len(raw):,} now")
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            self.bad_row(key, key, "not UTF-8", why_not_utf8(raw, error), "convert the file to UTF-8")
            return None
        return self.admit(key, text, key)


class JsonLines(LocalSource):
    """JSON objects, one per line; the document is their `field`."""

    def __init__(self, paths: Sequence[str], field: str, seed: int, **shared: Any):
        super().__init__(**shared)
        self._field = field
        self._rows = JsonRows(self.name, paths, self)
        self._paths, self._bytes = self._rows.paths, self._rows.bytes
        self._order = EpochOrder([self._rows.count], seed)

    def _read(self, row: int) -> Document | None:
        # JSON spells no character in fewer bytes than UTF-8.
        found = self._rows.read(row, self.least_bytes)
        return None if found is None else text_of(self, found.value, self._field, found.key, found.file)


class ParquetRows(LocalSource):
    """Rows of Parquet files, read a row group at a time; the document is their column `field`."""

    def __init__(self, paths: Sequence[str], field: str, seed: int, **shared: Any):
        super().__init__(**shared)
        self._field = field
        self._rows = ParquetTables(self.name, paths, self, field)
        self._paths, self._bytes = self._rows.paths, self._rows.bytes
        self._order = EpochOrder(self._rows.group_sizes, seed)

    def _read(self, row: int) -> Document | None:
        found = self._rows.read(row)
        return text_of(self, found.value, self._field, found.key, found.file)


def open_files(config: schema.Source, name: str, seed: int, shared: dict[str, Any]) -> LocalSource:
    """Opens a source in local files.

    Args:
        name: the source's name, for errors.
        shared: the other arguments of every source.

    Raises:
        DataError: there is nothing to read.
    """
    match config:
        case schema.StdlibSource():
            return TextFiles(stdlib_files(), seed, **shared)
        case schema.TextSource():
            paths = match_files(name, config.path, directory_suffixes=(".txt", ".md"))
            return TextFiles([(path, Path(path)) for path in paths], seed, **shared)
        case schema.JsonlSource():
            return JsonLines(match_files(name, config.path), config.field, seed, **shared)
        case schema.ParquetSource():
            return ParquetRows(match_files(name, config.path), config.field, seed, **shared)
    raise AssertionError(f"no reader for {config}")


@cache
def stdlib_files() -> list[tuple[str, Path]]:
    """The standard library's modules as (relative path, path); files that are not UTF-8 (test data) are left out."""
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
    """The files that a path, directory or glob names, sorted. Raises `DataError` if it names none."""
    if not pattern:
        raise DataError(f'{name}: path is empty. Set it to a file or a glob such as "data/*.jsonl".')
    if "://" in pattern:
        raise DataError(
            f'{name}: a URL; this kind reads local files. Stream it with kind = "huggingface", name = "json" (or "parquet", '
            f'"text") and data_files = "{pattern}".'
        )
    pattern = os.path.expanduser(pattern)
    if os.path.isdir(pattern):
        if not directory_suffixes:
            raise DataError(f'{name}: it is a directory. Name its files with a glob, e.g. path = "{pattern}/*".')
        found = [str(p) for p in Path(pattern).rglob("*") if p.suffix in directory_suffixes and p.is_file()]
        if not found:
            raise DataError(f"{name}: no {' or '.join('*' + s for s in directory_suffixes)} file in this directory.")
        return sorted(found)
    matches = [pattern] if os.path.lexists(pattern) else sorted(glob.glob(pattern, recursive=True))
    if not matches:
        raise DataError(f"{name}: no such file (working directory {os.getcwd()}). Correct the source's path.")
    directories = [match for match in matches if os.path.isdir(match)]
    if directories and "**" not in pattern:
        raise DataError(f"{name}: the glob matches a directory, {directories[0]}. Make it match files only.")
    in_loop = cache(_in_loop)  # the same for all files of a folder
    files = [m for m in matches if not os.path.isdir(m) and not in_loop(os.path.dirname(m))]
    if not files:
        raise DataError(f"{name}: it matches directories only. Make it match files.")
    for match in files:
        if not os.path.isfile(match):
            what = "a link to nothing, or to itself" if os.path.islink(match) else "a pipe or device"
            raise DataError(f"{name}: {match} is {what}, not a file. Make the path match files only.")
    return files


def _in_loop(folder: str) -> bool:
    """Whether the path to a folder goes through a link back to one of its parents: its files are matched already."""
    links = [p for p in (Path(folder), *Path(folder).parents) if p.is_symlink()]
    return any(link.resolve() in link.parent.resolve().joinpath("x").parents for link in links)
