"""The interface of experiment trackers, a run's description of itself, and the ids that trackers go on under."""

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farsight.files import write_text

PARTS = ("stage.toml", "experiment.toml")
"""Files that mark a run folder as that of a recipe's stage, or of an ablation's experiment."""
_keeping = threading.Lock()


@dataclass(frozen=True)
class TrackedRun:
    """A run, as it is told to trackers when it starts or goes on.

    Args:
        folder: its run folder.
        project: the name that runs are gathered under; empty leaves it to the tracker's own environment variable.
        step: the step that it goes on from; 0 if it starts.
        config: its settings, in nested tables.
        toml: the same as its config.toml has them.
        facts: what else describes it, by group: the git commit, the plan's figures.
    """

    folder: Path
    project: str
    step: int
    config: Mapping[str, Any]
    toml: str
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def group(self) -> str | None:
        """The recipe or ablation that it is a part of."""
        return self.folder.resolve().parent.name if any((self.folder / name).is_file() for name in PARTS) else None

    @property
    def home(self) -> Path:
        """The folder for what trackers write: the run's, or its group's, so that one command shows all of them."""
        return (self.folder.parent if self.group else self.folder).resolve()

    @property
    def name(self) -> str:
        own = self.folder.resolve().name
        return f"{self.group}-{own}" if self.group else own

    def kept_id(self, tracker: str) -> str | None:
        """The id that a tracker goes on under; None if the run starts, or is new to the tracker."""
        return read_ids(self.folder).get(tracker) if self.step else None


def read_ids(folder: Path) -> dict[str, str]:
    """The ids in a folder's `trackers.json`, by tracker."""
    path = folder / "trackers.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def keep_id(folder: Path, tracker: str, own: str) -> None:
    """Writes a tracker's id to a folder's `trackers.json`."""
    with _keeping:
        write_text(folder / "trackers.json", json.dumps({**read_ids(folder), tracker: own}, indent=1) + "\n")


class Tracker(ABC):
    """A place where a run's figures are shown. Any method may raise anything, or never return: `Background` sees to that."""

    resumed = False
    """It goes on with what an earlier start of the run wrote."""
    lost = 0
    """Records that it lost without raising."""

    @abstractmethod
    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Adds figures of a step, each named `group/name`."""

    @abstractmethod
    def picture(self, step: int, path: Path) -> None:
        """Adds a PNG file, under its name without the suffix."""

    @abstractmethod
    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Adds a table."""

    @abstractmethod
    def close(self, finished: bool) -> None:
        """Ends the run, as finished or as stopped, and waits until everything is written."""


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, whose keys are the options' names: `training.steps`."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found
