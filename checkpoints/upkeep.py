"""Looks after a run's checkpoints beside training: reads back what was saved, sets damaged ones aside, deletes old ones."""

import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from farsight.checkpoints.checksums import MANIFEST, drop_cached, fault, read_manifest
from farsight.checkpoints.intact.check import other_sizes
from farsight.checkpoints.steps import complete_steps, holds_only_ours, retire, set_aside
from farsight.errors import ConfigError
from farsight.stores import StorePath, delete_tree

logger = logging.getLogger("farsight")

Verdict = Literal["intact", "damaged", "unknown"]
"""A saved checkpoint's state; unknown if it can't be read, or if the run ended first."""
POLL_SECONDS = 0.2
"""How often rank 0 looks whether the other ranks are done."""


class Upkeep:
    """Follows each save in a thread of every rank, at low priority: reads the rank's files back and compares checksums.

    Rank 0 collects what the ranks found. It renames a damaged checkpoint to damaged-N, and deletes old ones once a newer one is
    known to be intact. The ranks tell it through the store by which they connected: a collective would keep a run from ending
    while one of its ranks hangs.

    Args:
        folder: holds the run's step-N folders.
        keep: the number of complete checkpoints to keep; 0 keeps all.
        verify: read files back; otherwise every complete checkpoint counts as intact.
    """

    def __init__(self, folder: Path, keep: int, verify: bool) -> None:
        self.folder, self.keep, self.verify = folder, keep, verify
        self.thread = ThreadPoolExecutor(1, "checkpoints", initializer=_lower_priority)
        self.closing = threading.Event()
        self.on_intact: Callable[[int], None] = lambda step: None
        """Called on rank 0 with the step of a checkpoint that was found intact, before older ones are deleted."""
        self.spared: Callable[[int], bool] = lambda step: False
        """Whether to keep the checkpoint of a step, however old."""
        self.newest: Future[Verdict] | None = None

    def follow(self, step: int, save: Future[Any] | None) -> None:
        """Looks after the checkpoint of a step from now on.

        Args:
            save: a save in progress; None if it is complete.
        """
        self.newest = self.thread.submit(self._follow, step, save)

    def verdict(self) -> Verdict:
        """Waits until the newest save has been looked after, and on rank 0 returns what was found; "intact" if there was none."""
        return "intact" if self.newest is None else self.newest.result()

    def close(self) -> None:
        """Ends the thread: stops reading, but finishes a deletion. For what was not read, nothing is deleted."""
        self.closing.set()
        self.thread.shutdown()

    def _follow(self, step: int, save: Future[Any] | None) -> Verdict:
        if save is not None and save.exception() is not None:
            return "unknown"
        checkpoint = self.folder / f"step-{step}"
        try:
            verdict = self._verdict(checkpoint) if self.verify else "intact"
            if dist.get_rank() == 0 and verdict == "damaged":
                kept = set_aside(checkpoint)
                logger.error(
                    f"{checkpoint} was damaged while it was saved. It is kept as {kept.name}; the run goes on."
                )
            elif dist.get_rank() == 0 and verdict == "intact":
                self.on_intact(step)
                self.delete_older(step)
        except (OSError, RuntimeError) as error:  # the store's, if the rank that serves it has ended
            if not self.closing.is_set():
                logger.warning(f"{checkpoint} is not looked after ({error}); no older checkpoint is deleted.")
            return "unknown"
        return verdict

    def _verdict(self, checkpoint: Path) -> Verdict:
        """Reads this rank's files of a checkpoint; on rank 0, the verdict of all ranks."""
        store, rank = _get_default_store(), dist.get_rank()
        own, key = self._read(checkpoint, rank), f"farsight/{checkpoint.name}/"
        if rank > 0:
            store.set(f"{key}{rank}", own)
            return own
        others = [f"{key}{other}" for other in range(1, dist.get_world_size())]
        while others and not store.check(others):
            if self.closing.wait(POLL_SECONDS):
                return "unknown"
        found = {own, *(store.get(name).decode() for name in others)}
        for name in others:
            store.delete_key(name)
        return "damaged" if "damaged" in found else "unknown" if "unknown" in found else "intact"

    def _read(self, checkpoint: Path, rank: int) -> Verdict:
        """Compares a rank's files with their checksums, from the disk where the system allows; logs what differs."""
        try:
            drop_cached(checkpoint / MANIFEST)
            manifest = read_manifest(checkpoint)
            names = [name for name in sorted(manifest.files) if _writer(name) == rank]
            found = other_sizes(checkpoint, {name: manifest.files[name].bytes for name in names})
            # A store has compared each part that it received with the checksum sent along: reading all back would show no more.
            for name in names * (not found and not isinstance(checkpoint, StorePath)):
                drop_cached(checkpoint / name)
                for block in range(len(manifest.files[name].blocks)):
                    if self.closing.is_set():
                        return "unknown"
                    found += fault(checkpoint, manifest, name, block)
                drop_cached(checkpoint / name)  # training's data may need the room
        except ConfigError as error:
            found = [str(error)]
        except (OSError, MemoryError) as error:
            logger.warning(f"{checkpoint} can't be verified ({error!r}); no older checkpoint is deleted.")
            return "unknown"
        if found:
            logger.error(f"{checkpoint}: {'; '.join(found)}")
        return "damaged" if found else "intact"

    def delete_older(self, newest: int) -> None:
        """Deletes all but the last `keep` complete checkpoints up to the newest intact one, and those that are spared; on rank 0.

        Each first becomes an interrupted save, in case the run is killed meanwhile.

        Raises:
            OSError: the folder can't be read now.
        """
        if self.keep == 0:
            return
        # Later ones may still turn out to be damaged.
        known = [step for step in complete_steps(self.folder) if step <= newest]
        for step in known[: -self.keep]:
            checkpoint = self.folder / f"step-{step}"
            if self.spared(step):
                continue
            try:
                if not holds_only_ours(checkpoint):
                    continue
                retire(checkpoint)
            except OSError as error:
                logger.warning(f"{checkpoint} can't be deleted ({error}); it is kept.")
                continue
            with suppress(OSError):
                delete_tree(checkpoint)


def _writer(name: str) -> int:
    """The rank that wrote a file of a checkpoint."""
    shard = re.match(r"__(\d+)_", name)
    return int(shard[1]) if shard else 0


def _lower_priority() -> None:
    """Lets every other thread go first, where the system gives threads priorities of their own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
