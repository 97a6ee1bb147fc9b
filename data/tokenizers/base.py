"""The interface of all tokenizers, which encode long texts slice by slice."""

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
"""Characters of a long text that are encoded at once, about a tenth of a second's work."""
_CUT = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")
"""Before a word or after a line end: tokenizers begin tokens there, unless there is more whitespace."""
_AROUND_CUT = 256
"""Characters on each side of a cut whose tokens must be the same with and without it."""
_CUTS_TRIED = 64


class Tokenizer(ABC):
    """Text to ids and back."""

    vocab_size: int
    """Ids are 0 … vocab_size-1."""
    bos_id: int | None
    eos_id: int | None
    special_tokens: dict[str, int]
    """Ids of the special tokens, by their text."""
    chat_template: str | None = None
    """Jinja source of the tokenizer's own chat template."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of the text, without special tokens. Raises ValueError for text that is no valid Unicode."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; special tokens give none, and bytes that are no UTF-8 give U+FFFD."""

    @abstractmethod
    def save(self, directory: str | Path) -> None:
        """Writes what `load_tokenizer_dir` needs into the directory, which is made if it is not there."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A hash that is the same for equal tokenizers only."""

    @property
    @abstractmethod
    def vocabulary(self) -> dict[int, str]:
        """Each token as the tokenizer itself writes it, special ones among them, by id."""

    def encode_array(self, text: str) -> np.ndarray:
        """`encode`, as an int64 array. A long text is encoded slice by slice, and shows its progress."""
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
        """Parts of a text whose tokens, one part after the other, are the text's."""
        begin = 0
        if self.most_tokens(1) is not None:  # others rewrite the text, and may put something before each part
            while len(text) - begin > 2 * _SLICE and (end := self._place_to_cut(text, begin + _SLICE)):
                yield text[begin:end]
                begin = end
        yield text[begin:]

    def _place_to_cut(self, text: str, start: int) -> int | None:
        """The first place from `start` on at which the text may be cut without a change to its tokens."""
        for cut in (match.end() for match in islice(_CUT.finditer(text, start), _CUTS_TRIED)):
            left, right = text[max(0, cut - _AROUND_CUT) : cut], text[cut : cut + _AROUND_CUT]
            if self.encode(left + right) == self.encode(left) + self.encode(right):
                return cut
        return None

    def most_tokens(self, size: int) -> int | None:
        """The most tokens that a text of `size` UTF-8 bytes can have; None where there is no known bound."""
        return None

    def encode_rendered(self, texts: Sequence[str]) -> list[Encoded]:
        """Tokens of texts in which special tokens count as such, as `transformers` reads them.

        Raises `DataError` where it is not known which characters a token stands for.
        """
        return [self._encode_rendered(text) for text in texts]

    def _save_template(self, directory: Path) -> None:
        if self.chat_template is not None:
            (directory / TEMPLATE_FILE).write_text(self.chat_template, encoding="utf-8")

    @property
    def begins_with_bos(self) -> bool:
        """Whether `transformers` puts bos before a text of its own accord."""
        return self.bos_id is not None

    def special_token(self, token_id: int | None) -> str | None:
        """The text of a special token."""
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
        """Bytes of the text that each token stands for; not asked of a tokenizer that has its own `encode_rendered`."""
        raise NotImplementedError


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"token id {token_id} is outside the vocabulary of {vocab_size}")
