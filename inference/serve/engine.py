"""Answers requests on one model: rows that wait are read and continued together, batch after batch.

All rows of a batch share the columns of its cache, so that a row cannot join while others decode: rows that arrive meanwhile wait
for the next batch. Only rows that come out as they would alone are put together. A batch ends when its last row has, or
when those that are left were cancelled.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from farsight.data.tokenizers.tokenizer import Tokenizer
from farsight.inference.decoder import Decoder
from farsight.inference.generate.completions import read_prompts
from farsight.inference.sampling import Sampling
from farsight.inference.serve.errors import RequestError, reported
from farsight.inference.serve.logprobs import TokenLog, prompt_logs, token_logs
from farsight.inference.step import Step, written
from farsight.inference.text_stream import TextStream

GATHER = 0.01
"""Seconds that a batch with room waits for more rows: clients that run side by side ask again within milliseconds."""


@dataclass(frozen=True)
class Piece:
    """A part of a row's answer."""

    text: str = ""
    tokens: int = 0
    """Tokens drawn since the last piece, the end token included."""
    logs: tuple[TokenLog, ...] = ()
    """Log-probabilities of these tokens, and in the first piece of the prompt's too, as far as the row asks for them."""
    ended: Literal["end token", "stop string", "length"] | None = None
    error: str | None = None
    """Why there is no answer; nothing follows."""


@dataclass(eq=False)
class Row:
    """A prompt to continue, and where its answer goes."""

    prompt: Sequence[int]
    new_tokens: int
    """Most tokens to write; 0 only reads the prompt."""
    sampling: Sampling
    deliver: Callable[[Piece], object]
    """Called in the engine's thread, in order; the last piece has `ended` or `error`."""
    stop: Sequence[str] = ()
    end_tokens: frozenset[int | None] = frozenset()
    top: int | None = None
    """Number of likeliest tokens to log beside each token; None logs nothing."""
    scores_prompt: bool = False
    """Log the prompt's tokens too."""
    cancelled: bool = False
    """Set by any thread: nobody waits for the answer any more."""
    ended: bool = False
    """The last piece was given."""

    def give(self, piece: Piece) -> None:
        """Delivers a piece, if somebody waits for it."""
        if self.wanted:
            self.ended = piece.ended is not None or piece.error is not None
            self.deliver(piece)

    @property
    def wanted(self) -> bool:
        """True while a client waits for more of the answer."""
        return not (self.cancelled or self.ended)

    @property
    def reach(self) -> int:
        """Largest length that the row may reach, in tokens."""
        return len(self.prompt) + self.new_tokens

    @property
    def draws(self) -> tuple[float, float]:
        """The settings of sampling that rows of a batch must share."""
        return self.sampling.temperature, self.sampling.top_p if self.sampling.temperature else 1.0


class _Unwanted(Exception):  # noqa: N818  a way for a batch to end, not an error
    """Nobody waits for the batch any more."""


