"""Progress of what takes more than two seconds: a bar on a terminal, a line every ten seconds elsewhere."""

import io
import os
import sys
from typing import Any

from tqdm import tqdm

_DELAY = 2.0
_SECONDS_A_LINE = 10.0


def progress(what: str, total: int | None, unit: str) -> "tqdm[Any]":
    """A bar on stderr, of rank 0 alone, to be updated in units; a context manager that closes it."""
    settings: dict[str, Any] = {"desc": what, "total": total, "unit": unit, "unit_scale": True, "leave": False}
    if sys.stderr.isatty():
        return tqdm(**settings, delay=_DELAY, disable=not _first_rank())
    lines: Any = _Lines()
    return tqdm(
        **settings, delay=_DELAY, mininterval=_SECONDS_A_LINE, miniters=1, ncols=110, ascii=True, file=lines,
        disable=not _first_rank(),
    )  # fmt: skip


def _first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


class _Lines(io.TextIOBase):
    """Writes each state of a bar as a line of its own: a log file has no cursor to go back with."""

    def write(self, text: str) -> int:
        if line := text.strip():
            print(line, file=sys.stderr, flush=True)
        return len(text)
