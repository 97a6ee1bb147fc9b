"""The interface of all tokenizers. Long texts are encoded slice by slice.

`encode` never adds or recognises special tokens: the packing marks where documents begin and end, and no text can forge
that. `encode_rendered` does recognise them, in the output of a chat template. A directory written by `save` can be read by
`load_tokenizer_dir` and by `transformers.AutoTokenizer` (which recognises special tokens in any text).
"""

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

from farsight.progress import progress

BOS, EOS, UNK = "<|bos|>", "<|eos|>", "<|unk|>"
"""Special tokens of the tokenizers made here."""
TEMPLATE_FILE = "chat_template.jinja"

_SLICE = 1 << 17
"""Characters of a long text that are encoded in one call, about a tenth of a second's work. Other threads wait while its ids become
Python numbers and while the library frees its tokens, some milliseconds; half the size did not shorten that."""
_CUT = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")
"""Before a word or after a line end: tokens begin there, unless there is more whitespace."""
_AROUND_CUT = 256
"""Characters on each side of a cut; their tokens must be the same with and without it."""
_CUTS_TRIED = 64
_TYPICAL_TEXT = "The order of documents depends on the seed alone: for i in range(3): return words[i]"
"""Gives a tokenizer's tokens per byte. The order of documents depends on it, so it must never change."""


@dataclass(frozen=True)
class Encoded:
    """T tokens; token i stands for characters begins[i] … ends[i]-1 of the text. All arrays are int32 [T].

    Tokens that hold bytes of the same character have the same span.
    """

    ids: np.ndarray
    begins: np.ndarray
    ends: np.ndarray


