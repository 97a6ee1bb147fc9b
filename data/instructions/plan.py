"""Plans each epoch: its conversations, their order, and which share a row, as pure functions of lengths, seed and epoch.

Every rank computes the same plan, so nothing has to be exchanged. A source's conversations form an endless sequence of
passes, each in an order of its own. With weight w an epoch takes the next w passes: with 2 every conversation twice, with 0.25
a quarter of them, so that four epochs cover all.
"""

import threading
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from farsight.data.order import hash64, permutation

_PLANS_KEPT = 3
_ITEMS, _ROWS = 0x6974656D, 0x726F7773
"""Separate the random draws for the orders of conversations and of rows from others of the same seed."""


@dataclass(frozen=True)
class EpochPlan:
    """The rows of an epoch, as lists of conversation numbers."""

    items: np.ndarray
    """int64 [conversations]: the conversations of all rows, concatenated."""
    offsets: np.ndarray
    """int64 [rows + 1], where in `items` each row starts."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, number: int) -> np.ndarray:
        """The conversations of a row, int64."""
        return self.items[self.offsets[number] : self.offsets[number + 1]]


def plan_epoch(
    lengths: np.ndarray,
    sizes: Sequence[int],
    weights: Sequence[float],
    *,
    seed: int,
    epoch: int,
    packed_length: int | None,
) -> EpochPlan:
    """The plan of epoch `epoch`, counted from 0.

    Args:
        lengths: number of tokens of each conversation, int64 [N], at most `packed_length`.
        sizes: number of conversations of each source, in the order of `lengths`.
        weights: passes over each source per epoch.
        packed_length: tokens of a row to pack conversations into; None gives each conversation its own row.
    """
    items = _items(sizes, weights, seed, epoch)
    if packed_length is None:
        return EpochPlan(items, np.arange(len(items) + 1))
    packed = best_fit(lengths[items], packed_length)
    # Best fit puts rows of long conversations first.
    order = permutation(len(packed), hash64(seed, epoch, _ROWS))
    rows = [items[packed[i]] for i in order]
    return EpochPlan(np.concatenate([items[:0], *rows]), np.cumsum([0, *map(len, rows)]))


class RowSequence:
    """The endless sequence of the rows of all epochs, from which the loader takes its batches. Thread-safe."""

    def __init__(
        self,
        lengths: np.ndarray,
        sizes: Sequence[int],
        weights: Sequence[float],
        *,
        seed: int,
        packed_length: int | None,
    ):
        """Arguments are `plan_epoch`'s."""
        self._plan = partial(plan_epoch, lengths, sizes, weights, seed=seed, packed_length=packed_length)
        self._lock = threading.RLock()
        self._plans: OrderedDict[int, EpochPlan] = OrderedDict()
        self._starts = [0]
        """The first row of each epoch, as far as computed."""

    def plan(self, epoch: int) -> EpochPlan:
        """The rows of an epoch, counted from 0."""
        with self._lock:
            if epoch not in self._plans:
                self._plans[epoch] = self._plan(epoch=epoch)
                while len(self._plans) > _PLANS_KEPT:
                    self._plans.popitem(last=False)
            return self._plans[epoch]

    def rows(self, first: int, count: int) -> list[np.ndarray]:
        """The conversations of rows first … first+count-1, int64 each."""
        places = [self._place(first + i) for i in range(count)]
        return [self.plan(epoch).row(row) for epoch, row in places]

    def rows_in(self, epochs: float) -> float:
        """Number of rows in the first `epochs` epochs; a partial epoch counts proportionally."""
        whole = int(epochs)
        part = epochs - whole
        return self._start(whole) + (part * len(self.plan(whole)) if part else 0)

    def epochs(self, rows: int) -> float:
        """Number of epochs, as a fraction, in the first `rows` rows."""
        epoch, row = self._place(rows)
        return epoch + row / len(self.plan(epoch))

    def _place(self, row: int) -> tuple[int, int]:
        """The epoch of a row of the sequence, and its number within the epoch."""
        with self._lock:
            while self._starts[-1] <= row:
                self._start(len(self._starts))
            epoch = bisect_right(self._starts, row) - 1
            return epoch, row - self._starts[epoch]

    def _start(self, epoch: int) -> int:
        with self._lock:
            while len(self._starts) <= epoch:
                self._starts.append(self._starts[-1] + len(self.plan(len(self._starts) - 1)))
            return self._starts[epoch]


def micro_batches(lengths: np.ndarray, size: int, ranks: int) -> np.ndarray:
    """The rows of each micro-batch of a global batch, int64 [ranks, G / (ranks · size), size]: rows of like length together.

    The longest rows come first, in a rank's micro-batches too, so that a step that runs out of memory does so at its start. Micro-batches of
    the same number have neighbouring lengths on all ranks, and every other one goes to the ranks in reverse order, so that
    none always has the longest. Which rows share a micro-batch does not depend on the number of ranks.

    Args:
        lengths: tokens of each row, int64 [G]; G is a multiple of size · ranks.
        size: rows of a micro-batch.
    """
    turns = np.argsort(-lengths, kind="stable").reshape(-1, ranks, size)
    turns[1::2] = turns[1::2, ::-1]
    return turns.swapaxes(0, 1)


def best_fit(lengths: np.ndarray, space: int) -> list[list[int]]:
    """Packs items of the given lengths, int64 [N], into rows of `space`: longest first, each into the row it fills best.

    Best-fit decreasing needs at most 11/9 of the minimum number of rows, plus one (Johnson, 1974). Items of equal length
    keep their order.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []
    """(space left, row), in order."""
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        assert length <= space
        at = bisect_left(room, (length, -1))
        if at < len(room):
            left, row = room.pop(at)
            rows[row].append(item)
        else:
            left, row = space, len(rows)
            rows.append([item])
        if left > length:
            insort(room, (left - length, row))
    return rows


def _items(sizes: Sequence[int], weights: Sequence[float], seed: int, epoch: int) -> np.ndarray:
    """The conversations of an epoch, in its order."""
    items, first = [], 0
    for source, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        begin, end = round(epoch * weight * size), round((epoch + 1) * weight * size)
        while begin < end:
            number, place = divmod(begin, size)
            taken = permutation(size, hash64(seed, source, number))[place : place + end - begin]
            items.append(first + taken)
            begin += len(taken)
        first += size
    together = np.concatenate([np.empty(0, dtype=np.int64), *items])
    return together[permutation(len(together), hash64(seed, epoch, _ITEMS))]
