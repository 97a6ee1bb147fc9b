"""TensorBoard: event files in the run folder, written at once and without a thread."""

import io
import logging
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

from farsight.training.records import Records
from farsight.training.trackers.tracker import TrackedRun, Tracker, markdown

logger = logging.getLogger("farsight")


class TensorBoard(Tracker):
    """Event files of the run, of which each start adds one; TensorBoard shows steps that ran again once.

    Args:
        folder: the folder of event files.
    """

    def __init__(self, run: TrackedRun, folder: Path) -> None:
        self.records = scalars(folder, run.step)
        self._text(run.step, "config", f"```toml\n{run.toml}\n```")
        for name, facts in run.facts.items():
            self._text(run.step, name, markdown(("", name), list(facts.items())))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self.records.append(scalar_event(step, figures))

    def picture(self, step: int, path: Path) -> None:
        try:
            data = path.read_bytes()
            width, height = struct.unpack_from(">II", data, 16)  # where a PNG file has them
        except (OSError, struct.error) as error:
            logger.warning(f"{path} can't be read for TensorBoard: {error}.")
            return
        image = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=data)
        self._append(step, Summary.Value(tag=path.stem, image=image))

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._text(step, name, markdown(columns, rows))

    def close(self, finished: bool) -> None:
        self.records.close()

    def _text(self, step: int, name: str, text: str) -> None:
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
        self._append(step, Summary.Value(tag=name, metadata=metadata, tensor=tensor))

    def _append(self, step: int, value: Summary.Value) -> None:
        self.records.append(event(step=step, summary=Summary(value=[value])))


def scalars(folder: Path, after: int) -> Records:
    """A new event file for TensorBoard, whose own writer has a thread that ends the run if the disk is full.

    Args:
        after: the step that the run resumes from; TensorBoard hides later steps of earlier files.
    """
    name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"
    head = event(file_version="brain.Event:2")
    if after:
        head += event(step=after + 1, session_log=SessionLog(status=SessionLog.START))
    return Records(folder / name, head)


def event(**fields: Any) -> bytes:
    """An event, serialised as in TensorBoard's files."""
    out = io.BytesIO()
    RecordWriter(out).write(Event(wall_time=time.time(), **fields).SerializeToString())
    return out.getvalue()


def scalar_event(step: int, figures: Mapping[str, float]) -> bytes:
    """A serialised event with a step's figures."""
    values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
    return event(step=step, summary=Summary(value=values))
