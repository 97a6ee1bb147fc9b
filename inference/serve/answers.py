"""The JSON of answers, whole and in pieces, as OpenAI's API writes them."""

import time
import uuid
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from farsight.data.tokenizers.tokenizer import Tokenizer
from farsight.inference.serve.engine import Piece
from farsight.inference.serve.logprobs import TokenLog
from farsight.inference.serve.requests import Asked

_REASONS = {"end token": "stop", "stop string": "stop", "length": "length", None: None}


class Answers:
    """The answers to one request: n to each prompt, numbered prompt by prompt."""

    def __init__(self, asked: Asked, tokenizer: Tokenizer, model: str) -> None:
        self.asked, self.tokenizer, self.model = asked, tokenizer, model
        self.id = f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.written = 0
        """Tokens of all answers so far."""
        self._offsets: dict[int, int] = {}
        self.token_text = cache(self._token_text)

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        """The answer to a request without `stream`, from the pieces of each choice."""
        choices = []
        for number, parts in enumerate(pieces):
            joined = Piece(
                "".join(part.text for part in parts),
                sum(part.tokens for part in parts),
                tuple(log for part in parts for log in part.logs),
                parts[-1].ended,
            )
            self.written += joined.tokens
            choices.append(self._choice(number, joined, "message", first=True))
        return {**self._head(""), "choices": choices, "usage": self.usage}

    def piece(self, number: int, piece: Piece, first: bool) -> dict[str, Any]:
        """An event of a stream.

        Args:
            first: it is the first of this choice.
        """
        self.written += piece.tokens
        return {**self._head(".chunk"), "choices": [self._choice(number, piece, "delta", first)]}

    def last(self) -> dict[str, Any]:
        """The event that ends a stream with the numbers of tokens."""
        return {**self._head(".chunk"), "choices": [], "usage": self.usage}

    @property
    def usage(self) -> dict[str, int]:
        """Tokens of the prompts, each counted once, and of all answers."""
        read = sum(map(len, self.asked.prompts))
        return {"prompt_tokens": read, "completion_tokens": self.written, "total_tokens": read + self.written}

    def _head(self, kind: str) -> dict[str, Any]:
        shape = f"chat.completion{kind}" if self.asked.chat else "text_completion"
        return {"id": self.id, "object": shape, "created": self.created, "model": self.model}

    def _choice(self, number: int, piece: Piece, said: str, first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": number, "finish_reason": _REASONS[piece.ended], "logprobs": None}
        if self.asked.chat:
            role = {"role": "assistant"} if first else {}
            if self.asked.top is not None:
                choice["logprobs"] = {"content": [self._chat_log(log) for log in piece.logs]}
            return {**choice, said: {**role, "content": piece.text}}
        prompt = number // self.asked.answers
        echoed = self.asked.texts[prompt] if self.asked.echo and first else ""
        if self.asked.top is not None:
            choice["logprobs"] = self._logs(number, piece.logs, self.asked.prompts[prompt][0] if echoed else None)
        return {**choice, "text": echoed + piece.text}

    def _logs(self, number: int, logs: Iterable[TokenLog], first: int | None) -> dict[str, list[Any]]:
        """Logs of a completion, in lists; `first` is the prompt's first token, which nothing predicts."""
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

        def add(token: int, logprob: float | None, top: dict[str, float] | None) -> None:
            text, offset = self.token_text(token), self._offsets.get(number, 0)
            for name, value in zip(lists, (text, logprob, top, offset), strict=True):
                lists[name].append(value)
            # Special tokens are left out of the text.
            self._offsets[number] = offset + (len(text) if self.tokenizer.special_token(token) is None else 0)

        if first is not None:
            add(first, None, None)
        for log in logs:
            top: dict[str, float] = {}
            for token, value in (*log.top, (log.token, log.logprob)):
                # Several tokens may share a text, such as parts of characters: the likeliest of them counts.
                text = self.token_text(token)
                top[text] = max(value, top.get(text, value))
            add(log.token, log.logprob, top)
        return lists

    def _chat_log(self, log: TokenLog) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = self.token_text(token)
            return {
                "token": text,
                "logprob": logprob,
                "bytes": None if "\ufffd" in text else list(text.encode("utf-8", "surrogatepass")),
            }

        return {**entry(log.token, log.logprob), "top_logprobs": [entry(*each) for each in log.top]}

    def _token_text(self, token: int) -> str:
        """A token's text within a text: tokenizers may drop the space that a text's first token begins with."""
        special = self.tokenizer.special_token(token)
        if special is not None:
            return special
        return self.tokenizer.decode([token, token])[len(self.tokenizer.decode([token])) :]
