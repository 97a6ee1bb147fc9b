"""Token files of Megatron-LM: a pair of files, tokens in `.bin` and an index in `.idx`. All numbers are little-endian.

    .bin    token ids of all sequences, one after the other, in the type that the index names
    .idx    bytes 0 … 8     MMIDIDX and two zero bytes
            uint64          version, 1
            uint8           code of the type of token ids
            uint64          S, the number of sequences
            uint64          D + 1, where D is the number of documents
            int32 [S]       tokens of each sequence
            int64 [S]       byte in .bin at which each sequence begins
            int64 [D + 1]   first sequence of each document, then S

A document is one sequence, or several where sentences were split; its end may have the tokenizer's "end of document" token.
Multimodal data has a byte more for each sequence in its index, and is refused.
"""

import struct
from collections.abc import Sequence

import numpy as np

from farsight.data.shards.layout import map_raw
from farsight.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct(f"<{len(_MAGIC)}sQBQQ")
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4", 10: "<u8"}
"""Types of token ids by their codes; 9 and 10 are what derivatives of Megatron-LM write."""


class MegatronFile:
    """A pair of files. Opening it maps both, and reads the header and the last entries of the index."""

    def __init__(self, prefix: str):
        """`prefix`: path of the files without `.bin` or `.idx`. Raises `DataError` if they are not such a pair, or cut short."""
        self.path, self._index = f"{prefix}.bin", f"{prefix}.idx"
        self.paths: Sequence[str] = (self._index, self.path)
        raw = map_raw(self._index, np.dtype("u1"))
        if raw[: len(_MAGIC)].tobytes() != _MAGIC or len(raw) < _HEADER.size:
            raise DataError(
                f"{self._index}: not an index of Megatron-LM, which begins with MMIDIDX. Make the source's path match its .idx and "
                ".bin files only."
            )
        _, version, code, sequences, entries = _HEADER.unpack(raw[: _HEADER.size].tobytes())
        if version != 1 or code not in _TYPES:
            raise DataError(
                f"{self._index}: version {version} with type {code} of token ids; version 1 is read, with the integers "
                f"{', '.join(map(str, _TYPES))}. Write the data again with Megatron-LM's tools/preprocess_data.py."
            )
        sizes = [4 * sequences, 8 * sequences, 8 * entries]
        if len(raw) != _HEADER.size + sum(sizes):
            raise DataError(
                f"{self._index}: {len(raw):,} bytes, but {sequences:,} sequences in {entries - 1:,} documents need "
                f"{_HEADER.size + sum(sizes):,}. Copy it again if it was cut short; multimodal data, which has more, can't be read."
            )
        lengths, pointers, documents = np.split(raw[_HEADER.size :], np.cumsum(sizes[:2]))
        self._lengths, self._pointers = lengths.view("<i4"), pointers.view("<i8")
        self._documents = documents.view("<i8")
        self.documents = entries - 1 if sequences else 0
        self.ids = map_raw(self.path, np.dtype(_TYPES[code]))
        """Token ids of all documents, memory-mapped."""
        if entries == 0 or self._documents[[0, -1]].tolist() != [0, sequences] or self._end(sequences) != len(self.ids):
            raise self._not_a_pair()

    def bounds(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places in `ids` at which the tokens of documents [n] begin and end, int64 [n] each. Raises `DataError` for a damaged index."""
        first, after = self._documents[documents], self._documents[documents + 1]
        if (first < 0).any() or (first > after).any() or (after > len(self._lengths)).any():
            raise self._not_a_pair()
        # A document without sequences begins where the next one does, which there may not be.
        starts = self._pointers[np.minimum(first, len(self._pointers) - 1)] // self.ids.itemsize
        ends = np.where(first < after, self._end(after), starts)
        if (starts < 0).any() or (starts > ends).any() or (ends > len(self.ids)).any():
            raise self._not_a_pair()
        return starts, ends

    def _end(self, sequences: np.ndarray | int) -> np.ndarray | int:
        """Number of tokens in the first sequences, of each number of them."""
        if not len(self._lengths):
            return 0
        last = np.maximum(sequences, 1) - 1
        return self._pointers[last] // self.ids.itemsize + self._lengths[last]

    def _not_a_pair(self) -> DataError:
        return DataError(
            f"{self._index} does not belong to {self.path}, which has {len(self.ids):,} tokens of {self.ids.dtype}: "
            "one of them is damaged, or cut short. Copy both again."
        )