class Tokenizer(ABC):
    """Text to token ids and back."""

    vocab_size: int
    """Ids are 0 … vocab_size-1."""
    bos_id: int | None
    eos_id: int | None
    special_tokens: dict[str, int]
    """Id of each special token, by its text."""
    chat_template: str | None = None
    """Jinja source of the tokenizer's own chat template."""
    fingerprint: str
    """A hash that differs between different tokenizers."""
    one_token_a_byte = True
    """True if a text never has more tokens than UTF-8 bytes, and is encoded without being changed first."""
    growth: tuple[int, int] | None = (1, 0)
    """(a, b) such that n bytes (UTF-8) of text never have more than a·n + b tokens; None where nothing is known."""

    @abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...

    @abstractmethod
    def save(self, directory: str | Path) -> None:
        """Writes the files that `load_tokenizer_dir` reads; creates the directory if needed."""

    @property
    @abstractmethod
    def vocabulary(self) -> dict[int, str]:
        """Every token, special ones included, as the tokenizer itself writes it, by id."""

    def encode(self, text: str) -> list[int]:
        """Ids of the text, without special tokens. Raises ValueError for invalid Unicode."""
        try:
            return self._encode(text)
        except (RuntimeError, TypeError, UnicodeEncodeError) as error:
            raise ValueError(f"the text holds a lone surrogate and is not valid Unicode: {text[:40]!r}…") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; special tokens are left out, and invalid UTF-8 becomes U+FFFD.

        Raises ValueError for an id outside the vocabulary.
        """
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        return self._decode(list(ids))

    def encode_array(self, text: str) -> np.ndarray:
        """`encode` as int64 [n]. A long text is encoded slice by slice, with a progress bar."""
        if len(text) < 2 * _SLICE:
            return np.array(self.encode(text), dtype=np.int64)
        return np.concatenate([ids for ids, _ in self._encoded(text)])

    def encode_between(self, text: str, least: int, most: int) -> np.ndarray | None:
        """The ids of a text of `least` to `most` tokens, int64 [n]; None for another. A `most` of 0 is no limit.

        A long text is encoded until it is certain to be too long or too short.
        """
        found: list[np.ndarray] = []
        tokens, left = 0, len(text.encode("utf-8", "surrogatepass"))
        for ids, part in self._encoded(text, _SLICE // 4):
            found.append(ids)
            tokens += len(ids)
            left -= len(part.encode("utf-8", "surrogatepass"))
            if (most and tokens > most) or left < self.least_bytes(least - tokens):
                return None
        return np.concatenate(found)

    def _encoded(self, text: str, size: int = 0) -> Iterator[tuple[np.ndarray, str]]:
        """The ids of each slice of a text, int64 [n], and the slice; with a progress bar."""
        start, tokens = time.perf_counter(), 0
        with progress(desc="Tokenising", total=len(text), unit="character", unit_scale=True) as shown:
            for part in self._slices(text, size):
                ids = np.array(self.encode(part), dtype=np.int64)
                tokens += len(ids)
                shown.set_postfix_str(f"{tokens / (time.perf_counter() - start):,.0f} tokens/s", refresh=False)
                shown.update(len(part))
                yield ids, part

    def least_bytes(self, tokens: int) -> int:
        """Bytes (UTF-8) that a text of `tokens` tokens or more has at least; 0 where nothing is known."""
        if self.growth is None:
            return 0
        a_byte, more = self.growth
        return max(0, -(-(tokens - more) // a_byte))

    def encode_arrays(self, texts: Sequence[str], dtype: np.dtype) -> list[np.ndarray]:
        """The ids of many texts, without a progress bar."""
        return [np.concatenate([np.array(self.encode(part), dtype) for part in self._slices(text)]) for text in texts]

    def _slices(self, text: str, size: int = 0) -> Iterator[str]:
        """Splits a text into parts of about `size` characters so that their tokens, concatenated, are those of the text."""
        size = size or _SLICE
        begin = 0
        if self.one_token_a_byte:  # other tokenizers rewrite the text, and may prepend something to each part
            while len(text) - begin > 2 * size and (end := self._place_to_cut(text, begin + size)):
                yield text[begin:end]
                begin = end
        yield text[begin:]

    def _place_to_cut(self, text: str, start: int) -> int | None:
        """The first position from `start` on where a cut leaves the tokens unchanged; None if none is found."""
        for cut in (match.end() for match in islice(_CUT.finditer(text, start), _CUTS_TRIED)):
            left, right = text[max(0, cut - _AROUND_CUT) : cut], text[cut : cut + _AROUND_CUT]
            if self.encode(left + right) == self.encode(left) + self.encode(right):
                return cut
        return None

    def encode_rendered(self, texts: Sequence[str]) -> list[Encoded]:
        """Encodes texts that a chat template wrote; special tokens in them are recognised, as in `transformers`.

        Raises `DataError` if the characters of a token can't be determined.
        """
        return [self._encode_rendered(text) for text in texts]

    def _save_template(self, directory: Path) -> None:
        if self.chat_template is not None:
            (directory / TEMPLATE_FILE).write_text(self.chat_template, encoding="utf-8")

    @cached_property
    def tokens_a_byte(self) -> float:
        """A rough guess, from one sentence."""
        return len(self.encode(_TYPICAL_TEXT)) / len(_TYPICAL_TEXT)

    @property
    def begins_with_bos(self) -> bool:
        """Whether `transformers` puts bos before a text by itself."""
        return self.bos_id is not None

    def special_token(self, token_id: int | None) -> str | None:
        """The text of a special token; None if there is no such id."""
        return next((token for token, i in self.special_tokens.items() if i == token_id), None)

    def _encode_rendered(self, text: str) -> Encoded:
        ids: list[int] = []
        sizes: list[int] = []  # in bytes
        parts = self._special.split(text) if self.special_tokens else [text]
        for number, part in enumerate(parts):
            if number % 2:
                ids.append(self.special_tokens[part])
                sizes.append(len(part.encode()))
            elif part:
                new = self.encode(part)
                ids += new
                sizes += self._byte_sizes(new)
        return _with_spans(text, ids, sizes)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def _byte_sizes(self, ids: list[int]) -> list[int]:
        """Bytes of text that each token stands for."""
        raise NotImplementedError  # tokenizers that override `encode_rendered` never call it


def _with_spans(text: str, ids: list[int], sizes: list[int]) -> Encoded:
    """Spans of tokens from the number of UTF-8 bytes, `sizes[i]`, that each stands for."""
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    bytes_a_character = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
    character_of_byte = np.repeat(np.arange(len(text), dtype=np.int32), bytes_a_character)
    ends = np.cumsum(sizes, dtype=np.int64)
    assert (ends[-1] if len(ends) else 0) == len(character_of_byte)
    begins = ends - np.asarray(sizes, dtype=np.int64)
    return Encoded(np.array(ids, dtype=np.int32), character_of_byte[begins], character_of_byte[ends - 1] + 1)
