"""Loaders whose batches a thread prepares ahead, on the rank that reads for its replica; checkpoints save their places."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from farsight.data.packing import Packed, Rows
from farsight.data.prefetch import Prefetch
from farsight.data.replica import ALONE, Replica
from farsight.data.saved_order import refuse_other_order

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]

ORDER_KEY = "order"
"""Key of a loader's state: JSON of everything that the order of its batches depends on."""


@dataclass(frozen=True)
class Place:
    """The position of a loader after a complete step."""

    state: dict[str, Any]
    """The part of it that a checkpoint saves, besides the order."""
    epochs: Any
    """Passes over the data, as the loader's `epochs`."""
    skipped: dict[str, dict[str, int]] = field(default_factory=dict)
    """Rows that could not be used, by source and reason, since the process started."""
    packed: Packed = field(default_factory=Packed)
    """Padding and cut documents in this rank's rows of the step that ends here."""


@dataclass(frozen=True)
class LoaderFacts:
    """A loader's properties that every rank of a replica knows, including those that do not read."""

    order: dict[str, Any]
    """Everything that the order of batches depends on: a flat dict, keyed by the names of the settings."""
    start: Place
    micro_batches_per_step: int


class ReadAheadLoader:
    """The endless micro-batches of one data-parallel rank, which a thread prepares at least one step ahead.

    Iterating again continues after the last complete step that was delivered, and ends the older iteration. A loader of this
    class itself is one of a rank that does not read: its replica's reading rank gives it the batches, and the places in the data.
    """

    _running: Prefetch[tuple[Batch, Place | None]] | None = None
    replica: Replica = ALONE
    most: int | None = None
    """Micro-batches of an iteration; None is no limit. What lies beyond them is not read ahead."""
    arrange: Callable[[Sequence[Rows]], list[Rows]] | None = None
    """Makes the micro-batches of a step of those that were read, from the same rows, in the thread that reads."""

    def __init__(self, facts: LoaderFacts):
        self.facts, self._place = facts, facts.start

    def _read(self, state: dict[str, Any]) -> Iterator[tuple[Rows, Place | None]]:
        """Micro-batches from a state on; the last of each step with the place after it, others with None. For the reading rank."""
        raise NotImplementedError  # every loader that reads overrides it

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        running = self._running = self._prefetched(self._place.state)
        try:
            for batch, place in running:
                if place is not None:
                    self._place = place
                yield batch
        finally:
            running.close()
        raise RuntimeError("this iteration of the loader was ended by a newer one; use that one.")

    def _prefetched(self, state: dict[str, Any]) -> Prefetch[tuple[Batch, Place | None]]:
        """Batches from a state on. Only its thread refers to the items, so they are closed where they are read."""
        shared = self.replica.share(lambda: islice(self._arranged(state), self.most))
        batches = ((to_batch(rows), place) for rows, place in shared.items)
        return Prefetch(batches, max(2, self.micro_batches_per_step), shared.close)

    def _arranged(self, state: dict[str, Any]) -> Iterator[tuple[Rows, Place | None]]:
        step: list[Rows] = []
        for rows, place in self._read(state):
            if self.arrange is None:
                yield rows, place
                continue
            step.append(rows)
            if place is not None:
                *others, last = self.arrange(step)
                yield from ((one, None) for one in others)
                yield last, place
                step = []

    def close(self) -> None:
        """Stops the background thread. Iterating again starts another."""
        if self._running is not None:
            self._running.close()
            self._running = None

    @property
    def micro_batches_per_step(self) -> int:
        """G/(W·b)."""
        return self.facts.micro_batches_per_step

    @property
    def epochs(self) -> Any:
        """Passes over the data in the steps delivered so far."""
        return self._place.epochs

    @property
    def skipped(self) -> dict[str, dict[str, int]]:
        """Rows that could not be used in the steps delivered so far, by source and reason."""
        return self._place.skipped

    @property
    def packed(self) -> Packed:
        """Padding and cut documents in this rank's rows of the last step delivered."""
        return self._place.packed

    def rewind(self) -> None:
        """Goes back to the first batch."""
        self._go_to(self.facts.start.state)

    def state_dict(self) -> dict[str, Any]:
        """The place after the last complete step that was delivered; a step in progress counts as not begun."""
        return {ORDER_KEY: json.dumps(self.facts.order), **self._place.state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues after the state's step; an empty state starts from the first batch.

        Raises `DataError`, naming both values, if the state has another order of data.
        """
        if not state_dict:
            self.rewind()
            return
        refuse_other_order(json.loads(state_dict[ORDER_KEY]), self.facts.order)
        self._go_to({key: state_dict[key] for key in self.facts.start.state})

    def check_order(self, saved: dict[str, Any]) -> None:
        """Raises `DataError` unless the order of data that a checkpoint was saved under is this loader's.

        Call it before loading: where the checkpoint has fewer lanes, loading fails with nothing but a missing key.
        """
        refuse_other_order(saved, self.facts.order)

    def _go_to(self, state: dict[str, Any]) -> None:
        self.close()
        self._place = replace(self._place, state=state)


def shared_loader(build: Callable[[], ReadAheadLoader], replica: Replica) -> ReadAheadLoader:
    """The loader that `build` makes on the rank that reads for its replica; on the others one that gets its batches.

    All ranks of the replica call it; an error is raised on all of them.
    """
    loader = replica.build(build, lambda built: built.facts, ReadAheadLoader)
    loader.replica = replica
    return loader


def to_batch(rows: Rows) -> Batch:
    """A loader's batch of some rows [b, L], as the trainer takes it.

    The tensors share the rows' memory; where there are GPUs, they are pinned copies, which copy to a GPU without being waited for.
    """

    def tensor(array: np.ndarray) -> torch.Tensor:
        shared = torch.from_numpy(array)
        return shared.pin_memory() if torch.cuda.is_available() else shared

    inputs = {"input": tensor(rows.inputs), "positions": tensor(rows.positions)}
    return inputs | {"document_starts": tensor(rows.document_starts)}, tensor(rows.labels)
