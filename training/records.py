"""Files that a run adds records to while it trains: a disk that takes none costs records, and not the run."""

import io
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

logger = logging.getLogger("farsight")


class Records:
    """A file that grows by whole records.

    One that can't be written is lost and counted; what of it was written is cut off again. It is said when that begins, when
    the file can be written again, and at the end.
    """

    def __init__(self, path: Path, head: bytes = b"") -> None:
        self.path, self.head = path, head
        self.lost = 0
        self._failing = False

    def append(self, record: bytes) -> None:
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


def scalars(folder: Path, after: int) -> Records:
    """A new event file for TensorBoard. Its own writer has a thread, which ends the run when the disk is full.

    Args:
        after: what earlier files have of later steps is not shown.
    """
    name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"
    head = event(file_version="brain.Event:2")
    if after:
        head += event(step=after + 1, session_log=SessionLog(status=SessionLog.START))
    return Records(folder / name, head)


def event(**fields: Any) -> bytes:
    """An event as TensorBoard's files hold it."""
    out = io.BytesIO()
    RecordWriter(out).write(Event(wall_time=time.time(), **fields).SerializeToString())
    return out.getvalue()


def scalar_event(group: str, step: int, figures: dict[str, float]) -> bytes:
    """Figures of a step, each under `group/name`."""
    values = [Summary.Value(tag=f"{group}/{name}", simple_value=value) for name, value in figures.items()]
    return event(step=step, summary=Summary(value=values))
