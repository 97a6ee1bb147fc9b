"""Weights & Biases: online if this machine has an API key, otherwise offline, for `wandb sync` to upload later."""

import netrc
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import wandb

from farsight.training.trackers.tracker import TrackedRun, Tracker, keep_id

ANSWER_SECONDS = 10
"""For W&B's server to answer when a run starts and, when it ends, for uploading what is left; the rest stays on disk, where
`wandb sync` finds it. Python waits that long for W&B at its exit too."""


class Wandb(Tracker):
    """A run of Weights & Biases; those of a recipe's stages share a group.

    Its charts have the figure `step` as their horizontal axis: W&B's own counter takes no step twice, nor an earlier one.
    """

    def __init__(self, run: TrackedRun) -> None:
        kept = run.kept_id("wandb")
        self.resumed, own = kept is not None, kept or secrets.token_hex(4)
        keep_id(run.folder, "wandb", own)
        # Where W&B can't write, it would go on in the system's temporary folder.
        (Path(os.environ["WANDB_DIR"]) / "wandb").mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            project=run.project or os.environ.get("WANDB_PROJECT") or "farsight",
            id=own,
            name=run.name,
            group=run.group,
            resume="allow",
            mode=None if os.environ.get("WANDB_MODE") or _signed_in() else "offline",
            config={**run.config, **run.facts},
            # Its copies of the output and of changed files, and its hooks on both, are left out.
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT") or ANSWER_SECONDS),
                finish_timeout=float(os.environ.get("WANDB_FINISH_TIMEOUT") or ANSWER_SECONDS),
            ),
        )
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self.run.log({"step": step, **figures})

    def picture(self, step: int, path: Path) -> None:
        self.run.log({"step": step, path.stem: wandb.Image(str(path))})

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        data = [list(row) for row in rows]
        self.run.log({"step": step, name: wandb.Table(columns=list(columns), data=data, allow_mixed_types=True)})

    def close(self, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)


def _signed_in() -> bool:
    """Whether there is an API key, without which W&B would ask for one in the terminal."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
