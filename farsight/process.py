"""Starting and stopping the processes of a run: ranks, signals, and exit statuses.

Uses only the standard library, so that it works before torch is loaded, which takes seconds.
"""

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farsight.errors import UserError

EXIT_UNEXPECTED = 1
"""A fault in Farsight, or a lost rank."""
EXIT_INPUT = 2
"""A setting, input or data can't be used, or the run folder can't be written."""
EXIT_NON_FINITE = 3
"""The loss or the gradients were not finite; the weights are those before the step."""
EXIT_SAVE = 4
"""A checkpoint or the model directory could not be written; the newest complete checkpoint is kept."""
EXIT_MEMORY = 5
"""A device ran out of memory."""
EXIT_GATE = 6
"""An evaluation's figure met its `stop_if`; a checkpoint was saved, and the run goes on once the condition is changed."""
EXIT_INTERRUPTED = 75
"""SIGTERM or SIGINT; the same command continues the run."""
EXIT_CTRL_C = 130
"""Ctrl-C, as shells report it; in training, a second one, which stops at once without a checkpoint."""

TO_STOP = (signal.SIGTERM, signal.SIGINT)
"""Signals that ask a process to stop."""

BEFORE_TRAINING = "stopped before training began; nothing was lost, and the same command starts again"
BETWEEN_STEPS = "stopped; the same command continues from here"

_at_once: str | None = None
"""Message to print when a signal ends the process at once; None while other handlers are in charge."""


# ── Ranks ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Ranks:
    """This process's place in the run, as set by the launcher."""

    rank: int
    local_rank: int
    world_size: int


def ranks() -> Ranks:
    """Reads RANK, LOCAL_RANK and WORLD_SIZE; without them this process is the whole run.

    Raises:
        UserError: values that contradict each other or are not numbers.
    """
    given = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    shown = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
    hint = "torchrun and launch/rank.sh set them; without a launcher, unset all three."
    rank, local_rank, world_size = (
        _number(name, default, hint) for name, default in zip(given, (0, 0, 1), strict=True)
    )
    if not (0 <= rank < world_size and 0 <= local_rank < world_size):
        raise UserError(f"The environment has {shown}: a rank must be from 0 to WORLD_SIZE - 1. {hint}")
    if world_size > 1:
        missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise UserError(f"The environment has {shown}, but not {', '.join(missing)}. {hint}")
    _number("MASTER_PORT", 0, "It is the port where ranks meet.")
    return Ranks(rank, local_rank, world_size)


def _number(name: str, default: int, hint: str) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise UserError(f"The environment has {name}={text!r}, which must be a whole number. {hint}")
    return int(text)


# ── Signals ───────────────────────────────────────────────────────────────────────────────────────────


def begin(stopped: str = BEFORE_TRAINING, what: str = "loading libraries") -> None:
    """Prints that the process has started, and sets up signals; call it first, before libraries load.

    From then on SIGTERM and Ctrl-C end the process with a message and status 75, and ranks stop when their torchrun is gone.

    Args:
        stopped: the message.
        what: what the process does first, which may take seconds.
    """
    global _at_once
    _at_once = stopped
    # Python only runs signal handlers in the main thread, which may spend minutes inside a library call. So a thread
    # reads the signals' numbers from a pipe.
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for number in TO_STOP:
        signal.signal(number, lambda number, frame: None)
    # Ranks write their stacks on it once they train; it must not end those that do not yet, or launchers, whose children
    # inherit this.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
    threading.Thread(target=_watch, args=(read, launcher), name="signals", daemon=True).start()
    if os.environ.get("RANK", "0") == "0" and not {"-h", "--help"} & {*sys.argv}:
        _say(f"farsight: starting ({what})")


def hand_over() -> None:
    """Leaves signals to the handlers that are installed from here on."""
    global _at_once
    _at_once = None


@contextmanager
def signals_to(handlers: dict[signal.Signals, Any]) -> Iterator[None]:
    """Installs other signal handlers inside the context."""
    global _at_once
    said = _at_once
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    _at_once = None
    try:
        yield
    finally:
        _at_once = said
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(signals: int, launcher: int | None) -> None:
    """Ends the process on a signal, unless signals were handed over, and stops it when the launcher dies."""
    deadline: float | None = None
    while True:
        if select.select([signals], [], [], None if launcher is None else 1.0)[0]:
            numbers = {*os.read(signals, 64)}
            if _at_once is not None and numbers & {*TO_STOP}:
                leave_note(EXIT_INTERRUPTED, _at_once)
                if os.environ.get("RANK", "0") == "0":
                    _say(_at_once)
                os._exit(EXIT_INTERRUPTED)
        if launcher is None or os.getppid() == launcher:
            continue
        if deadline is None:
            # As long as torchrun itself would wait after a signal.
            given = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
            seconds = int(given) if given.isdecimal() else 30
            deadline = time.monotonic() + seconds
            _say(f"torchrun (process {launcher}) is gone: rank {os.environ.get('RANK')} stops, within {seconds} s")
            os.kill(os.getpid(), signal.SIGTERM)
        elif time.monotonic() > deadline:
            _say(f"rank {os.environ.get('RANK')} did not stop in time, and is ended")
            os._exit(EXIT_UNEXPECTED)


def killed_by(number: int) -> str:
    """Describes how a process was killed by a signal."""
    reason = {
        signal.SIGKILL: " (possibly by the kernel's out-of-memory killer: look in dmesg)",
        signal.SIGSEGV: " (a crash inside a library)",
        signal.SIGABRT: " (a library gave up: its message is above)",
        signal.SIGBUS: " (often a full /dev/shm, or a file truncated while it was read)",
    }
    return f"was killed by {signal.Signals(number).name}{reason.get(signal.Signals(number), '')}"


def _say(line: str) -> None:
    """Prints to stderr without Python's lock, which another thread may hold."""
    with suppress(OSError):  # the reader is gone
        os.write(2, f"{line}\n".encode())


# ── Error notes from ranks to their launcher ──────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Note:
    """A rank's exit status and message."""

    rank: int
    status: int
    sentence: str
    follows: bool
    """It ended because another rank had ended."""
    time: float


def leave_note(status: int, sentence: str, follows: bool = False) -> None:
    """Writes how this rank ends to torchrun's error file; torchrun prints the sentence in place of a traceback."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    now = time.time()
    own = {"rank": int(os.environ.get("RANK", "0")), "status": status, "follows": follows, "time": now}
    note = {"message": {"message": sentence, "extraInfo": {"timestamp": str(int(now)), "farsight": own}}}
    part = Path(f"{path}.part")
    with suppress(OSError):  # the sentence is printed anyway
        part.write_text(json.dumps(note), encoding="utf-8")
        part.replace(path)


def read_note(path: Path) -> Note | None:
    """Reads a rank's note; None if there is none, or it is not ours."""
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
        return Note(sentence=message["message"], **message["extraInfo"]["farsight"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def first_rank_says(sentence: str) -> bool:
    """Whether this machine's first rank ends with the same sentence; other ranks wait up to two seconds for it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    # torchrun sends SIGTERM to all ranks as soon as one has ended.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hand_over()
    if os.environ.get("LOCAL_RANK", "0") == "0":
        return False
    for _ in range(20):
        if (note := read_note(Path(path).parent.parent / "0" / "error.json")) is not None:
            return _what(note.sentence) == _what(sentence)
        time.sleep(0.1)
    return False


def _what(sentence: str) -> str:
    """The sentence without the name of the traceback file, which differs by rank."""
    return sentence.partition("please report")[0]
