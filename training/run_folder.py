"""The run folder, which one process has at a time."""

import fcntl
import logging
import os
import socket
import time
from pathlib import Path

from farsight.configs.load import ConfigError

logger = logging.getLogger("farsight")


def lock_run_folder(folder: Path, wait_seconds: float = 60.0) -> int:
    """Takes the run folder for this process until it ends, however it ends.

    A run whose recipe was killed may still be saving: it is waited for.

    Returns:
        The descriptor that holds the lock.

    Raises:
        ConfigError: another process still trains there, the folder can't be written, or runs would lie in one another.
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
    """Refuses somebody else's folder, and runs inside one another, whose files would mix; a run that is there goes on.

    Raises:
        ConfigError: naming both.
    """
    names = [name for name in ("config.toml", "metrics.jsonl") if (folder / name).exists()]
    if names and not (folder / ".lock").exists():
        raise ConfigError(
            f"{folder} holds {' and '.join(names)} that no run wrote, and a run would write over: name another folder. "
            "(If they are a run's whose .lock was not copied along, create an empty file of that name.)"
        )
    if is_run(folder):
        return
    if is_run(folder.parent):
        raise ConfigError(f"{folder} would lie inside the run {folder.parent}; name another folder.")
    if (inside := next((path.parent for path in folder.glob("*/metrics.jsonl")), None)) is not None:
        raise ConfigError(f"{folder} holds the run {inside}, and can't be a run itself; name another folder.")


def is_run(folder: Path) -> bool:
    """Whether a run has written its figures there."""
    return (folder / "metrics.jsonl").is_file()
