"""Reads token shards: any row's tokens, straight from the files."""

from collections import OrderedDict
from functools import cached_property
from pathlib import Path

import numpy as np

from farsight.data.shards.layout import INDEX, RECORD, TOKENIZER, TOKENS, ArrayFile, read_manifest
from farsight.data.tokenizers.base import Tokenizer
from farsight.data.tokenizers.tokenizer import load_tokenizer_dir

_OPEN_FILES = 512
"""Shards that stay open; a process may have 1,024 files by default."""


class Shards:
    """A folder of token shards. Opening it reads the manifest; each shard is opened when it is first read."""

    def __init__(self, folder: Path):
        """Raises `DataError` if the folder is no finished preparation, or its index is damaged."""
        self.folder = folder
        self.manifest = read_manifest(folder)
        self._dtype = np.dtype(self.manifest.dtype)
        self._index = ArrayFile(folder / INDEX, RECORD, self.manifest.rows)
        self._open: OrderedDict[int, ArrayFile] = OrderedDict()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer_dir(self.folder / TOKENIZER)

    def text(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode(ids.tolist())

    def records(self, rows: np.ndarray) -> np.ndarray:
        """The `RECORD` of each row [n], writable."""
        return self._index.pick(rows.tolist())

    @property
    def index(self) -> np.ndarray:
        """The `RECORD` of every row, read at once."""
        return self._index.read(0, self._index.length)

    def tokens(self, shard: int, start: int, length: int) -> np.ndarray:
        """Token ids [length] of a record's row."""
        if (file := self._open.get(shard)) is None:
            if len(self._open) == _OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            described = self.manifest.shards[shard]
            file = self._open[shard] = ArrayFile(self.folder / TOKENS / described.file, self._dtype, described.tokens)
        return file.read(start, length)
