"""Sources whose documents are tokenised already: token shards, and the token files of Megatron-LM and OLMo.

Splits and length filters are answered from the index, so rows that do not pass cost no reading. A lane looks a few hundred rows
ahead at a time; what it reads is the same as if it went row by row.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from farsight.configs import schema
from farsight.data.order import EpochOrder
from farsight.data.shards.reader import MOST_TOKENS, Shards, TokenRows
from farsight.data.sources.documents import DocumentSource, TokenDocument
from farsight.data.sources.token_files import TokenFiles
from farsight.data.tokenizers.base import Tokenizer
from farsight.errors import DataError

_AHEAD = 256
"""Rows that a lane looks up at once."""


class ShardSource(DocumentSource):
    """Rows of token shards, in the order of the source that they were made from; or documents of other programs' token files."""

    def __init__(self, config: schema.ShardsSource, seed: int, tokenizer: Tokenizer | None, **shared: Any):
        """`tokenizer`: the run's, if there is one yet. Raises `DataError` for tokens of another one."""
        super().__init__(**shared)
        if not config.path:
            raise DataError(
                f"{self.name}: path is empty. Set it to a folder that `farsight prepare` wrote, or to Megatron-LM's or OLMo's files."
            )
        place = Path(config.path).expanduser()
        self._shards: TokenRows = (
            Shards(place, tokenizer) if place.is_dir() else TokenFiles(self.name, config.path, tokenizer)
        )
        self._limits = config.min_tokens, config.max_tokens or MOST_TOKENS
        self.order = EpochOrder(self._shards.blocks or [self._shards.rows], seed)

    @property
    def mean_size(self) -> float:
        return self._shards.mean_size

    def rows_if_fewer(self, than: int) -> int | None:
        return self.order.rows if self.order.rows < than else None

    def passing(self, rows: np.ndarray) -> np.ndarray:
        """Records of the rows [n] that are in the split and pass the length filter; those of 0 tokens for the others."""
        records = self._shards.records(rows, *self._limits)
        if self._held_out:
            held_out = self._shards.hashes(records) / 2**64 < self._held_out
            records["tokens"][held_out != (self.split == "validation")] = 0
        return records

    def document(self, row: int, shard: int, start: int, length: int) -> TokenDocument:
        """The document of a row's record."""
        return TokenDocument(self._shards.name_of(row), self._shards.tokens(shard, start, length), self._shards.text)

    def read_row(self, row: int) -> TokenDocument | None:
        _, start, shard, length = self.passing(np.array([row]))[0].tolist()
        return self.document(row, shard, start, length) if length else None

    def read_rows(self) -> Iterator[TokenDocument | None]:
        return map(self.read_row, range(self.order.rows))

    def lane(self, lane: int, lanes: int) -> "ShardLane":
        return ShardLane(self, lane, lanes)

    def describe(self) -> dict[str, Any]:
        return {"rows": self.order.rows, "files": self._shards.identity()}


class ShardLane:
    """Items lane, lane + lanes, lane + 2·lanes, … of the endless sequence; those that do not pass are passed over."""

    def __init__(self, source: ShardSource, lane: int, lanes: int):
        self._source, self._lane, self._lanes = source, lane, lanes
        self.load_state([0])

    def state(self) -> list[int]:
        return [self._count]

    def load_state(self, state: list[int]) -> None:
        (self._count,) = state
        self.epoch = self._position(self._count) // self._source.order.rows
        self._ahead: Iterator[tuple[int, int, int, int, int]] = iter(())
        self._ahead_end = self._count

    def read(self) -> TokenDocument | None:
        """The next document that passes; None if there is none among the rows that were looked up."""
        if (found := next(self._ahead, None)) is None and self._count == self._ahead_end:
            self._look_ahead()
            found = next(self._ahead, None)
        if found is None:
            self._go_to(self._ahead_end)
            return None
        count, row, shard, start, length = found
        self._go_to(count + 1)
        return self._source.document(row, shard, start, length)

    def _position(self, count: int) -> int:
        return self._lane + self._lanes * count

    def _go_to(self, count: int) -> None:
        self._count = count
        self.epoch = self._position(max(0, count - 1)) // self._source.order.rows

    def _look_ahead(self) -> None:
        """Looks up the next rows of this pass."""
        order, first = self._source.order, self._count
        epoch, place = divmod(self._position(first), order.rows)
        places = np.arange(place, min(order.rows, place + _AHEAD * self._lanes), self._lanes)
        rows = order.rows_of_epoch(epoch, places)
        records = self._source.passing(rows)
        passing = np.flatnonzero(records["tokens"])
        columns = (passing + first, rows[passing], *(records[name][passing] for name in ("shard", "start", "tokens")))
        self._ahead = zip(*(column.tolist() for column in columns), strict=True)
        self._ahead_end = first + len(places)
