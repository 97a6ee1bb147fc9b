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
            return self._release("", everything=True)
        self.known.append(token)
        new = self._unread()
        if not new or new.endswith("\ufffd"):  # an incomplete character: more bytes are to come
            return ""
        self.before, self.read = self.read, len(self.known)
        return self._release(new, everything=False)

    def finish(self) -> str:
        """Releases the rest of the text."""
        return "" if self.ended else self._release(self._unread(), everything=True)

    def _unread(self) -> str:
        """The text that tokens from `read` on add."""
        old, new = (self.tokenizer.decode(self.known[self.before : end]) for end in (self.read, None))
        return new[len(old) :]

    def _release(self, new: str, everything: bool) -> str:
        text, held = self.pending + new, 0
        if found := [place for stop in self.stop if (place := text.find(stop)) >= 0]:
            self.ended, text = "stop string", text[: min(found)]
        elif not everything:  # the text may end with the beginning of a stop string
            ends = (n for n in range(len(text), 0, -1) if any(stop.startswith(text[-n:]) for stop in self.stop))
            held = next(ends, 0)
        piece, self.pending = text[: len(text) - held], text[len(text) - held :]
        self.text += piece
        return piece