@dataclass
class Engine:
    """A thread that answers rows.

    Args:
        decoder: used by this thread alone.
        tokenizer: the model's.
        rows_at_once: most rows of a batch.
        queue: most rows that wait.
    """

    decoder: Decoder
    tokenizer: Tokenizer
    rows_at_once: int
    queue: int
    _waiting: list[Row] = field(default_factory=list)
    _running: list[Row] = field(default_factory=list)
    _closed: bool = False

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        # Such extensions place tokens by the length that a row may reach, which a batch has only one surplus for.
        self._same_new_tokens = self.decoder.rotates_own_keys
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False once the thread has ended, after which nothing is answered."""
        return self._thread.is_alive()

    def submit(self, rows: Sequence[Row]) -> None:
        """Queues rows.

        Raises:
            RequestError: too many rows wait already.
        """
        with self._changed:
            self._waiting = [row for row in self._waiting if row.wanted]
            if len(self._waiting) + len(rows) > self.queue:
                raise RequestError(
                    f"{len(self._waiting)} answers are waited for and {len(rows)} more were asked for; this server "
                    f"queues {self.queue} (--queue). Ask again later, or for fewer at a time.",
                    429,
                    "rate_limit_exceeded",
                )
            self._waiting += rows
            self._changed.notify()

    def cancel_all(self) -> None:
        """Cancels every row, waiting or running."""
        with self._changed:
            for row in (*self._waiting, *self._running):
                row.give(Piece(error="the server was stopped before the answer was complete"))

    def close(self) -> None:
        """Ends the thread; rows without an answer are cancelled."""
        self._closed = True
        self.cancel_all()
        with self._changed:
            self._changed.notify()
        self._thread.join()

    # ── In the thread ─────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                room = len(self._waiting) < self.rows_at_once
            if room:
                time.sleep(GATHER)
            with self._changed:
                self._running = self._take()
            if self._running:
                self._answer(self._running)
            self._running = []

    def _take(self) -> list[Row]:
        """Removes the rows of the next batch from the queue: the oldest, and those that may be read with it."""
        self._waiting = [row for row in self._waiting if row.wanted]
        batch: list[Row] = []
        for row in self._waiting:
            if len(batch) < self.rows_at_once and self._fits(batch, row):
                batch.append(row)
        self._waiting = [row for row in self._waiting if row not in batch]
        return batch

    def _fits(self, batch: Sequence[Row], row: Row) -> bool:
        """True if all rows get the same positions together as alone, and are sampled with the same settings."""
        if not batch:
            return True
        first = batch[0]
        if row.draws != first.draws or (self._same_new_tokens and row.new_tokens != first.new_tokens):
            return False
        together = [*batch, row]
        reach = max(len(each.prompt) for each in together) + max(each.new_tokens for each in together)
        lengths = list({first.reach, row.reach, reach})
        return len(lengths) == 1 or len(self.decoder.group_by_positions(range(len(lengths)), lengths)) == 1

    def _answer(self, batch: Sequence[Row]) -> None:
        try:
            self._decode(batch)
        except _Unwanted:
            pass
        except Exception as error:
            sentence = reported(error)
            for row in batch:
                row.give(Piece(error=sentence))
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()

    def _decode(self, batch: Sequence[Row]) -> None:
        new_tokens = max(row.new_tokens for row in batch)
        rows = self.decoder.start([len(row.prompt) for row in batch], new_tokens)
        answers = [_Answer(row, self.tokenizer) for row in batch]

        def on_read(h_BLD: Tensor) -> None:
            _stop_if_unwanted(batch)
            for number, answer in enumerate(answers):
                if answer.row.scores_prompt and answer.row.top is not None:
                    logs = prompt_logs(
                        rows, number, answer.row.prompt, h_BLD, self.tokenizer.vocab_size, answer.row.top
                    )
                    answer.logs += logs

        logits_BV = read_prompts(rows, [row.prompt for row in batch], on_read)
        for answer in answers:
            answer.end_without_tokens()
        step = Step(rows, logits_BV, self.tokenizer.vocab_size)
        logged = [number for number, row in enumerate(batch) if row.top is not None and row.new_tokens]
        logp_BV: list[Tensor] = []

        def look(logits_BV: Tensor) -> None:
            logp_BV[:] = [logits_BV[logged].log_softmax(-1)[:, : self.tokenizer.vocab_size]]

        generators = [row.sampling.generator() for row in batch]
        sampling = batch[0].sampling
        for tokens in written(step, new_tokens, sampling, generators, look if logged else None):
            for place, number in enumerate(logged):
                answers[number].log(tokens[number], logp_BV[0][place])
            for answer, token in zip(answers, tokens, strict=True):
                answer.push(token)
            if not any(row.wanted for row in batch):
                break


def _stop_if_unwanted(batch: Sequence[Row]) -> None:
    if not any(row.wanted for row in batch):
        raise _Unwanted


class _Answer:
    """The answer to a row while it is written."""

    def __init__(self, row: Row, tokenizer: Tokenizer) -> None:
        self.row, self.stream = row, TextStream(tokenizer, row.prompt, row.stop, row.end_tokens)
        self.logs: list[TokenLog] = []
        self.delivered = 0

    def end_without_tokens(self) -> None:
        """Ends a row that only reads its prompt."""
        if not self.row.new_tokens:
            self._deliver("", "length")

    def log(self, token: int, logp_V: Tensor) -> None:
        """Logs the next token of the row."""
        if self.row.wanted and self.row.top is not None:
            self.logs += token_logs(logp_V[None], [token], self.row.top)

    def push(self, token: int) -> None:
        """Takes the row's next token, and delivers the text that it releases."""
        if not self.row.wanted:
            return
        text, stream = self.stream.push(token), self.stream
        if stream.ended is None and len(stream.tokens) == self.row.new_tokens:
            text += stream.finish()
            self._deliver(text, stream.ended or "length")
        elif text or stream.ended:
            self._deliver(text, stream.ended)

    def _deliver(self, text: str, ended: Literal["end token", "stop string", "length"] | None) -> None:
        new, self.delivered = len(self.stream.tokens) - self.delivered, len(self.stream.tokens)
        self.row.give(Piece(text, new, tuple(self.logs), ended))
        self.logs = []
