"""Child processes of commands that run training: waits for one, and passes on signals to stop."""

import ctypes
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import farsight
from farsight import process


def wait_for(command: list[str]) -> int:
    """Runs a command and passes SIGTERM on to it; returns its exit status, negative for a signal."""
    # torchrun's default gives workers 30 s to end after a signal, but a large model takes longer to save.
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3600", **os.environ}
    child: subprocess.Popen | None = None
    asked: list[int] = []

    def forward(number: int, frame: Any) -> None:
        asked.append(number)
        if child is not None:
            child.send_signal(number)

    # The child saves and stops, and this process returns its status. A terminal's Ctrl-C reaches both anyway.
    with process.signals_to({signal.SIGTERM: forward, signal.SIGINT: signal.SIG_IGN}):
        child = subprocess.Popen(command, env=environment, preexec_fn=partial(_end_with, os.getpid()))
        for number in asked:  # signals that came before the child existed
            child.send_signal(number)
        return child.wait()


def _end_with(parent: int) -> None:
    """Runs in the child: has Linux send SIGTERM when the parent dies, so that a killed recipe leaves no stage behind, and
    restores Ctrl-C, which the parent ignores meanwhile."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
        if os.getppid() != parent:  # it has already died
            os.kill(os.getpid(), signal.SIGTERM)


class Stopped(Exception):  # noqa: N818  not an error
    """A signal asked a child to stop."""


def run_child(command: list[str]) -> int:
    """Runs a command; returns its exit status, negative for a signal.

    Raises:
        Stopped: the child was asked to stop.
    """
    status = wait_for(command)
    # Other signals are failures: a crash, or the system ran out of memory.
    if status in (process.EXIT_INTERRUPTED, -signal.SIGTERM, -signal.SIGINT):
        raise Stopped
    return status


def ended(status: int) -> str:
    """Describes how a child process failed."""
    return process.killed_by(-status) if status < 0 else f"ended with status {status}"


def train_script() -> list[str]:
    """Python's arguments to run training: the checkout's `train.py`, or the module of an installed package."""
    # In a checkout, farsight/train.py is a link; a wheel has the file itself.
    script = Path(farsight.__file__).parent / "train.py"
    return [str(script.resolve())] if script.is_symlink() else ["-m", "farsight.train"]
