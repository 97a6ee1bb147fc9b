"""Reads token shards: any row's tokens, straight from the memory-mapped files."""

from functools import cached_property
from pathlib import Path

import numpy as np

from farsight.data.shards.layout import INDEX, RECORD, TOKENIZER, TOKENS, map_array, read_manifest
from farsight.data.tokenizers.base import Tokenizer
from farsight.data.tokenizers.tokenizer import load_tokenizer_dir
from farsight.errors import DataError


class Shards:
    """A folder of token shards. Opening it reads the manifest and maps the index; each shard is mapped when first read."""

    def __init__(self, folder: Path):
        """Raises `DataError` if the folder is no finished preparation, or its index is damaged."""
        self.folder = folder
        self.manifest = read_manifest(folder)
        self.index = map_array(folder / INDEX)
        """A `RECORD` for each row."""
        if self.index.dtype != RECORD or len(self.index) != self.manifest.rows:
            raise DataError(f"{folder / INDEX} does not belong to the manifest beside it. Copy the folder again.")
        self._tokens: dict[int, np.ndarray] = {}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer_dir(self.folder / TOKENIZER)

    def text(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode(ids.tolist())

    def tokens(self, shard: int, start: int, length: int) -> np.ndarray:
        """Token ids [length] of a record's row, without a copy."""
        if (mapped := self._tokens.get(shard)) is None:
            described = self.manifest.shards[shard]
            place = self.folder / TOKENS / described.file
            mapped = map_array(place) if described.tokens else np.empty(0, self.manifest.dtype)
            if len(mapped) != described.tokens or mapped.dtype != self.manifest.dtype:
                raise DataError(f"{place} does not belong to the manifest beside it. Copy the folder again.")
            self._tokens[shard] = mapped
        return mapped[start : start + length]
