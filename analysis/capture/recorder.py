"""Records the queries and keys of attention layers during an ordinary forward pass.

Shapes: B rows, L tokens of a call, t recorded tokens, N query heads, K key heads, H head dim.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from farsight.model.attention import Attention
from farsight.model.context import PassThrough, SequenceContext


class Recorder(PassThrough):
    """A layer's context that records the queries and keys of some tokens and changes nothing else.

    A batch may arrive in several calls, cut along its rows (as pipelines do) or along its tokens (as prompts are read).
    Recorded tokens come out in the order of the calls, which is the order of `rows` (or `columns`) if those are sorted.

    Args:
        rows, columns: where the tokens are in the batch, int64 [t] each.
        inner: the layer's own context (other ranks' tokens, a cache), if it has one.
        along: the direction in which calls cut the batch.
    """

    def __init__(
        self,
        rows: Tensor,
        columns: Tensor,
        inner: SequenceContext | None = None,
        along: Literal["rows", "tokens"] = "rows",
    ) -> None:
        super().__init__(inner)
        self.rows, self.columns, self.along = rows, columns, along
        self.seen = 0
        """Rows or tokens seen so far, in earlier calls."""
        self._queries: list[Tensor] = []
        self._keys: list[Tensor] = []

    @property
    def queries_TNH(self) -> Tensor:
        return torch.cat(self._queries)

    @property
    def keys_TKH(self) -> Tensor:
        return torch.cat(self._keys)

    @property
    def nbytes(self) -> int:
        """Bytes of the recorded tensors and of the wrapped cache."""
        return sum(x.nbytes for x in (*self._queries, *self._keys)) + super().nbytes

    def pass_keys(self, k_BLKH: Tensor) -> Tensor:
        numbers = self.rows if self.along == "rows" else self.columns
        size = k_BLKH.shape[0 if self.along == "rows" else 1]
        here = (numbers >= self.seen) & (numbers < self.seen + size)
        self._rows = self.rows[here] - (self.seen if self.along == "rows" else 0)
        self._columns = self.columns[here] - (self.seen if self.along == "tokens" else 0)
        self.seen += size
        self._keys.append(_picked(k_BLKH, self._rows, self._columns))
        return k_BLKH

    def pass_queries(self, q_BLNH: Tensor) -> Tensor:
        self._queries.append(_picked(q_BLNH, self._rows, self._columns))
        return q_BLNH


def _picked(x_BLNH: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    # A layer may be on another device than the first, on which the batch is.
    return x_BLNH.detach()[rows.to(x_BLNH.device), columns.to(x_BLNH.device)]


_NOT_SET: Any = object()


@contextmanager
def recording(attentions: Mapping[int, Attention], rows: Tensor, columns: Tensor) -> Iterator[dict[int, Recorder]]:
    """Records these layers' queries and keys at some tokens of the batch that the model reads inside this context.

    Args:
        attentions: the layers to record, by number.
        rows, columns: as `Recorder` takes them.
    """
    # Where `context` was only a class attribute it must be one again: torch.compile guards on that, and would recompile.
    before = {layer: vars(attention).get("context", _NOT_SET) for layer, attention in attentions.items()}
    recorders = {layer: Recorder(rows, columns, attention.context) for layer, attention in attentions.items()}
    try:
        for layer, attention in attentions.items():
            attention.context = recorders[layer]
        yield recorders
    finally:
        for layer, attention in attentions.items():
            del attention.context
            if before[layer] is not _NOT_SET:
                attention.context = before[layer]
