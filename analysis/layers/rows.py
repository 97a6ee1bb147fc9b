"""The rows that farsight layers measures losses on: windows of text after the start token, or conversations in the chat template."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farsight.configs.finetuning import InstructionData, InstructionJsonl, InstructionParquet
from farsight.data.instructions.chat import chat_template
from farsight.data.instructions.rows import first_conversations
from farsight.data.packing import IGNORE
from farsight.data.sources.documents import BadRows
from farsight.data.sources.rows import JsonRows, ParquetTables
from farsight.data.texts import encode_file
from farsight.data.tokenizers.tokenizer import Tokenizer
from farsight.errors import ConfigError, DataError
from farsight.inference.decoder import Decoder
from farsight.model.build import set_length
from farsight.progress import progress

_LOOKED_AT = 16
"""Rows of a file that are looked at, to see what they hold."""


@dataclass(frozen=True)
class Rows:
    """Token sequences, and the tokens whose loss counts."""

    tokens: list[Tensor]
    """int64 [L] each."""
    counted: list[Tensor]
    """bool [L] each; the first token is predicted by none, and never counts."""
    kind: str = "windows"
    """"windows" of text, or "instructions", of which the tokens count that fine-tuning trains on."""

    @classmethod
    def whole(cls, tokens_SL: Tensor) -> "Rows":
        """Sequences all of whose tokens count."""
        return cls([*tokens_SL], [torch.ones(tokens_SL.shape[1], dtype=torch.bool) for _ in tokens_SL])

    @property
    def length(self) -> int:
        """Tokens of the longest."""
        return max(map(len, self.tokens))

    @property
    def targets(self) -> int:
        """Tokens that count, of all rows."""
        return sum(int(counted[1:].sum()) for counted in self.counted)


def read_rows(
    path: Path, tokenizer: Tokenizer, length: int | None, most: int, trained_length: int, vocab_size: int
) -> Rows:
    """Up to `most` rows of a file.

    A file of instructions (JSON lines, a JSON array or Parquet, in fine-tuning's formats) gives its first conversations, cut off at
    `length`, or at the trained length. Any other gives windows of `length` tokens, which begin with the start token if the tokenizer
    has one; without a length, the longest windows, up to the trained length, of which the text gives `most`.

    Raises:
        ConfigError: no such file, no usable row, or a text too short for a window.
    """
    first = _first_row(path)
    if first is not None and not isinstance(first.get("text"), str):
        return _conversations(path, tokenizer, length or trained_length, most, vocab_size)
    documents = encode_file(path, tokenizer)
    begin = torch.tensor([] if tokenizer.bos_id is None else [tokenizer.bos_id], dtype=torch.int64)
    own = (length or trained_length) - len(begin)
    longest = max(map(len, documents), default=0)
    if length is None:
        own = _longest_windows([len(document) for document in documents], own, most)
    if own < 1 or own > longest or own + len(begin) < 2:
        raise ConfigError(
            f"{path}: its longest document has {longest:,} tokens{' after the start token' * len(begin)}, so it gives no window of "
            f"{length or 2:,}; set --length to {longest + len(begin)} or less, and to 2 or more, or give it longer documents."
        )
    # Documents take turns, so that a few long ones don't supply every window.
    windows = [document[: len(document) // own * own].view(-1, own) for document in documents]
    rounds = max(map(len, windows))
    taken = (of_one[turn] for turn in range(rounds) for of_one in windows if turn < len(of_one))
    return Rows.whole(torch.stack([torch.cat([begin, window]) for window in islice(taken, most)]))


def _longest_windows(documents: list[int], most_tokens: int, windows: int) -> int:
    """The largest number of tokens, up to `most_tokens`, of which documents of these lengths give so many windows; that of the longest
    document if there are too few tokens."""
    low, high = 0, min(most_tokens, max(documents, default=0))
    while low < high:
        middle = (low + high + 1) // 2
        if sum(length // middle for length in documents) >= windows:
            low = middle
        else:
            high = middle - 1
    return low or min(most_tokens, max(documents, default=0))


def _first_row(path: Path) -> dict[str, Any] | None:
    """The first row of a file of JSON lines, a JSON array or Parquet that is an object; None of any other file."""
    report = BadRows("skip")
    try:
        if path.suffix in (".jsonl", ".json") and path.is_file():
            rows: JsonRows | ParquetTables = JsonRows(str(path), [str(path)], report, arrays=True)
        elif path.suffix == ".parquet" and path.is_file():
            rows = ParquetTables(str(path), [str(path)], report)
        else:
            return None
        found = (rows.read(number) for number in range(min(rows.count, _LOOKED_AT)))
        return next((row.value for row in found if row is not None), None)
    except DataError:
        return None  # the reader of texts says what is wrong with it


def _conversations(path: Path, tokenizer: Tokenizer, length: int, most: int, vocab_size: int) -> Rows:
    source = InstructionParquet if path.suffix == ".parquet" else InstructionJsonl
    data = InstructionData(sources=(source(path=str(path)),), held_out=0.0, on_bad_row="skip")
    template = chat_template(data, tokenizer)
    found = [*first_conversations(data, template, tokenizer, most, seq_len=length, vocab_size=vocab_size)]
    if not found:
        raise ConfigError(
            f"{path}: none of its rows is a conversation with an answer within {length:,} tokens: set a larger --length, or give it "
            "rows in a format of docs/finetuning/data.md."
        )
    tokens = [torch.from_numpy(one.ids).long() for one in found]
    return Rows(tokens, [torch.from_numpy(one.trained) for one in found], "instructions")


@torch.no_grad()
def mean_loss(decoder: Decoder, rows: Rows) -> float:
    """Mean negative log-likelihood, in nats, of all tokens that count."""
    longest, total = rows.length, 0.0
    set_length(decoder.model, decoder.config, longest)
    device = next(decoder.model.parameters()).device
    pairs = list(zip(rows.tokens, rows.counted, strict=True))
    for tokens, counted in progress(pairs, unit="row", desc=f"{len(pairs)} rows of up to {longest:,} tokens"):
        ids, labels = tokens[None].to(device), torch.where(counted, tokens, IGNORE)[None].to(device)
        begin = 1  # the token at p predicts the one at p + 1
        for h_BLD in decoder.start([len(tokens) - 1], longest - len(tokens) + 1).chunks(ids[:, :-1]):
            end = begin + h_BLD.shape[1]
            total += float(decoder.model.head(h_BLD, labels[:, begin:end]))
            begin = end
    return total / rows.targets
