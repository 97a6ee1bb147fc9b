"""Token files of OLMo, as dolma's tokeniser writes them and OLMo and OLMo-core read them.

    part-0-00000.npy       token ids of all documents, one after the other, little-endian, most often without any header
    part-0-00000.csv.gz    a line for each document, without a heading: start, end, id, src, loc; may be missing

`start` and `end` count tokens. The type of token ids is written nowhere: it is the smallest unsigned one for the tokenizer's
vocabulary. A document ends with the tokenizer's eos. A file that does have NumPy's header is read in the type that it names.
"""

import csv
import gzip
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from farsight.data.compressed import DAMAGE
from farsight.data.shards.layout import map_raw, token_type
from farsight.data.tokenizers.base import Tokenizer
from farsight.errors import DataError

if TYPE_CHECKING:
    from tqdm import tqdm

_MAGIC = b"\x93NUMPY"
_CHUNK = 1 << 24
"""Tokens that are searched for eos at once."""
_SAMPLE, _ENOUGH = 4096, 16
"""Tokens of a sample, in which every second id is 0 if ids have a wider type; and the fewest tokens that can tell."""
_PAIR = np.dtype((np.int64, 2))


class OlmoFile:
    """A file of tokens. Opening it reads where documents end: from the table beside it, else by a search for eos."""

    def __init__(self, path: str, tokenizer: Tokenizer, shown: "tqdm[Any]"):
        """`shown`: counts the bytes of tokens.

        Raises `DataError` if it is not such a file, does not belong to the table beside it, or holds no eos.
        """
        self.path = path
        self.ids = _tokens(path, tokenizer)
        """Token ids of all documents, memory-mapped."""
        table = f"{path.removesuffix('.npy')}.csv.gz"
        self.paths: Sequence[str] = (path,)
        if os.path.isfile(table):
            self.paths = path, table
            self._starts, self._ends = _tabled(table, path, self.ids)
            shown.update(self.ids.nbytes)
        else:
            self._starts, self._ends = _searched(path, self.ids, tokenizer.eos_id, shown)
        self.documents = len(self._starts)
        odd = self.ids[1:_SAMPLE:2]
        if self.documents and len(odd) >= _ENOUGH and not odd.any():
            raise DataError(
                f"{path}: every second id is 0 if it is read as {self.ids.dtype}, the smallest type for the tokenizer's "
                f"{tokenizer.vocab_size} ids: it was written in a wider one. Use the tokenizer that it was written with, or save it with "
                "numpy.save, which names the type."
            )

    def bounds(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places in `ids` at which the tokens of documents [n] begin and end, int64 [n] each."""
        return self._starts[documents], self._ends[documents]


def _tokens(path: str, tokenizer: Tokenizer) -> np.ndarray:
    with open(path, "rb") as file:
        has_header = file.read(len(_MAGIC)) == _MAGIC
    if has_header:
        try:
            ids = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        except (ValueError, EOFError) as error:
            raise DataError(f"{path}: can't be read ({error}). Copy the file again.") from error
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise DataError(
                f"{path}: an array of {ids.dtype} in {ids.ndim} dimensions. Make the source's path match files of token ids: integers "
                "in one dimension."
            )
        return ids
    return map_raw(path, token_type(tokenizer.vocab_size), ", or use the tokenizer that it was written with")


def _tabled(table: str, path: str, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends of documents from dolma's table, int64 [documents] each."""
    try:
        with gzip.open(table, "rt", encoding="utf-8", newline="") as text:
            bounds = np.fromiter(((int(row[0]), int(row[1])) for row in csv.reader(text)), _PAIR)
    except (*DAMAGE, IndexError, csv.Error) as error:
        raise DataError(
            f"{table}: not a table of documents with start, end, … ({error}). Copy it again, or remove it to have {path} "
            "searched for eos."
        ) from error
    starts, ends = bounds.T
    if len(bounds) and (starts.min() < 0 or (starts > ends).any() or ends.max() > len(ids)):
        raise DataError(
            f"{table}: its documents end at token {ends.max():,}, and {path} has {len(ids):,} tokens of {ids.dtype}. Copy "
            "both again if one was cut short, or use the tokenizer that they were written with: its size gives the type."
        )
    return starts, ends


def _searched(path: str, ids: np.ndarray, eos_id: int | None, shown: "tqdm[Any]") -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends of documents that each end with eos, int64 [documents] each; the last one need not."""
    if eos_id is None:
        raise DataError(
            f"{path}: its documents end with eos, which the tokenizer has none of. Use the tokenizer that it was written with, or put "
            "dolma's .csv.gz beside it."
        )
    found = [np.zeros(1, np.int64)]
    for first in range(0, len(ids), _CHUNK):
        chunk = ids[first : first + _CHUNK]
        found.append(np.flatnonzero(chunk == eos_id) + first + 1)
        shown.update(chunk.nbytes)
    edges = np.concatenate(found)
    if len(edges) == 1 and len(ids):
        raise DataError(
            f"{path}: no eos (id {eos_id}) in its {len(ids):,} tokens, which ends every document. Use the tokenizer that it was written "
            "with, or put dolma's .csv.gz beside it."
        )
    if edges[-1] < len(ids):
        edges = np.append(edges, len(ids))
    return edges[:-1], edges[1:]
