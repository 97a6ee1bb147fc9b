"""A training run as its metrics.jsonl tells of it, which is read on while it grows."""

import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from farsight.errors import ConfigError
from farsight.outputs import short_names
from farsight.process import EXIT_CTRL_C, EXIT_GATE, EXIT_INTERRUPTED
from farsight.progress import progress
from farsight.training.metrics_file import row_of, smoothed
from farsight.training.run_folder import is_run
from farsight.units import duration

METRICS = "metrics.jsonl"
SILENT_AFTER = 60.0
"""Seconds without a row before a run can count as silent."""
SILENT_GAPS = 3
"""Times the longest of the last gaps between rows, validations and saves included, before it does."""
FIRST_STEP = 1800.0
"""Seconds that a run may take until its first steps are logged: it loads weights, opens data and compiles."""
Point = tuple[float, float]


class Run:
    """A run and its figures so far.

    Args:
        folder: the run folder; it need not have metrics yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        """Its name in the views."""
        self.recipe = folder.resolve().parent if (folder / "stage.toml").is_file() else None
        """The folder of the recipe that the run is a stage of."""
        self.problem = ""
        """Why the metrics can't be read."""
        self.version = 0
        """The number of rows read, those read again included."""
        self._forget()

    def _forget(self) -> None:
        self._offset, self._last_line = 0, b""
        self.start: dict[str, Any] = {}
        """Rows of the last start, the end, the last step, checkpoint and slow ranks; empty where there are none."""
        self.end: dict[str, Any] = {}
        self.step: dict[str, Any] = {}
        self.checkpoint: dict[str, Any] = {}
        self.slow: dict[str, Any] = {}
        self.losses: list[Point] = []
        """(step, loss in nats) of each logged step, and of each validation."""
        self.validations: list[Point] = []
        self.evaluations: dict[str, list[tuple[float, dict[str, float]]]] = {}
        """By the evaluation's name: the steps and the figures by name."""
        self.times: deque[Point] = deque(maxlen=50)
        """(step, Unix seconds) of the last logged steps since the last start, and of the first of them all."""
        self.first: Point | None = None
        self.began = math.inf
        """Unix seconds of the first row."""
        self.written = 0.0
        """Unix seconds of the last row."""
        self._curves: dict[int, list[Point]] = {}

    @property
    def unread(self) -> int:
        """Bytes that were appended since the last call of `read`."""
        try:
            return max(0, (self.folder / METRICS).stat().st_size - self._offset)
        except OSError:
            return 0

    def read(self, told: Callable[[int], object] = lambda size: None) -> None:
        """Reads what was appended since the last call.

        Text after the last newline is incomplete, and is left for the next call. A resumed run cuts rows out of its file, which
        is then read from its beginning.

        Args:
            told: called with the number of bytes of each row.
        """
        self.problem = ""
        try:
            with (self.folder / METRICS).open("rb") as file:
                file.seek(self._offset - len(self._last_line))
                if file.read(len(self._last_line)) != self._last_line:
                    self._forget()
                    file.seek(0)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._take(row_of(line))
                    self._offset, self._last_line = self._offset + len(line), line
                    self.version += 1
                    told(len(line))
                if self._offset and not self.written:  # rows of earlier versions have no time
                    self.written = os.fstat(file.fileno()).st_mtime
        except FileNotFoundError:
            self._forget()
        except OSError as error:
            self.problem = error.strerror or repr(error)

    def _take(self, row: dict[str, Any]) -> None:
        step, time = number(row, "step"), number(row, "time")
        if step is None or step < 0 or not step.is_integer():
            return
        self.written = time or 0.0
        self.began = min(self.began, time or math.inf)
        if "run" in row:
            self.start, self.end, self.slow, self.first = row, {}, {}, None
            self.times.clear()
        elif "ended" in row:
            self.end = row
        elif "checkpoint" in row:
            self.checkpoint = row
        elif "slow" in row:
            self.slow = row
        elif "evaluation" in row:
            name = str(row["evaluation"])
            known = {key: value for key in row if (value := number(row, key)) is not None}
            figures = {key: value for key, value in known.items() if key.startswith(f"{name}.")}
            self.evaluations.setdefault(name, []).append((step, figures))
        elif (loss := number(row, "loss")) is not None:
            self.step, self._curves = row, {}
            self.losses.append((step, loss))
            if time is not None:
                self.times.append((step, time))
                self.first = self.first or (step, time)
        elif (loss := number(row, "val_loss")) is not None:
            self.validations.append((step, loss))

    @property
    def reached(self) -> float:
        """The last logged step; that of the start or the end if it is later."""
        return max(number(row, "step") or 0.0 for row in (self.start, self.step, self.end))

    @property
    def steps(self) -> float | None:
        """The number of steps in all; None if the run has not said."""
        steps = number(self.start, "steps")
        return steps if steps is not None and steps >= 1 else None

    def state(self, now: float) -> tuple[str, str]:
        """The run's state, and a few words on it.

        Args:
            now: Unix seconds.

        Returns:
            One of "unreadable", "waiting" (no figures yet), "running", "silent" (nothing was written for longer than the run's
            pace explains), "finished", "stopped" (by a signal or a gate) and "failed".
        """
        if self.problem:
            return "unreadable", f"can't be read: {self.problem}"
        if not self.written:
            return "waiting", "no figures yet"
        since = max(0.0, now - (number(self.end, "time") or self.written))
        if self.end:
            status = self.end["ended"]
            if status == 0:
                return "finished", f"finished {duration(since)} ago"
            if status in (EXIT_GATE, EXIT_INTERRUPTED, EXIT_CTRL_C):
                return "stopped", f"stopped {duration(since)} ago"
            return "failed", f"failed {duration(since)} ago, status {status}"
        gaps = [after - before for (_, before), (_, after) in itertools.pairwise(self.times)]
        patience = SILENT_GAPS * max(gaps) if gaps else FIRST_STEP
        if since > max(SILENT_AFTER, patience):
            return "silent", f"silent for {duration(since)}"
        return "running", "running"

    def seconds_left(self) -> float | None:
        """The time left at the pace since the first logged step after the last start, validations and saves included; None if it is
        not known, or the run has ended."""
        if self.end or self.steps is None or self.first is None:
            return None
        (first, then), (step, now) = self.first, self.times[-1]
        return max(0.0, (now - then) / (step - first) * (self.steps - step)) if step > first else None

    def curve(self, most: int) -> list[Point]:
        """The training losses as at most `most` points, each the mean of as many logged steps."""
        if most not in self._curves:
            self._curves[most] = smoothed(self.losses, max(1, -(-len(self.losses) // most)))
        return self._curves[most]


def number(row: dict[str, Any], key: str) -> float | None:
    """A finite number of a row; None if it has none under that name, as in a damaged one."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and abs(value) < 1e100 else None


class Watched:
    """The runs below some paths, those that begin later included.

    Args:
        paths: run folders, recipes' folders, or folders that hold either.

    Raises:
        ConfigError: a path is not a folder.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.paths = list(paths)
        for path in self.paths:
            if not path.is_dir():
                raise ConfigError(
                    f"{path} is not a folder: name a run folder, a recipe's folder, or a folder of runs such as runs/."
                )
        self._runs: dict[Path, Run] = {}

    def read(self) -> list[Run]:
        """All runs with what is known of them by now, in the order in which they began; a recipe's stages stand together."""
        found = {folder.resolve(): folder for path in self.paths for folder in _runs_below(path, 2) or [path]}
        self._runs = {place: self._runs.get(place) or Run(folder) for place, folder in found.items()}
        for run, name in zip(self._runs.values(), short_names([str(place) for place in found]), strict=True):
            run.name = f"{run.recipe.name}/{name}" if run.recipe and "/" not in name else name
        total = sum(run.unread for run in self._runs.values())
        with progress(total=total, desc="reading metrics", unit="B", unit_scale=True) as bar:
            for run in self._runs.values():
                run.read(bar.update)
        runs = sorted(self._runs.values(), key=lambda run: (run.began, run.name))
        first = {run.recipe: run.began for run in reversed(runs)}
        return sorted(runs, key=lambda run: first[run.recipe] if run.recipe else run.began)


def _runs_below(folder: Path, depth: int) -> list[Path]:
    """The run folders in a folder and its folders down to a depth, those without figures yet included; runs are never nested."""
    try:
        if is_run(folder) or (folder / ".lock").is_file():
            return [folder]
        inside = sorted(path for path in folder.iterdir() if depth and path.is_dir() and not path.name.startswith("."))
    except OSError:  # it is gone, or closed to us
        return []
    return [run for path in inside for run in _runs_below(path, depth - 1)]
