"""Decodes tokens to text as they arrive: releases pieces that later tokens cannot change, up to a stop string."""

from collections.abc import Collection, Sequence
from typing import Literal

from farsight.data.tokenizers.tokenizer import Tokenizer

CONTEXT = 8
"""Prompt tokens decoded together with the first new ones, since a tokenizer may drop a space at the start of a text."""


class TextStream:
    """The text of one row.

    Attributes:
        tokens: tokens so far, the end token included.
        text: text released so far; `finish` completes it.
        ended: why the row has ended, or None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        end_tokens: Collection[int | None] | None = None,
    ) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(s for s in stop if s)
        self.end_tokens = {tokenizer.eos_id} if end_tokens is None else set(end_tokens)
        self.known = [int(token) for token in prompt[-CONTEXT:]]
        self.read = len(self.known)
        self.before = 0
        """Index of the first token that is decoded again with each new one."""
        self.tokens: list[int] = []
        self.text, self.pending = "", ""
        self.ended: Literal["end token", "stop string"] | None = None

    def push(self, token: int) -> str:
        """Takes the next token; returns the text that it releases, nothing once the row has ended."""
        if self.ended:
            return ""
        self.tokens.append(token)
        if token in self.end_tokens:
            self.ended = "end token"
            return self._release(everything=True)
        self.known.append(token)
        old = self.tokenizer.decode(self.known[self.before : self.read])
        new = self.tokenizer.decode(self.known[self.before :])
        if len(new) <= len(old) or new.endswith("\ufffd"):  # an incomplete character: more bytes are to come
            return ""
        self.before, self.read = self.read, len(self.known)
        self.pending += new[len(old) :]
        return self._release(everything=False)

    def finish(self) -> str:
        """Releases the rest of the text."""
        if self.ended:
            return ""
        old = self.tokenizer.decode(self.known[self.before : self.read])
        self.pending += self.tokenizer.decode(self.known[self.before :])[len(old) :]
        return self._release(everything=True)

    def _release(self, everything: bool) -> str:
        found = [place for place in (self.pending.find(stop) for stop in self.stop) if place >= 0]
        if found:
            self.ended, piece, self.pending = "stop string", self.pending[: min(found)], ""
        else:
            # The pending text may end with the beginning of a stop string.
            held = 0 if everything else max((_overlap(self.pending, stop) for stop in self.stop), default=0)
            cut = len(self.pending) - held
            piece, self.pending = self.pending[:cut], self.pending[cut:]
        self.text += piece
        return piece


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of the text that is a prefix of the stop string."""
    return next((n for n in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:n])), 0)
