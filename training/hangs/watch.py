"""A thread in each rank that shows that it lives, and records where it stands when ranks wait too long for each other.

Training itself only says which step and phase it is in. The thread needs no step to end and no signal handler to run in
the main thread, which hangs inside a library then.
"""

import faulthandler
import json
import logging
import os
import re
import shutil
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from farsight import process
from farsight.configs.schema import JobConfig
from farsight.errors import DataError
from farsight.files import write_text
from farsight.training.hangs.read import (
    ASK,
    BEAT,
    HEARTBEATS,
    PREVIOUS,
    SAID,
    Dump,
    Group,
    Heartbeat,
    ask,
    dump_of,
    hang_sentence,
    plain_unpickle,
    read_traces,
)

logger = logging.getLogger("farsight")

CLAIM = "hang"
"""A file among the traces that the rank makes which reads all dumps, so that not every rank does."""
LOOK = 1.0
"""Seconds between looks for a signal or a stall."""

_watch: "Watch | None" = None


def set_aside(config: JobConfig) -> None:
    """Moves what an earlier start left about a hang to `previous/` among the traces; rank 0 calls it before ranks connect."""
    run, traces = Path(config.job.dump_folder), traces_of(config)
    with suppress(OSError):
        old, beats = [path for path in traces.glob("*") if path.name != PREVIOUS], run / HEARTBEATS
        if any(path.name.startswith(("rank", CLAIM)) for path in old):
            previous = traces / PREVIOUS
            shutil.rmtree(previous, ignore_errors=True)
            previous.mkdir()
            for path in old:
                path.rename(previous / path.name)
            if beats.is_dir():
                beats.rename(previous / HEARTBEATS)
        shutil.rmtree(beats, ignore_errors=True)


def traces_of(config: JobConfig) -> Path:
    """The folder of the traces, inside the run folder."""
    return Path(config.job.dump_folder) / config.comm.save_traces_folder


def explain(error: BaseException) -> tuple[str, bool] | None:
    """The sentence about the hang that made a collective fail, and whether another rank has logged it.

    Returns:
        None if no hang is known.
    """
    if _watch is None:
        return None
    try:
        return _watch.explain(re.search("timed out|timeout", str(error), re.IGNORECASE) is not None)
    except (OSError, DataError) as unreadable:
        logger.warning(f"rank {_watch.rank} can't read what the ranks recorded: {unreadable}")
        return None


