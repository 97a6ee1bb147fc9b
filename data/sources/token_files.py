"""Token files of other programs, read as they are: rows are their documents, file after file.

They say nothing about their tokenizer but what its bos and eos show: these are taken off both ends of a document, as packing puts
them there. A document is in a split by a hash of its tokens.
"""

import os
import resource
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from farsight.data.shards.layout import RECORD
from farsight.data.shards.megatron import MegatronFile
from farsight.data.shards.olmo import OlmoFile
from farsight.data.shards.reader import MOST_TOKENS, TokenRows, keep_lengths
from farsight.data.sources.documents import text_hash
from farsight.data.sources.files import match_files
from farsight.data.sources.identity import identify
from farsight.data.sources.rows import no_rows
from farsight.data.tokenizers.base import Tokenizer
from farsight.errors import DataError
from farsight.progress import progress


class TokenFile(Protocol):
    """A file of tokens, with what says where its documents are."""

    path: str
    paths: Sequence[str]
    """All of its files."""
    ids: np.ndarray
    """Token ids of all documents."""
    documents: int

    def bounds(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the tokens of documents [n] begin and end in `ids`, int64 [n] each."""


class TokenFiles(TokenRows):
    """The files that a path names, in sorted order."""

    def __init__(self, name: str, pattern: str, tokenizer: Tokenizer | None):
        """`name`: of the source, in messages. Raises `DataError` for files that can't be read, or hold no documents."""
        if tokenizer is None:
            raise DataError(
                f"{name}: these token ids mean nothing without the tokenizer that made them; set tokenizer.path."
            )
        self._tokenizer = tokenizer
        self._files = _open(name, pattern, tokenizer)
        self._first_rows = np.cumsum([0, *(file.documents for file in self._files)])
        self.rows = int(self._first_rows[-1])
        if not self.rows:
            raise no_rows(name)
        self.mean_size = sum(len(file.ids) for file in self._files) / self.rows / tokenizer.tokens_a_byte

    def records(self, rows: np.ndarray, least: int = 0, most: int = MOST_TOKENS) -> np.ndarray:
        records = np.zeros(len(rows), RECORD)
        records["shard"] = at = self._file_of(rows)
        for number in np.unique(at):
            here = at == number
            starts, ends = self._files[number].bounds(rows[here] - self._first_rows[number])
            records["start"][here], records["tokens"][here] = starts, ends - starts
        keep_lengths(records, least, most + 2)  # bos and eos are still there; other documents need not be read
        for i in np.flatnonzero(records["tokens"]):
            _, start, shard, length = records[i].tolist()
            ids = self.tokens(shard, start, length)
            begin = int(ids[0] == self._tokenizer.bos_id)
            end = length - int(length > begin and ids[-1] == self._tokenizer.eos_id)
            records["start"][i], records["tokens"][i] = start + begin, end - begin
        keep_lengths(records, least, most)
        return records

    def hashes(self, records: np.ndarray) -> np.ndarray:
        hashes = np.zeros(len(records), np.uint64)
        for i in np.flatnonzero(records["tokens"]):
            _, start, shard, length = records[i].tolist()
            hashes[i] = text_hash(self.tokens(shard, start, length).astype("<u4").tobytes())
        return hashes

    def tokens(self, shard: int, start: int, length: int) -> np.ndarray:
        return self._files[shard].ids[start : start + length]

    def name_of(self, row: int) -> str:
        at = int(self._file_of(row))
        return f"{self._files[at].path} document {row - self._first_rows[at]}"

    def text(self, ids: np.ndarray) -> str:
        return self._tokenizer.decode(ids.tolist())

    def identity(self) -> list[list[str]]:
        return identify([path for file in self._files for path in file.paths])

    def _file_of(self, rows: np.ndarray | int) -> np.ndarray:
        return np.asarray(np.searchsorted(self._first_rows, rows, side="right") - 1)


def _open(name: str, pattern: str, tokenizer: Tokenizer) -> list[TokenFile]:
    if os.path.isfile(f"{os.path.expanduser(pattern)}.idx"):  # a prefix, as Megatron-LM takes it
        pattern += ".idx"
    # Both files of a pair may match.
    found = dict.fromkeys(path.removesuffix(".bin").removesuffix(".idx") for path in match_files(name, pattern))
    paths = [path for path in found if not path.endswith(".csv.gz")]
    # Mapped files stay open, and a process may often have only 1,024 unless it asks for more.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files: list[TokenFile] = []
    total = sum(os.path.getsize(path) for path in paths if path.endswith(".npy"))
    with progress(desc=f"{name}: looking for documents", total=total, unit="B", unit_scale=True) as shown:
        for path in paths:
            if path.endswith(".npy"):
                files.append(OlmoFile(path, tokenizer, shown))
            elif os.path.isfile(f"{path}.idx") and os.path.isfile(f"{path}.bin"):
                files.append(MegatronFile(path))
            elif there := [suffix for suffix in (".bin", ".idx") if os.path.isfile(path + suffix)]:
                missing = ".idx" if there == [".bin"] else ".bin"
                raise DataError(
                    f"{name}: there is no {path}{missing} beside {path}{there[0]}; Megatron-LM's files come in pairs. Put it there, or "
                    "make the path match complete pairs only."
                )
            else:
                raise DataError(
                    f"{name}: {path} is neither a pair of Megatron-LM's files, .bin and .idx, nor OLMo's .npy. Make the path match such "
                    "files only, or name a folder that `farsight prepare` wrote."
                )
    return files
