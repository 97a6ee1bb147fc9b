"""Reads and tokenises instruction data: every conversation of one split, as flat arrays."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Any, Protocol

import numpy as np

from farsight.configs.finetuning import (
    InstructionData,
    InstructionHub,
    InstructionJsonl,
    InstructionParquet,
    InstructionSource,
)
from farsight.data.instructions.chat import ChatTemplate, Marked, Tokens
from farsight.data.instructions.conversations import UnusableRow, to_conversation
from farsight.data.mixture import check_vocabulary
from farsight.data.order import hash64, shuffled
from farsight.data.sources.documents import BadRows, Split, split_of
from farsight.data.sources.files import match_files
from farsight.data.sources.rows import JsonRows, ParquetTables, Row
from farsight.data.sources.streamed import open_dataset, place_of
from farsight.data.tokenizers.tokenizer import Tokenizer
from farsight.errors import DataError
from farsight.progress import progress

_AT_ONCE = 512
"""Conversations per tokenizer call: tokenizers work on them in parallel."""
_ROWS = 0x726F7773
"""Separates the random draw for `rows` from others of the same seed."""


@dataclass
class SourceReport(BadRows):
    """Rows of a source read for one split, and those left out; lengths are in tokens."""

    name: str
    on_bad_row: Any
    rows: int = 0
    """Rows read, of both splits."""
    conversations: int = 0
    tokens: int = 0
    trained: int = 0
    truncated: int = 0
    dropped: int = 0

    def __post_init__(self) -> None:
        super().__init__(self.on_bad_row)

    def __str__(self) -> str:
        share = self.trained / max(1, self.tokens)
        said = f"{self.name}: {self.conversations:,} conversations of {self.rows:,} rows, {self.tokens:,} tokens, "
        said += f"{share:.0%} of them trained; {self.truncated:,} truncated, {self.dropped:,} dropped as too long"
        return said + (f"; rows skipped: {dict(self.skipped)}" if self.skipped else "")


@dataclass
class Conversations:
    """N tokenised conversations of S sources, concatenated in the order of the sources; loaders fill rows from them."""

    ids: np.ndarray
    """int32 [tokens]."""
    trained: np.ndarray
    """bool [tokens]."""
    offsets: np.ndarray
    """int64 [N + 1], where each conversation starts."""
    sizes: tuple[int, ...]
    """Number of conversations of each source [S]."""
    keys: list[str]
    """Name of each in errors: "file:line"."""
    reports: list[SourceReport] = field(default_factory=list)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [N]: number of tokens of each conversation."""
        return np.diff(self.offsets)

    def tokens(self, conversation: int) -> Tokens:
        """The tokens of conversation `conversation`; views into the arrays."""
        begin, end = self.offsets[conversation], self.offsets[conversation + 1]
        return Tokens(self.ids[begin:end], self.trained[begin:end])

    @property
    def fingerprint(self) -> str:
        """A hash of all tokens, their training marks, and their division into conversations."""
        hashed = blake2b(digest_size=16)
        for array in (self.ids, self.trained, self.offsets):
            hashed.update(np.ascontiguousarray(array).data)
        return hashed.hexdigest()


def read_conversations(
    config: InstructionData,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    *,
    split: Split,
    seq_len: int,
    vocab_size: int,
) -> Conversations:
    """Reads every conversation of a split.

    Raises `DataError` for sources that can't be read, an unusable row (with `on_bad_row = "error"`), an overlong
    conversation (with `overlong = "error"`), and a split without conversations.
    """
    _check(config, split)
    ids, trained, lengths, sizes, keys, reports = [], [], [0], [], [], []
    for number, share in enumerate(config.sources):
        report = SourceReport(_name(share, number), config.on_bad_row)
        reader = _Reader(config, template, tokenizer, split, seq_len, vocab_size, report)
        for key, tokens in reader.read(share, hash64(config.seed, _ROWS, number)):
            ids.append(tokens.ids)
            trained.append(tokens.trained)
            lengths.append(len(tokens.ids))
            keys.append(key)
        sizes.append(report.conversations)
        reports.append(report)
    if not keys:
        remedy = "raise data.held_out" if split == "validation" else "add rows or lower data.held_out"
        skipped = {report.name: dict(report.skipped) for report in reports if report.skipped}
        raise DataError(
            f"data.sources: no conversation is in the {split} split; {remedy}."
            + (f" Skipped: {skipped}" if skipped else "")
        )
    return Conversations(np.concatenate(ids), np.concatenate(trained), np.cumsum(lengths), tuple(sizes), keys, reports)


def first_conversations(
    config: InstructionData, template: ChatTemplate, tokenizer: Tokenizer, most: int, *, seq_len: int, vocab_size: int
) -> Iterator[Tokens]:
    """The first usable conversations of a config's first source, up to `most`; what lies beyond them is not tokenised.

    Raises `DataError` as `read_conversations`.
    """
    share, *_ = config.sources
    report = SourceReport(_name(share, 0), config.on_bad_row)
    reader = _Reader(config, template, tokenizer, "train", seq_len, vocab_size, report)
    return (tokens for _, tokens in islice(reader.read(share, hash64(config.seed, _ROWS, 0)), most))