class Watch:
    """Writes this rank's heartbeats, and its stacks and collectives when asked or when a collective takes half its time limit.

    Stacks are also written by SIGUSR1 itself, in C, whatever the threads do. All files lie in the run folder, and one that can't be
    written is left out.

    Args:
        config: gives the folders, and the time limit until `limit` is set.
        device: this rank's device.
    """

    def __init__(self, config: JobConfig, device: torch.device) -> None:
        global _watch
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.run, self.traces = Path(config.job.dump_folder), traces_of(config)
        self.limit = float(config.comm.init_timeout_seconds)
        """The time limit of collectives, in seconds."""
        self.every = min(BEAT, self.limit / 16, config.comm.train_timeout_seconds / 16)
        """Seconds between heartbeats."""
        self.device = (
            str(device) if device.type == "cpu" else f"{device}, {torch.get_device_module(device).get_device_name()}"
        )
        self.host, self._step, self._phase, self._since = socket.gethostname(), 0, "starting", time.time()
        self._stalled: tuple[Any, float] = (None, time.time())
        self._expires, self._beaten, self._failed = 0.0, 0.0, False
        self._asked, self._closing = self._ask(), threading.Event()
        self._stacks = None
        with suppress(OSError):
            self.traces.mkdir(parents=True, exist_ok=True)
            (self.run / HEARTBEATS).mkdir(exist_ok=True)
            self._stacks = (self.traces / f"stacks-{self.rank}.txt").open("a", encoding="utf-8")
            faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        self._written = self._size()
        self._thread = threading.Thread(target=self._loop, name="watch", daemon=True)
        self._thread.start()
        _watch = self

    def at(self, step: int, phase: str) -> None:
        """Sets the step and the phase that training is in from now on."""
        self._step, self._phase, self._since = step, phase, time.time()

    def close(self) -> None:
        """Ends the thread after a last heartbeat; leaves no file of stacks that is empty."""
        self._closing.set()
        self._thread.join(10)  # no longer, if the file system hangs
        if self._stacks is not None:
            faulthandler.unregister(signal.SIGUSR1)
            with suppress(OSError):
                if not self._size():
                    os.unlink(self._stacks.name)
                    self.traces.rmdir()  # fails unless it is empty
            self._stacks.close()
            self._stacks = None

    # The thread ──────────────────────────────────────────────────────────────────────────────────

    def _loop(self) -> None:
        last = False
        while True:
            try:
                self._turn(last)
            except Exception as error:  # training goes on without
                if not self._failed:
                    logger.warning(f"rank {self.rank} can't write its heartbeat or traces: {error}")
                self._failed = True
            if last:
                return
            last = self._closing.wait(min(LOOK, self.every))

    def _turn(self, last: bool) -> None:
        now = time.time()
        if last or now >= self._beaten + self.every:
            self._beaten = now
            self._beat(now)
            if (asked := self._ask()) != self._asked:
                self._asked = asked
                self._record(stacks=True)
        if self._size() > self._written:
            logger.warning(f"SIGUSR1: rank {self.rank} writes its stacks and collectives to {self.traces}")
            self._record()
        if self.world_size > 1:
            self._look(now)

    def _beat(self, now: float) -> None:
        """Writes a heartbeat; the file's time is that of the newest step or phase, for schedulers that look at nothing else."""
        since = self._since
        beat = Heartbeat(
            self.rank,
            self.world_size,
            self.host,
            os.getpid(),
            self.device,
            self._step,
            self._phase,
            since,
            now,
            self.every,
        )
        path = self.run / HEARTBEATS / f"rank-{self.rank}.json"
        # One write of a constant length, so that no reader finds half of it.
        opened = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.write(opened, f"{json.dumps(asdict(beat)):<510}\n".encode())
            os.utime(opened, (now, since))
        finally:
            os.close(opened)

    def _ask(self) -> float:
        try:
            return (self.traces / ASK).stat().st_mtime
        except OSError:
            return 0.0

    def _size(self) -> int:
        return 0 if self._stacks is None else os.fstat(self._stacks.fileno()).st_size

    def _look(self, now: float) -> None:
        """Records and asks the others to, once collectives have made no progress for half of their time limit."""
        status = {
            name: (s["last_enqueued_collective"], s["last_completed_collective"])
            for name, s in _recorder(entries=False).get("pg_status", {}).items()
        }
        if status != self._stalled[0] or all(enqueued == completed for enqueued, completed in status.values()):
            self._stalled, self._expires = (status, now), 0.0
        elif not self._expires and now - self._stalled[1] >= self.limit / 2:
            waits = self._record(stacks=True).waits_in()
            self._expires = min((c.created + c.timeout for c in waits), default=float("inf"))
            if self._expires < now + self.limit:
                ask(self.traces)
        elif 0 < self._expires <= now and dist.get_backend() != "gloo":
            # NCCL ends the process from a thread of its own; gloo raises an error in the main one.
            self._expires = float("inf")
            if (found := self.explain(True)) is not None:
                process.leave_note(process.EXIT_UNEXPECTED, found[0], follows=found[1])
                if not found[1]:
                    logger.error(found[0])

    def _record(self, stacks: bool = False) -> Dump:
        """Writes the recorded collectives and, if asked, the stacks of all threads."""
        if self._stacks is not None:
            if stacks:
                faulthandler.dump_traceback(self._stacks, all_threads=True)
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            self._stacks.write(f"— rank {self.rank}, {when}, step {self._step}, {self._phase} —\n\n")
            self._stacks.flush()
            self._written = self._size()
        world = dist.distributed_c10d._world
        groups = {
            str(world.pg_names[group]): Group(group.group_desc, tuple(sorted(ranks)))
            for group, ranks in world.pg_group_ranks.items()
            if isinstance(group, dist.ProcessGroup)  # and not the mark of groups that this rank is not in
        }
        dump = dump_of(self.rank, time.time(), _recorder(), groups)
        dump.write(self.traces)
        return dump

    # The sentence ────────────────────────────────────────────────────────────────────────────────

    def explain(self, timed_out: bool) -> tuple[str, bool] | None:
        """The sentence about the hang, and whether another rank has said it; the first rank to time out makes it."""
        path = self.traces / SAID
        if timed_out:
            self.traces.mkdir(exist_ok=True)
            with suppress(FileExistsError):
                (self.traces / CLAIM).open("x").close()
                found = hang_sentence(*read_traces(self.run, self.traces), now := time.time())
                sentence = found and f"step {self._step} hung: {found}; see farsight hang {self.run}"
                write_text(path, json.dumps({"time": now, "rank": self.rank, "sentence": sentence}))
                return None if sentence is None else (sentence, False)
        for _ in range(300 if (self.traces / CLAIM).exists() else 0):
            with suppress(OSError, ValueError):
                sentence = json.loads(path.read_text(encoding="utf-8"))["sentence"]
                return None if sentence is None else (sentence, True)
            time.sleep(0.1)
        return None


def _recorder(entries: bool = True) -> dict[str, Any]:
    """The contents of torch's flight recorder, with stack traces, or only how many collectives of each group have ended."""
    c10d: Any = torch._C._distributed_c10d
    # In releases where NCCL has a recorder of its own, it is the one that training records to.
    nccl = dist.get_backend() != "gloo" and hasattr(c10d, "_dump_nccl_trace")
    dump = c10d._dump_nccl_trace if nccl else c10d._dump_fr_trace
    found = plain_unpickle(dump(entries, entries, False))
    assert isinstance(found, dict)
    return found
