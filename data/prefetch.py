"""A background thread that keeps a few items of an iterator ready."""

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")

_POLL_SECONDS = 0.1
_JOIN_SECONDS = 5.0


class Prefetch(Generic[Item]):
    """Iterates over `items` in order, while a thread runs up to `depth` items ahead; loaders prepare batches with it.

    An exception in the iterator is re-raised in the consumer, with its traceback, after the items before it. `close` stops
    the thread; so does the end of the process, or losing the last reference. It calls `wake` first, for an iterator that waits
    for something else.
    """

    def __init__(self, items: Iterator[Item], depth: int, wake: Callable[[], None] = lambda: None):
        self._ready: queue.Queue[tuple[Item | None, BaseException | None]] = queue.Queue(maxsize=depth)
        stop = threading.Event()
        thread = threading.Thread(target=_run, args=(items, self._ready, stop), name="data-prefetch", daemon=True)
        self.close = weakref.finalize(self, _stop, thread, stop, wake)
        self._closed = stop
        thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        while not self._closed.is_set():
            try:
                item, error = self._ready.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if error is None:
                return item  # type: ignore[return-value]  # the sentinel and the error are ruled out above
            self.close()
            raise error
        raise StopIteration


def _run(items: Iterator[Item], ready: "queue.Queue", stop: threading.Event) -> None:
    # A function, not a method: a reference from the thread would keep the object from being collected.
    try:
        for item in items:
            if not _put(ready, (item, None), stop):
                return
        _put(ready, (None, StopIteration()), stop)
    except BaseException as error:
        _put(ready, (None, error), stop)


def _put(ready: "queue.Queue", entry: tuple, stop: threading.Event) -> bool:
    """Waits for a free slot; False when stopped."""
    while not stop.is_set():
        try:
            ready.put(entry, timeout=_POLL_SECONDS)
            return True
        except queue.Full:
            continue
    return False


def _stop(thread: threading.Thread, stop: threading.Event, wake: Callable[[], None]) -> None:
    stop.set()
    wake()
    if thread is not threading.current_thread():
        thread.join(_JOIN_SECONDS)
