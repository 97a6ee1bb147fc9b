"""The lock on a run folder, which only one process may use at a time."""

import fcntl
import logging
import os
import socket
import time
from pathlib import Path

from farsight.errors import ConfigError

logger = logging.getLogger("farsight")


def lock_run_folder(folder: Path, wait_seconds: float = 60.0) -> int:
    """Locks the run folder until this process ends, however it ends.

    Waits for a previous run that may still be saving, such as one whose recipe was killed.

    Returns:
        The file descriptor that holds the lock.

    Raises:
        ConfigError: another process still trains there, the folder can't be written, or runs would be nested.
    """
    check_run_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
        _lock(descriptor, folder, wait_seconds)
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except OSError as error:
        raise ConfigError(f"The run folder {folder} can't be written: {error.strerror}.") from error
    return descriptor


def _lock(descriptor: int, folder: Path, wait_seconds: float) -> None:
    deadline, holder = time.monotonic() + wait_seconds, ""
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise ConfigError(
                    f"{folder} is in use by {holder}; wait for it, or set another job.dump_folder."
                ) from None
            if not holder:
                holder = os.pread(descriptor, 100, 0).decode(errors="replace") or "another process"
                logger.info(f"{folder} is in use by {holder}: waiting up to {wait_seconds:.0f} s for it to end")
            time.sleep(0.2)


def check_run_folder(folder: Path) -> None:
    """Refuses folders with files that no run wrote, and nested runs, whose files would mix. An existing run may continue.

    Raises:
        ConfigError: naming the folders.
    """
    names = [name for name in ("config.toml", "metrics.jsonl") if (folder / name).exists()]
    if names and not (folder / ".lock").exists():
        raise ConfigError(
            f"{folder} holds {' and '.join(names)} that no run wrote and that a run would overwrite: name another folder. "
            "(If they are from a run and its .lock was not copied, create an empty file of that name.)"
        )
    if is_run(folder):
        return
    if is_run(folder.parent):
        raise ConfigError(f"{folder} would lie inside the run {folder.parent}; name another folder.")
    if (inside := next((path.parent for path in folder.glob("*/metrics.jsonl")), None)) is not None:
        raise ConfigError(f"{folder} contains the run {inside}, and can't be a run itself; name another folder.")


def is_run(folder: Path) -> bool:
    """Whether a run has written its figures there."""
    return (folder / "metrics.jsonl").is_file()
