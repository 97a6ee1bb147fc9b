"""Trackio: a local database, or the Space or server that its environment variables name."""

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import trackio
from trackio.sqlite_storage import SQLiteStorage
from trackio.utils import get_storage_mode

from farsight.training.trackers.tracker import TrackedRun, Tracker, keep_id

ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
"""Variables that name where figures are sent."""


class Trackio(Tracker):
    """A run of Trackio; those of a recipe's stages share a group. A run goes on by its name, so that has to be unique."""

    def __init__(self, run: TrackedRun) -> None:
        kept = run.kept_id("trackio")
        self.resumed, name = kept is not None, kept or f"{run.name}-{secrets.token_hex(3)}"
        keep_id(run.folder, "trackio", name)
        Path(trackio.TRACKIO_DIR).mkdir(parents=True, exist_ok=True)  # Trackio itself would only warn
        with redirect_stdout(sys.stderr):
            self.run = trackio.init(
                run.project or "farsight",
                name=name,
                group=run.group,
                resume="allow",
                config={**run.config, **run.facts},
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        self.sent, self.before = 0, self._kept()

    def log(self, step: int, figures: Mapping[str, Any]) -> None:
        self.run.log(dict(figures), step=step)
        self.sent += 1

    def picture(self, step: int, path: Path) -> None:
        self.log(step, {path.stem: trackio.Image(str(path))})

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.log(step, {name: trackio.Table(columns=list(columns), data=[list(row) for row in rows])})

    def close(self, finished: bool) -> None:
        with redirect_stdout(sys.stderr):
            self.run.finish()
        if (kept := self._kept()) is not None and self.before is not None:
            self.lost = self.sent - (kept - self.before)

    def _kept(self) -> int | None:
        """Records in the local database, as Trackio warns of those that it can't write there, and drops them; None elsewhere."""
        if any(os.environ.get(name) for name in ELSEWHERE) or get_storage_mode() != "sqlite":
            return None
        return SQLiteStorage.get_log_count(self.run.project, self.run.name, run_id=self.run.id)
