"""Progress of long work: a bar on a terminal, lines in a log."""

import os
import sys
import time
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

DELAY = 2.0
"""Seconds before the first bar or line is shown."""
INTERVAL = 10.0
"""Seconds between lines."""


def progress(
    iterable: Iterable[Any] | None = None,
    *,
    total: float | None = None,
    desc: str,
    unit: str,
    unit_scale: bool = False,
    leave: bool = False,
    disable: bool = False,
) -> tqdm:
    """A tqdm that draws a bar on stderr if that is a terminal, and otherwise prints a line every INTERVAL seconds.

    A line gives the progress, the speed and the time left. Work that finishes within DELAY seconds shows nothing.

    Args:
        iterable: what to iterate over; None for a bar moved by `update`.
        total: amount of work in `unit`; None takes the iterable's length.
        desc: a word or two that describe the work.
        unit: unit of the total, singular.
        unit_scale: write 5.2M for 5,200,000.
        leave: keep a finished bar on the terminal.
        disable: show nothing. In a run of several ranks only the first shows anything.
    """
    kind = tqdm if sys.stderr.isatty() else _Lines
    return kind(
        iterable,
        total=total,
        desc=desc,
        unit=unit,
        unit_scale=unit_scale,
        leave=leave,
        delay=DELAY,
        disable=disable or os.environ.get("RANK", "0") != "0",
        file=sys.stderr,
    )


class _Lines(tqdm):
    """tqdm for logs, where a redrawn bar would become one endless line."""

    disable: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._next = time.monotonic() + DELAY
        layout = "{desc}: {n_fmt} of {total_fmt} ({unit}), {rate_fmt}, {remaining} left{postfix}"
        super().__init__(*args, **kwargs, bar_format=layout, miniters=1)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if time.monotonic() >= self._next and msg != "":
            self._next = time.monotonic() + INTERVAL
            print(" ".join(str(self).split()), file=sys.stderr, flush=True)

    def close(self) -> None:
        if not self.disable:
            self.disable = True
            self._decr_instances(self)
