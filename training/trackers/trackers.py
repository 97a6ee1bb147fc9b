"""The trackers of a run: opened, written to and closed together."""

import importlib
import importlib.util
import logging
import os
import subprocess
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from farsight.configs.schema import JobConfig
from farsight.configs.typed import to_dict, to_toml
from farsight.training.trackers.background import Background
from farsight.training.trackers.tensorboard import TensorBoard
from farsight.training.trackers.tracker import TrackedRun, Tracker

logger = logging.getLogger("farsight")

IN_THREADS = {"wandb": "Wandb", "mlflow": "Mlflow", "trackio": "Trackio"}
"""Classes of trackers that may need a network, by the names of their packages and of modules beside this one."""
CLOSE_SECONDS = 15.0
"""For trackers to pass on what waits when the run ends, all of them together."""
GIT_SECONDS = 5


class Trackers:
    """Trackers that are written to together.

    Args:
        run: the run to open them for.
        names: those of `metrics.trackers`.
        tensorboard: the folder of TensorBoard's event files.
        again: steps and names of figures that they have already been given.
    """

    def __init__(
        self, run: TrackedRun, names: Iterable[str], tensorboard: Path, again: Collection[tuple[int, str]] = frozenset()
    ) -> None:
        self._all: list[TensorBoard | Background] = []
        self._threads: list[Background] = []
        for name in names:
            if name == "tensorboard":
                self._all.append(TensorBoard(run, tensorboard))
                continue
            _stay_inside(run.home)
            with suppress(Exception):  # here, so that a short run does not end before; the thread reports why it fails
                _class_of(name)
            self._threads.append(Background(name, partial(_opened, name, run), again))
        self._all += self._threads

    def log(self, group: str, step: int, figures: Mapping[str, Any]) -> None:
        """Adds the numbers among a step's figures, each under `group/name`."""
        numbers = {
            f"{group}/{name}": float(value)
            for name, value in figures.items()
            if name not in ("step", "time") and isinstance(value, int | float)
        }
        for tracker in self._all if numbers else ():
            tracker.log(step, numbers)

    def picture(self, step: int, path: Path) -> None:
        """Adds a PNG file, under its name without the suffix."""
        for tracker in self._all:
            tracker.picture(step, path)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Adds a table."""
        for tracker in self._all:
            tracker.table(step, name, columns, rows)

    def close(self, finished: bool) -> None:
        """Ends them all, as finished or as stopped; those that hang are left behind."""
        deadline = time.monotonic() + CLOSE_SECONDS
        for tracker in self._all:
            tracker.end(finished) if isinstance(tracker, Background) else tracker.close(finished)
        for thread in self._threads:
            thread.wait(max(0.0, deadline - time.monotonic()))


def check_trackers(config: JobConfig) -> None:
    """Checks that the packages of the run's trackers are installed, without importing them.

    Raises:
        ModuleNotFoundError: the first that is not; `farsight.extras` has the command that installs it.
    """
    for name in config.metrics.trackers:
        if name in IN_THREADS and importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def open_trackers(
    config: JobConfig,
    step: int,
    facts: Mapping[str, Mapping[str, Any]],
    again: Collection[tuple[int, str]] = frozenset(),
) -> Trackers:
    """Opens the trackers of `metrics.trackers`.

    Args:
        step: the step that the run goes on from; 0 if it starts.
        facts: what describes the run beside its config and its git commit, by group.
        again: steps and names of figures that an earlier start has given them.
    """
    m, folder = config.metrics, Path(config.job.dump_folder)
    git = checkout() if m.trackers else {}
    facts = {**({"git": git} if git else {}), **facts}
    run = TrackedRun(folder, m.tracker_project, step, to_dict(config), to_toml(config), facts)
    return Trackers(run, m.trackers, folder / m.save_tb_folder, again)


def _class_of(name: str) -> type[Any]:
    found: type[Any] = getattr(importlib.import_module(f"{__package__}.{name}"), IN_THREADS[name])
    return found


def _opened(name: str, run: TrackedRun) -> Tracker:
    tracker: Tracker = _class_of(name)(run)
    return tracker


def checkout() -> dict[str, Any]:
    """The commit of the git checkout in the working directory, and whether files differ from it; empty outside one."""
    found = []
    for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            done = subprocess.run(
                ["git", "--no-optional-locks", *arguments],  # status would leave its lock behind if it is ended
                capture_output=True,
                text=True,
                timeout=GIT_SECONDS,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):  # no git, no checkout, or a slow disk
            return {}
        found.append(done.stdout.strip())
    commit, changes = found
    return {"commit": commit, "dirty": bool(changes)}


def _stay_inside(home: Path) -> None:
    """Keeps what trackers write inside the run folder, where the user's environment variables do not name another place.

    They read these when they are imported. MLflow has a file store only if asked for.
    """
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        os.environ |= {"MLFLOW_TRACKING_URI": (home / "mlruns").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    own = {
        "WANDB_DIR": str(home),
        "WANDB_CACHE_DIR": str(home / "wandb" / "cache"),
        "TRACKIO_DIR": str(home / "trackio"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "WANDB_ERROR_REPORTING": "false",
    }
    for name, value in own.items():
        os.environ.setdefault(name, value)
