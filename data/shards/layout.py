"""The files of token shards: documents as token ids, written once by `farsight prepare` and read by any number of runs.

    manifest.json       tokenizer, source, counts, and each shard with its checksum
    index.npy           a record for each row of the source, in its order: where the row's tokens are, and a hash of its text
    tokens/00012-003.npy    token ids of a shard's documents, one after the other, without bos and eos
    tokenizer/          the tokenizer that made them

Arrays are plain `.npy` files without pickles, which NumPy can map into memory. A row that was skipped, or dropped as a
duplicate, has a record of 0 tokens; so rows keep their numbers, and shards are read in the order of their source.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from farsight.errors import DataError
from farsight.json_files import fields_of, read_object

FORMAT = 1
MANIFEST, INDEX, TOKENS, TOKENIZER = "manifest.json", "index.npy", "tokens", "tokenizer"
JOB = "prepare.json"
"""Settings that a preparation was begun with."""

RECORD = np.dtype([("hash", "<u8"), ("start", "<u8"), ("shard", "<u4"), ("tokens", "<u4")])
"""A row's entry in the index: hash of its text (`documents.text_hash`), place of its first token in its shard, shard, number of tokens."""

_CHUNK = 16 << 20


@dataclass(frozen=True)
class Shard:
    """A shard, as its manifest describes it."""

    file: str
    """Below `tokens/`."""
    source: str
    """The part of the source that it was made from."""
    rows: int
    documents: int
    tokens: int
    bytes: int
    """UTF-8 bytes of the documents' texts."""
    largest: int
    """Largest token id; -1 if there is none."""
    checksum: str
    """`checksum` of the file."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Rows that could not be used, by reason."""


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json."""

    source: dict[str, Any]
    """Settings of the source that it was made from."""
    tokenizer: dict[str, Any]
    """Fingerprint and vocabulary size of the tokenizer."""
    dtype: str
    rows: int
    documents: int
    tokens: int
    duplicates: int
    """Documents that were dropped because their text occurs earlier."""
    skipped: dict[str, int]
    source_bytes: int
    """Size of the source's files; 0 if unknown."""
    blocks: list[int]
    """Rows of each block that the order of documents keeps together, as Parquet's row groups; see `EpochOrder`."""
    lengths: dict[str, dict[str, int]]
    """Histogram: documents and tokens by length, each bin named by its least number of tokens, a power of two."""
    index_checksum: str
    shards: list[Shard]
    format: int = FORMAT


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a folder of shards. Raises `DataError` if there is none, or one of another format."""
    path = folder / MANIFEST
    if not path.is_file():
        inner = sorted(place.parent.name for place in folder.glob(f"*/{MANIFEST}"))
        there = f" There are {', '.join(inner)} in it: name one." if inner else ""
        if (folder.parent / MANIFEST).is_file():
            there = f" {folder.parent} is one."
        elif others := [f"*{suffix}" for suffix in (".bin", ".npy") if any(folder.glob(f"*{suffix}"))]:
            there = f' Token files of Megatron-LM or OLMo are named by a glob: path = "{folder / others[0]}".'
        raise DataError(
            f"{folder}: no {MANIFEST} in it. Name a folder that `farsight prepare` has written to its end.{there}"
        )
    values = read_object(path)
    if values.get("format") != FORMAT:
        raise DataError(
            f"{path}: format {values.get('format')}, and this version of Farsight reads {FORMAT}. Prepare the data again."
        )
    with fields_of(path):
        return Manifest(**{**values, "shards": [Shard(**shard) for shard in values["shards"]]})


def token_type(vocab_size: int) -> np.dtype:
    """The smallest unsigned type, little-endian, for the ids of a vocabulary."""
    return np.min_scalar_type(max(0, vocab_size - 1)).newbyteorder("<")


def checksum(path: Path) -> tuple[str, int]:
    """BLAKE2b of a file's bytes, 16 bytes in hexadecimal digits; and its size."""
    hashed, size = blake2b(digest_size=16), 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            hashed.update(chunk)
            size += len(chunk)
    return hashed.hexdigest(), size


class ArrayFile:
    """A one-dimensional `.npy` file of which parts are read.

    It is read and not mapped: mapped pages would count as the process's memory, and a read error would end it by a signal.
    """

    def __init__(self, path: Path, dtype: np.dtype, length: int):
        """Raises `DataError` unless the file holds `length` elements of a type."""
        self._path, self._dtype, self.length = path, dtype, length
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115  closed by `close`
            version = np.lib.format.read_magic(self._file)
            shape, _, found = np.lib.format.read_array_header_1_0(self._file)
            self._first = self._file.tell()
            size = os.fstat(self._file.fileno()).st_size
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path}: can't be read ({error}). Copy the folder of shards again.") from error
        if (version, shape, found) != ((1, 0), (length,), dtype) or size != self._first + length * dtype.itemsize:
            raise DataError(f"{path} does not belong to the {MANIFEST} of its folder. Copy the folder of shards again.")

    def close(self) -> None:
        self._file.close()

    def read(self, start: int, count: int) -> np.ndarray:
        """Elements start … start + count - 1."""
        return np.frombuffer(self._bytes(start, count), self._dtype)

    def pick(self, places: Sequence[int]) -> np.ndarray:
        """The elements at some places, writable."""
        return np.frombuffer(bytearray().join(self._bytes(place, 1) for place in places), self._dtype)

    def _bytes(self, start: int, count: int) -> bytes:
        size = count * self._dtype.itemsize
        raw = os.pread(self._file.fileno(), size, self._first + start * self._dtype.itemsize)
        if len(raw) != size:
            raise DataError(f"{self._path} was cut short while it is being read. Put it back.")
        return raw


def map_raw(path: str | Path, dtype: np.dtype, otherwise: str = "") -> np.ndarray:
    """The elements of a file without a header, memory-mapped for reading.

    `otherwise`: what else to do, in the `DataError` for a file that they don't fill evenly.
    """
    size = os.path.getsize(path)
    if size % dtype.itemsize:
        raise DataError(
            f"{path}: {size:,} bytes are no whole number of {dtype}, {dtype.itemsize} bytes each. Copy the file again if it was cut "
            f"short{otherwise}."
        )
    return np.asarray(np.memmap(path, dtype, mode="r")) if size else np.empty(0, dtype)


def folders_of(place: Path) -> list[Path]:
    """The folders of shards that a path names, finished or not: itself, or those in it."""
    return [place] if (place / JOB).is_file() else sorted(path.parent for path in place.glob(f"*/{JOB}"))
