"""A tracker in a thread of its own, where it may fail, wait for a network or hang without the run noticing."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from farsight.training.trackers.tracker import Tracker

logger = logging.getLogger("farsight")

MOST_WAITING = 10_000
"""Records that wait for a tracker; further ones are lost."""
AGAIN_SECONDS = 60.0
"""Between attempts to open a tracker."""
HUNG_SECONDS = 60.0
"""After which a tracker that does not answer is reported."""


class Background:
    """Passes records on to a tracker. The first failure is reported, and at the end the number of lost records.

    Args:
        open_tracker: makes the tracker; if that fails, it is tried again every minute, and records wait meanwhile.
        again: steps and names of figures that an earlier start of the run passed on, as the steps after the checkpoint run again.
    """

    def __init__(
        self, name: str, open_tracker: Callable[[], Tracker], again: Collection[tuple[int, str]] = frozenset()
    ) -> None:
        self.name, self.again = name, again
        self.lost = 0
        self._open = open_tracker
        self._waiting: deque[Callable[[Tracker], None]] = deque()
        self._changed = threading.Condition()
        self._finished: bool | None = None
        """Whether the run finished; None while it goes on."""
        self._reported = False
        self._writing = False
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Passes on figures of a step, each named `group/name`."""

        def write(tracker: Tracker) -> None:
            known = self.again if tracker.resumed else ()
            new = {name: value for name, value in figures.items() if (step, name.partition("/")[2]) not in known}
            if new:
                tracker.log(step, new)

        self._put(write)

    def picture(self, step: int, path: Path) -> None:
        """Passes on a PNG file."""
        self._put(lambda tracker: tracker.picture(step, path))

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Passes on a table."""
        self._put(lambda tracker: tracker.table(step, name, columns, rows))

    def end(self, finished: bool) -> None:
        """Asks the thread to pass on what waits, and to end."""
        with self._changed:
            self._finished = finished
            self._changed.notify()

    def wait(self, seconds: float) -> None:
        """Waits for the thread for at most this long, and reports the number of lost records, if any."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self.lost += len(self._waiting) + self._writing
            logger.warning(f"{self.name} does not end, and is left behind.")
        if self.lost:
            logger.warning(f"{self.name}: {self.lost:,} records were lost in all.")

    def _put(self, work: Callable[[Tracker], None]) -> None:
        with self._changed:
            if len(self._waiting) < MOST_WAITING:
                self._waiting.append(work)
                self._changed.notify()
            else:
                self.lost += 1
                self._report(f"has {MOST_WAITING:,} records waiting")
        since = self._busy_since
        if since is not None and time.monotonic() - since > HUNG_SECONDS:
            self._report(f"has not answered for {HUNG_SECONDS:.0f} s")

    def _work(self) -> None:
        tracker: Tracker | None = None
        while tracker is None:
            self._busy_since = time.monotonic()
            try:
                tracker = self._open()
            except BaseException as error:  # whatever a library raises, SystemExit too
                self._busy_since = None
                self._report_error(error)
                with self._changed:
                    self._changed.wait_for(lambda: self._finished is not None, AGAIN_SECONDS)
                    if self._finished is not None:
                        self.lost += len(self._waiting)
                        self._waiting.clear()
                        return
        while (work := self._next()) is not None:
            self._writing = True
            self._try(work, tracker)
            self._writing = False
        self._try(lambda tracker: tracker.close(bool(self._finished)), tracker)
        self.lost += tracker.lost

    def _next(self) -> Callable[[Tracker], None] | None:
        """Waits for the next record; None at the end."""
        with self._changed:
            self._busy_since = None
            self._changed.wait_for(lambda: self._waiting or self._finished is not None)
            return self._waiting.popleft() if self._waiting else None

    def _try(self, work: Callable[[Tracker], None], tracker: Tracker) -> None:
        self._busy_since = time.monotonic()
        try:
            work(tracker)
        except BaseException as error:
            with self._changed:
                self.lost += self._writing
            self._report_error(error)

    def _report_error(self, error: BaseException) -> None:
        said = str(error).strip().partition("\n")[0][:300]
        self._report(f"failed ({type(error).__name__}{said and f': {said}'})")

    def _report(self, what: str) -> None:
        """Warns of the first thing that goes wrong."""
        if not self._reported:
            self._reported = True
            logger.warning(f"{self.name} {what}; the run goes on without what it can't take.")