@dataclass(frozen=True)
class _Reader:
    """Reads one source."""

    config: InstructionData
    template: ChatTemplate
    tokenizer: Tokenizer
    split: Split
    seq_len: int
    vocab_size: int
    report: SourceReport

    def read(self, share: InstructionSource, seed: int) -> Iterator[tuple[str, Tokens]]:
        """The source's conversations with their names, in file order."""
        rows = _open(share, self.report)
        batch: list[tuple[Row, Marked]] = []
        numbers = _chosen(share, rows.count, seed, self.report.name)
        with progress(desc=f"Reading {self.report.name}", total=len(numbers), unit="row", unit_scale=True) as shown:
            for number in numbers:
                batch += self._marked(rows, int(number), share)
                if len(batch) == _AT_ONCE:
                    yield from self._tokenise(batch)
                    batch = []
                shown.update()
            yield from self._tokenise(batch)

    def _marked(self, rows: "_Rows", number: int, share: InstructionSource) -> list[tuple[Row, Marked]]:
        """A row with its conversation; empty if it belongs to the other split or is skipped."""
        self.report.rows += 1
        try:
            row = rows.read(number)
        except OSError as error:
            raise DataError(f"{self.report.name}: {error}. Put the file back.") from error
        if row is None:
            return []
        try:
            conversation = to_conversation(row.value, share.format, share.question, share.answer)
            if split_of(conversation.identity(), self.config.held_out) == self.split:
                return [(row, self.template.mark(conversation, self.config.train_on))]
        except UnusableRow as error:
            self.report.bad_row(row.key, row.file, error.reason, error.detail, error.remedy)
        return []

    def _tokenise(self, batch: list[tuple[Row, Marked]]) -> Iterator[tuple[str, Tokens]]:
        for (row, marked), tokens in zip(batch, self.template.encode([marked for _, marked in batch]), strict=True):
            check_vocabulary(tokens.ids, self.vocab_size, self.tokenizer, row.key)
            fitted = self._fit(row.key, tokens)
            if fitted is None:
                self.report.dropped += 1
                continue
            # The first token is never predicted.
            if not (count := int(fitted.trained[1:].sum())):
                cut = f" of its first {self.seq_len}" if len(fitted.ids) < len(tokens.ids) else ""
                self.report.bad_row(
                    row.key,
                    row.file,
                    "no trained token",
                    f"none{cut} of its {len(tokens.ids)} tokens is in a turn that is trained:\n{marked.text}\n",
                    'remove the row, correct its "train", or set data.train_on',
                )
                continue
            self.report.truncated += len(fitted.ids) < len(tokens.ids)
            self.report.conversations += 1
            self.report.tokens += len(fitted.ids)
            self.report.trained += count
            yield row.key, fitted

    def _fit(self, key: str, tokens: Tokens) -> Tokens | None:
        """The conversation, truncated to `seq_len` tokens if need be; None if it is dropped."""
        if len(tokens.ids) <= self.seq_len or self.config.overlong == "truncate":
            return Tokens(tokens.ids[: self.seq_len], tokens.trained[: self.seq_len])
        if self.config.overlong == "drop":
            return None
        raise DataError(
            f"{key}: {len(tokens.ids)} tokens, and training.seq_len = {self.seq_len}. Raise training.seq_len, or set "
            'data.overlong to "truncate" or "drop".'
        )


class _Rows(Protocol):
    @property
    def count(self) -> int: ...

    def read(self, row: int) -> Row | None: ...


class _DatasetRows:
    """Rows of a dataset of the `datasets` library."""

    def __init__(self, config: InstructionHub, name: str):
        self._dataset = open_dataset(config, name)
        self._place = f"{place_of(config)} [{config.split}]"
        self.count = len(self._dataset)

    def read(self, row: int) -> Row:
        return Row(f"{self._place} row {row}", self._place, self._dataset[row])


def _open(share: InstructionSource, report: SourceReport) -> _Rows:
    try:
        match share:
            case InstructionJsonl():
                return JsonRows(report.name, match_files(report.name, share.path), report, arrays=True)
            case InstructionParquet():
                return ParquetTables(report.name, match_files(report.name, share.path), report)
            case InstructionHub():
                return _DatasetRows(share, report.name)
    except OSError as error:
        raise DataError(f"{report.name}: {error}. Correct the source's path, or its permissions.") from error
    raise AssertionError(f"no reader for {share}")


def _chosen(share: InstructionSource, count: int, seed: int, name: str) -> np.ndarray:
    """Numbers of the rows to read, in file order, int64: all, or `rows` of them drawn by the seed."""
    if not share.rows:
        return np.arange(count)
    if share.rows > count:
        raise DataError(f"{name}: rows = {share.rows}, and the source has {count}. Set at most that, or 0 to take all.")
    return np.sort([shuffled(i, count, seed) for i in range(share.rows)])


def _name(share: InstructionSource, number: int) -> str:
    place = place_of(share) if isinstance(share, InstructionHub) else share.path
    return f"data.sources[{number}], {share.kind} '{place}'"


def _check(config: InstructionData, split: Split) -> None:
    """Raises `DataError` for settings that make no sense."""
    if not config.sources:
        raise DataError("data.sources is empty; add at least one [[data.sources]].")
    for number, share in enumerate(config.sources):
        if not (share.weight > 0 and math.isfinite(share.weight)):
            name = _name(share, number)
            raise DataError(f"{name}: weight = {share.weight}; set a positive number, or remove the source.")
        if share.rows < 0:
            raise DataError(f"{_name(share, number)}: rows = {share.rows}; set a number of rows, or 0 to take all.")
    if not 0 <= config.held_out < 1:
        raise DataError(f"data.held_out = {config.held_out}: a share of the conversations; set 0 … 0.99, e.g. 0.02.")
    if split == "validation" and config.held_out == 0:
        raise DataError("data.held_out = 0 keeps nothing for validation; set e.g. 0.02, or turn validation off.")
