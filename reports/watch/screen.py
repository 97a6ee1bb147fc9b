"""The terminal view of runs: text with ANSI's escape sequences, in place on a terminal of any width."""

import os
import select
import shutil
import sys
import termios
import textwrap
import time
import tty
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from farsight.reports.watch.figures import about, figures
from farsight.reports.watch.run import Run

BLOCKS = "▁▂▃▄▅▆▇█"
STYLES = {"bold": "1", "dim": "2", "finished": "32", "running": "36", "stopped": "33", "silent": "33", "failed": "31", "unreadable": "31", "waiting": "2"}  # fmt: skip
"""Styles as codes of ANSI's escape sequences."""
_INDENT, _GAP = "  ", "   "
_SENTENCE = 3
"""Most lines of the message with which a run ended."""


# ── Lines that fit ────────────────────────────────────────────────────────────────────────────────────


def cells(text: str) -> int:
    """The columns that a text takes on a terminal: East Asian wide characters take two, combining ones none."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in ("W", "F") else 1 for c in text
    )


def clean(text: str) -> str:
    """A text from a file with a question mark for each control character, which could move a terminal's cursor."""
    return "".join(c if c.isprintable() else "?" for c in text)


def clip(text: str, width: int) -> str:
    """A text cut to a width, with … at its end if anything is missing."""
    if cells(text) <= width:
        return text
    while text and cells(text) > width - 1:
        text = text[:-1]
    return text + "…" if width > 0 else ""


class Painter:
    """Writes styles, or leaves them out where there is no colour."""

    def __init__(self, colour: bool) -> None:
        self.colour = colour

    def __call__(self, text: str, style: str) -> str:
        return f"\033[{STYLES[style]}m{text}\033[0m" if self.colour and style and text else text


def block(run: Run, now: float, width: int, paint: Painter) -> list[str]:
    """A run's lines, none wider than `width`."""
    kind, words = run.state(now)
    words = clip(clean(words), width)
    name = clip(clean(run.name), max(0, width - cells(words) - 2))
    room = width - cells(name) - cells(words) - 4
    beside = "  " + clip(clean(about(run)), room) if room > 0 else ""
    space = " " * max(0, width - cells(name) - cells(beside) - cells(words))
    lines = [paint(name, "bold") + paint(beside, "dim") + space + paint(words, kind)]
    wide = (width - 80) // 3 if width > 80 else min(0, width - 80)
    line, used = "", 0
    for label, value, style in _fields(run, now, kind, max(4, 30 + wide), max(4, 12 + wide)):
        label = clip(clean(label) + " " * bool(label), width - len(_INDENT))
        value = clip(clean(value), width - len(_INDENT) - cells(label))
        size = cells(label) + cells(value)
        if used and used + len(_GAP) + size > width:
            lines.append(line)
            used = 0
        before = _GAP if used else _INDENT
        line = line * bool(used) + before + paint(label, "dim") + paint(value, style)
        used += len(before) + size
    lines += [line] * bool(used)
    if kind in ("failed", "stopped"):
        sentence = textwrap.wrap(clean(str(run.end.get("sentence", ""))), max(1, width - len(_INDENT)))
        lines += [_INDENT + paint(clip(said, width - len(_INDENT)), kind) for said in sentence[:_SENTENCE]]
    return lines


def _fields(run: Run, now: float, kind: str, bar: int, curve: int) -> Iterator[tuple[str, str, str]]:
    """The label, the text and the style of each figure, with a bar of the steps and a curve of the losses.

    Args:
        kind: the run's state.
        bar, curve: their cells.
    """
    if run.steps:
        done = round(min(1.0, run.reached / run.steps) * bar)
        yield "", "━" * done + "─" * (bar - done), kind
    for label, value in figures(run, now).items():
        drawn = f" {sparkline([loss for _, loss in run.curve(curve)])}" if label == "loss" else ""
        yield label, value + drawn, {"loss": "bold", "slow": "silent"}.get(label, "")


