"""Reads token shards: any row's tokens, straight from the files."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from farsight.data.shards.layout import (
    INDEX,
    MANIFEST,
    RECORD,
    TOKENIZER,
    TOKENS,
    ArrayFile,
    Manifest,
    checksum,
    read_manifest,
)
from farsight.data.tokenizers.base import Tokenizer
from farsight.data.tokenizers.tokenizer import load_tokenizer_dir
from farsight.errors import DataError

_OPEN_FILES = 512
"""Shards that stay open; a process may have 1,024 files by default."""

MOST_TOKENS = np.iinfo(np.uint32).max
"""In a record."""


class TokenRows(ABC):
    """Documents that are token ids already, one in each row."""

    rows: int
    blocks: Sequence[int] = ()
    """Rows of each block that the order keeps together, if there are several; see `EpochOrder`."""
    mean_size: float
    """Average bytes of text in a row; may be a guess."""

    @abstractmethod
    def records(self, rows: np.ndarray, least: int = 0, most: int = MOST_TOKENS) -> np.ndarray:
        """A `RECORD` of each row [n], with 0 tokens for documents that don't have `least` to `most`.

        The hash is set by `hashes` alone.
        """

    @abstractmethod
    def hashes(self, records: np.ndarray) -> np.ndarray:
        """A hash of the content of each document that has tokens in its record, uint64 [n]; copies have the same one."""

    @abstractmethod
    def tokens(self, shard: int, start: int, length: int) -> np.ndarray:
        """Token ids [length] of a record's row, without bos and eos."""

    @abstractmethod
    def name_of(self, row: int) -> str:
        """The row in messages."""

    @abstractmethod
    def text(self, ids: np.ndarray) -> str: ...

    @abstractmethod
    def identity(self) -> list[list[str]]:
        """Name and identity of the files, in reading order."""


def keep_lengths(records: np.ndarray, least: int, most: int) -> None:
    """Sets the tokens of records to 0 where they are not `least` to `most`."""
    tokens = records["tokens"]
    tokens[(tokens < least) | (tokens > most)] = 0


class Shards(TokenRows):
    """A folder of token shards. Opening it reads the manifest; each shard is opened when it is first read."""

    def __init__(self, folder: Path, tokenizer: Tokenizer | None = None):
        """Raises `DataError` if the folder is no finished preparation, its index is damaged, or `tokenizer` did not make it."""
        self.folder = folder
        self.manifest = manifest = read_manifest(folder)
        made_by = manifest.tokenizer["fingerprint"]
        if tokenizer is not None and made_by != tokenizer.fingerprint:
            raise DataError(
                f"{folder}: its tokens were made by another tokenizer ({made_by}) than the run's ({tokenizer.fingerprint}). "
                f'Set tokenizer.path = "{folder / TOKENIZER}", or prepare the data with the run\'s tokenizer.'
            )
        self.rows, self.blocks = manifest.rows, manifest.blocks
        self.mean_size = (manifest.source_bytes or sum(shard.bytes for shard in manifest.shards)) / manifest.rows
        self._dtype = np.dtype(self.manifest.dtype)
        self._index = ArrayFile(folder / INDEX, RECORD, self.manifest.rows)
        self._open: OrderedDict[int, ArrayFile] = OrderedDict()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer_dir(self.folder / TOKENIZER)

    def text(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode(ids.tolist())

    def records(self, rows: np.ndarray, least: int = 0, most: int = MOST_TOKENS) -> np.ndarray:
        records = self._index.pick(rows.tolist())
        keep_lengths(records, least, most)
        return records

    def hashes(self, records: np.ndarray) -> np.ndarray:
        return records["hash"]

    def name_of(self, row: int) -> str:
        return f"{self.folder} row {row}"

    def identity(self) -> list[list[str]]:
        return [[MANIFEST, checksum(self.folder / MANIFEST)[0]]]

    @property
    def index(self) -> np.ndarray:
        """The `RECORD` of every row, read at once."""
        return self._index.read(0, self._index.length)

    def tokens(self, shard: int, start: int, length: int) -> np.ndarray:
        if (file := self._open.get(shard)) is None:
            if len(self._open) == _OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            described = self.manifest.shards[shard]
            file = self._open[shard] = ArrayFile(self.folder / TOKENS / described.file, self._dtype, described.tokens)
        return file.read(start, length)


def checked(folder: Path) -> Manifest:
    """The manifest of a folder whose files have the sizes that it says. Raises `DataError` for the first that has not."""
    manifest = read_manifest(folder)
    ArrayFile(folder / INDEX, RECORD, manifest.rows).close()
    for shard in manifest.shards:
        ArrayFile(folder / TOKENS / shard.file, np.dtype(manifest.dtype), shard.tokens).close()
    return manifest
