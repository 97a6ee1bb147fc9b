"""Watches runs while they train: on the terminal, and as a page that refreshes itself.

    farsight watch runs/X                      one run: step, loss, speed, time left, last checkpoint and evaluations
    farsight watch runs/story                  the stages of a recipe
    farsight watch runs                        all runs below a folder, those that begin later included
    farsight watch runs --once                 print it once, as without a terminal
    farsight watch runs --html runs.html       also write a page with the loss curves, again and again

Reads the runs' metrics.jsonl alone, and each time only what was appended: it works wherever the run folders can be read, over ssh
for example, and runs do not notice. q or Ctrl-C ends the view, and the runs go on. NO_COLOR=1 leaves colours out.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from farsight.cli import above_zero, command, new_parser
from farsight.outputs import output_file
from farsight.process import signals_to

if TYPE_CHECKING:
    from farsight.reports.watch.run import Run
    from farsight.reports.watch.screen import Screen

POLL = 0.25
"""Seconds between looks at the keyboard and the terminal's size."""


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight watch", __doc__)
    add = parser.add_argument
    add("runs", type=Path, nargs="+", metavar="RUN", help="run folder, recipe's folder, or folder of runs")
    add("--interval", type=above_zero, default=5.0, metavar="S", help="seconds between two looks (default: 5)")
    add("--once", action="store_true", help="print what is known now, and end")
    add("--html", type=output_file, metavar="FILE", help="write a page with the loss curves here too (.html)")
    options = parser.parse_args(arguments)
    made_by = shlex.join(["farsight", "watch", *(sys.argv[1:] if arguments is None else arguments)])
    watch(options, made_by)


def watch(options: argparse.Namespace, made_by: str) -> None:
    """Shows the runs once, or until q or Ctrl-C.

    Raises:
        ConfigError: a path that is not a folder.
    """
    from farsight.files import write_text
    from farsight.reports.watch.run import Watched
    from farsight.reports.watch.screen import frame, is_terminal, painter, screen, width
    from farsight.reports.watch.web_page import WebPage

    watched, page = Watched(options.runs), WebPage(made_by)

    def look(again: bool) -> list[Run]:
        runs = watched.read()
        if options.html:
            write_text(options.html, page.text(runs, time.time(), options.interval if again else None))
        return runs

    live = is_terminal(sys.stdout) and not options.once
    again = not options.once and (live or options.html is not None)
    runs = look(again)
    if not live:
        print("\n".join(frame(runs, time.time(), width(), painter(sys.stdout))), flush=True)
    if not again:
        return
    # Whatever asks it to end: the terminal has to be as before, and the page to stop refreshing itself.
    stop = threading.Event()
    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with signals_to(dict.fromkeys(asked, lambda number, stack: stop.set())):
        with screen() if live else nullcontext() as terminal:
            _follow(look, runs, terminal, options.interval, stop)
        look(False)


def _follow(
    look: Callable[[bool], list[Run]], runs: list[Run], terminal: Screen | None, interval: float, stop: threading.Event
) -> None:
    """Looks again and again, until q or a signal, which sets `stop`."""
    while not stop.is_set():
        due = time.monotonic() + interval
        if terminal is not None:
            terminal.draw(runs, interval)
        while (left := due - time.monotonic()) > 0 and not stop.is_set():
            if terminal is None:
                stop.wait(left)
            elif terminal.key(min(POLL, left)) == "q":
                return
            elif terminal.resized:
                terminal.draw(runs, interval)
        runs = look(True)


if __name__ == "__main__":
    main()
