"""Watches runs while they train: on the terminal, and as a page that refreshes itself.

    farsight watch runs/X                      one run: step, loss, speed, time left, last checkpoint and evaluations
    farsight watch runs/story                  the stages of a recipe
    farsight watch runs                        all runs below a folder, those that begin later included
    farsight watch runs --once                 print it once, as without a terminal
    farsight watch runs --html runs.html       also write a page with the loss curves, again and again

Reads the runs' metrics.jsonl alone, and of it only what was appended since: anywhere where the run folders can be read, over ssh, as
often as you like, without anything that the run would notice. q or Ctrl-C ends it, and nothing else. NO_COLOR=1 leaves colours out.
"""

import argparse
import shlex
import signal
import sys
import time
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path

from farsight.cli import above_zero, command, new_parser
from farsight.outputs import output_file

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
    # Whatever asks it to end: the terminal has to be as before, and the page to stop refreshing itself.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    watch(options, made_by)


def watch(options: argparse.Namespace, made_by: str) -> None:
    """Shows the runs once, or until q or Ctrl-C.

    Raises:
        ConfigError: a path that is not a folder.
    """
    from farsight.files import write_text
    from farsight.reports.watch.run import Run, Watched
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
    try:
        with screen() if live else nullcontext() as terminal:
            while True:
                due = time.monotonic() + options.interval
                while (left := due - time.monotonic()) > 0:
                    if terminal is None:
                        time.sleep(left)
                        continue
                    if terminal.outdated:
                        head = f"{datetime.now():%H:%M:%S}, every {options.interval:g} s; q ends this view"
                        terminal.draw(runs, time.time(), head)
                    if terminal.key(min(POLL, left)) == "q":
                        return
                runs = look(True)
                if terminal is not None:
                    terminal.outdated = True
    except KeyboardInterrupt:
        pass
    finally:
        look(False)


if __name__ == "__main__":
    main()
