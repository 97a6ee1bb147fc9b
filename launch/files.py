"""The run folder, which one process has at a time."""

import fcntl
import os
import time
from pathlib import Path

from configs.load import ConfigError


def lock_run_folder(folder: Path, wait_seconds: float = 60.0) -> int:
    """Takes the run folder for this process until it ends, however it ends.

    A run whose recipe was killed may still be saving: it is waited for.

    Returns:
        The descriptor that holds the lock.

    Raises:
        ConfigError: another process still trains there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = os.pread(descriptor, 32, 0).decode() or "another process"
                os.close(descriptor)
                raise ConfigError(
                    f"{folder} is in use by {holder}; wait for it, or set another job.dump_folder."
                ) from None
            time.sleep(0.2)
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()}".encode(), 0)
    return descriptor
