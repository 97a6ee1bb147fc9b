"""The files of token shards: documents as token ids, written once by `farsight prepare` and read by any number of runs.

    manifest.json       tokenizer, source, counts, and each shard with its checksum
    index.npy           a record for each row of the source, in its order: where the row's tokens are, and a hash of its text
    tokens/00012-003.npy    token ids of a shard's documents, one after the other, without bos and eos
    tokenizer/          the tokenizer that made them

Arrays are plain `.npy` files without pickles, so that any program can map them. A row that was skipped, or dropped as a
duplicate, has a record of 0 tokens; so rows keep their numbers, and shards are read in the order of their source.
"""

from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from farsight.errors import DataError
from farsight.json_files import fields_of, read_object

FORMAT = 1
MANIFEST, INDEX, TOKENS, TOKENIZER = "manifest.json", "index.npy", "tokens", "tokenizer"

RECORD = np.dtype([("hash", "<u8"), ("start", "<u8"), ("shard", "<u4"), ("tokens", "<u4")])
"""Of a row: hash of its text (`documents.text_hash`), place of its first token in its shard, the shard, number of tokens."""

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


def map_array(path: Path) -> np.ndarray:
    """A `.npy` file's array, memory-mapped for reading. Raises `DataError` if it is missing, cut short or not one."""
    try:
        # A plain view: slices of np.memmap take ten times as long.
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: can't be read ({error}). Copy the folder of shards again.") from error


def folders_of(place: Path) -> list[Path]:
    """The folders of shards that a path names: itself, or those in it."""
    if (place / MANIFEST).is_file():
        return [place]
    return sorted(path.parent for path in place.glob(f"*/{MANIFEST}"))
