"""Tokens of a text with the span of characters that each stands for."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Encoded:
    """T tokens; token i stands for characters begins[i] … ends[i]-1 of the text. All arrays are int32 [T].

    Tokens that hold bytes of the same character have the same span.
    """

    ids: np.ndarray
    begins: np.ndarray
    ends: np.ndarray


def with_spans(text: str, ids: list[int], sizes: list[int]) -> Encoded:
    """Spans of tokens from the number of UTF-8 bytes, `sizes[i]`, that each stands for."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    bytes_a_character = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
    character_of_byte = np.repeat(np.arange(len(text), dtype=np.int32), bytes_a_character)
    ends = np.cumsum(sizes, dtype=np.int64)
    assert (ends[-1] if len(ends) else 0) == len(character_of_byte)
    begins = ends - np.asarray(sizes, dtype=np.int64)
    return Encoded(np.array(ids, dtype=np.int32), character_of_byte[begins], character_of_byte[ends - 1] + 1)


def from_offsets(ids: list[int], offsets: list[tuple[int, int]]) -> Encoded:
    """Spans of tokens from the tokenizers library's offsets, which may leave out the whitespace before a token."""
    spans = np.array(offsets, dtype=np.int32).reshape(-1, 2)
    ends = np.maximum.accumulate(spans[:, 1])
    begins = np.minimum(spans[:, 0], np.concatenate([[0], ends[:-1]]).astype(np.int32))
    return Encoded(np.array(ids, dtype=np.int32), begins, ends)