def sparkline(values: Sequence[float]) -> str:
    """A curve in blocks of eight heights. Losses fall steeply at first, so high values are cut off: further above the median than
    four times its distance from the lowest."""
    low, middle = min(values), sorted(values)[len(values) // 2]
    high = min(max(values), middle + 4 * (middle - low)) if middle > low else max(values)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((min(value, high) - low) * scale)] for value in values)


def frame(
    runs: Sequence[Run], now: float, width: int, paint: Painter, height: int | None = None, head: str = ""
) -> list[str]:
    """The lines of all runs, an empty one between them.

    Args:
        now: Unix seconds.
        height: lines that there are; runs that have ended are left out, the oldest first, until the others fit. None shows all.
        head: a line above them.
    """
    blocks = [(run.state(now)[0] in ("running", "silent"), block(run, now, width, paint)) for run in runs]
    while True:
        parts = [[paint(clip(head, width), "dim")]] * bool(head) + [lines for _, lines in blocks]
        if left_out := len(runs) - len(blocks):
            parts.append([paint(clip(f"{left_out} more: --once shows all, a taller window more", width), "dim")])
        lines = [line for part in parts for line in ("", *part)][1:]
        if height is None or len(lines) <= height or not blocks:
            return lines
        del blocks[next((number for number, (active, _) in enumerate(blocks) if not active), -1)]


# ── The terminal ──────────────────────────────────────────────────────────────────────────────────────


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream leads to a terminal that can redraw its lines."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def painter(stream: TextIO) -> Painter:
    """Colours for terminals, unless NO_COLOR is set."""
    return Painter(is_terminal(stream) and not os.environ.get("NO_COLOR"))


def width() -> int:
    """The columns of the terminal, or 80."""
    return shutil.get_terminal_size().columns


class Screen:
    """The terminal while a view is drawn on it in place; what was on it before comes back at the end."""

    def __init__(self) -> None:
        self._size = os.terminal_size((0, 0))

    @property
    def resized(self) -> bool:
        """Whether the terminal has another size than when it was last drawn on."""
        return _window() != self._size

    def draw(self, runs: Sequence[Run], interval: float) -> None:
        """Replaces what is shown.

        Args:
            interval: seconds between two looks.
        """
        self._size = _window()
        columns, height = self._size
        head = f"{time.strftime('%H:%M:%S')}, every {interval:g} s; q ends this view"
        lines = frame(runs, time.time(), columns, painter(sys.stdout), height, head)[:height]
        # Lines are overwritten and their rest is cleared, which flickers less than an empty screen between two views.
        sys.stdout.write("\033[H" + "\n".join(f"{line}\033[K" for line in lines) + "\033[J")
        sys.stdout.flush()

    @staticmethod
    def key(seconds: float) -> str:
        """A key that was pressed, or "" after some seconds without one."""
        if not sys.stdin.isatty():
            time.sleep(seconds)
            return ""
        ready = select.select([sys.stdin], [], [], seconds)[0]
        return os.read(sys.stdin.fileno(), 1).decode("ascii", "replace") if ready else ""


def _window() -> os.terminal_size:
    """The window's size now, which COLUMNS and LINES do not follow where a shell has exported them."""
    now = os.get_terminal_size(sys.stdout.fileno())
    return now if now.columns else shutil.get_terminal_size()  # a serial line has no size


@contextmanager
def screen() -> Iterator[Screen]:
    """Takes over the terminal: another screen without a cursor, and keys that need no Enter."""
    keyboard = sys.stdin.fileno() if sys.stdin.isatty() else None
    before = termios.tcgetattr(keyboard) if keyboard is not None else None
    try:
        if keyboard is not None:
            tty.setcbreak(keyboard)
        sys.stdout.write("\033[?1049h\033[?25l")
        yield Screen()
    finally:
        sys.stdout.write("\033[?25h\033[?1049l")
        sys.stdout.flush()
        if keyboard is not None and before is not None:
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
