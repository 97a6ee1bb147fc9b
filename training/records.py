"""Files that a run appends records to while it trains; a full disk loses records, but does not end the run."""

import logging
import os
from pathlib import Path

logger = logging.getLogger("farsight")


class Records:
    """A file that grows by whole records.

    A record that can't be written is lost and counted; a part already written is cut off again. Warnings are logged when this
    starts, when the file can be written again, and at the end.

    Args:
        head: bytes to write first into an empty file.
    """

    def __init__(self, path: Path, head: bytes = b"") -> None:
        self.path, self.head = path, head
        self.lost = 0
        self._failing = False

    def append(self, record: bytes) -> None:
        """Writes a record, or loses it with a warning."""
        try:
            self._write(record)
        except OSError as error:
            self.lost += 1
            if not self._failing:
                logger.warning(
                    f"{self.path} can't be written ({error.strerror}); training goes on without these figures."
                )
            self._failing = True
        else:
            if self._failing:
                logger.warning(f"{self.path} can be written again; {self.lost} records were lost so far.")
            self._failing = False

    def close(self) -> None:
        """Reports the number of lost records, if any."""
        if self.lost:
            logger.warning(f"{self.path}: {self.lost} records were lost in all.")

    def _write(self, record: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            data = record if end else self.head + record
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError:
                file.truncate(end)
                raise
