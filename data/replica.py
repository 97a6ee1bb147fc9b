"""Ranks that train on the same rows of a batch: one of them reads, and all get the same items."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

F = TypeVar("F")
T = TypeVar("T")
W = TypeVar("W")


@dataclass(frozen=True)
class Shared(Generic[T]):
    """Items that all ranks of a replica get in the same order."""

    items: Iterator[T]
    close: Callable[[], None]
    """Ends the items, and a wait for the next one in another thread."""


class Replica:
    """A rank that shares its rows with no other; `farsight.parallel.replica` has the replica of several ranks."""

    reads = True
    """True on the rank that reads."""

    def share(self, items: Callable[[], Iterator[T]]) -> Shared[T]:
        """The items of the rank that reads; the others never call `items`.

        All ranks of a replica call it in the same order. An error in the items is raised on each of them, after the items
        before it.
        """
        return Shared(items(), lambda: None)

    def same(self, work: Callable[[], T]) -> T:
        """Runs `work` on the rank that reads; its result or error is returned or raised on all of them."""
        (result,) = self.share(lambda: (work() for _ in range(1))).items
        return result

    def build(self, whole: Callable[[], W], facts: Callable[[W], F], other: Callable[[F], T]) -> W | T:
        """Returns `whole()` on the rank that reads, and `other(facts(whole()))` on the others. Errors as in `same`."""
        built: list[W] = []

        def made() -> F:
            built.append(whole())
            return facts(built[0])

        received = self.same(made)
        return built[0] if built else other(received)


ALONE = Replica()
"""The replica of a run without tensor, context and pipeline parallelism, and of tools."""
