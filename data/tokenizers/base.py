"""The interface of all tokenizers. Long texts are encoded slice by slice."""

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

from farsight.data.tokenizers.encoded import Encoded, with_spans
from farsight.data.tokenizers.files import TEMPLATE_FILE
from farsight.progress import progress

_SLICE = 1 << 17
"""Characters of a long text that are encoded in one call, about a tenth of a second's work."""
_CUT = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")
"""Before a word or after a line end: tokens begin there, unless there is more whitespace."""
_AROUND_CUT = 256
"""Characters on each side of a cut; their tokens must be the same with and without it."""
_CUTS_TRIED = 64


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

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of the text, without special tokens. Raises ValueError for invalid Unicode."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; special tokens are left out, and invalid UTF-8 becomes U+FFFD."""

    @abstractmethod
    def save(self, directory: str | Path) -> None:
        """Writes the files that `load_tokenizer_dir` reads; creates the directory if needed."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A hash that differs between different tokenizers."""

    @property
    @abstractmethod
    def vocabulary(self) -> dict[int, str]:
        """Every token, special ones included, as the tokenizer itself writes it, by id."""

    def encode_array(self, text: str) -> np.ndarray:
        """`encode` as int64 [n]. A long text is encoded slice by slice, with a progress bar."""
        if len(text) < 2 * _SLICE:
            return np.array(self.encode(text), dtype=np.int64)
        found: list[np.ndarray] = []
        start = time.perf_counter()
        with progress(desc="Tokenising", total=len(text), unit="character", unit_scale=True) as shown:
            for part in self._slices(text):
                found.append(np.array(self.encode(part), dtype=np.int64))
                tokens = sum(map(len, found))
                shown.set_postfix_str(f"{tokens / (time.perf_counter() - start):,.0f} tokens/s", refresh=False)
                shown.update(len(part))
        return np.concatenate(found)

    def _slices(self, text: str) -> Iterator[str]:
        """Splits a text so that the tokens of the parts, concatenated, are those of the text."""
        begin = 0
        if self.most_tokens(1) is not None:  # other tokenizers rewrite the text, and may prepend something to each part
            while len(text) - begin > 2 * _SLICE and (end := self._place_to_cut(text, begin + _SLICE)):
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

    def most_tokens(self, size: int) -> int | None:
        """Upper bound on the tokens of a text of `size` UTF-8 bytes; None if no bound is known."""
        return None

    def encode_rendered(self, texts: Sequence[str]) -> list[Encoded]:
        """Encodes texts that a chat template wrote; special tokens in them are recognised, as in `transformers`.

        Raises `DataError` if the characters of a token can't be determined.
        """
        return [self._encode_rendered(text) for text in texts]

    def _save_template(self, directory: Path) -> None:
        if self.chat_template is not None:
            (directory / TEMPLATE_FILE).write_text(self.chat_template, encoding="utf-8")

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
        return with_spans(text, ids, sizes)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def _byte_sizes(self, ids: list[int]) -> list[int]:
        """Bytes of text that each token stands for; not needed where `encode_rendered` is overridden."""
        raise NotImplementedError


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raises ValueError for an id outside 0 … vocab_size-1; called before decoding."""
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"token id {token_id} is outside the vocabulary of {vocab_size}")
