"""A run on an object store: its checkpoints are written there directly, and this copies its other files up and down.

Only one run may use a folder of a store. Locks do not exist there; instead a run creates an object, on the condition that there is
none, and writes it again every `BEAT_SECONDS`. One that no longer changes belongs to a run that was killed.
"""

import json
import logging
import os
import socket
import threading
import time
import tomllib
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from farsight.configs.schema import Job
from farsight.errors import ConfigError, SaveError
from farsight.progress import progress
from farsight.stores import StorePath, path_of
from farsight.training.hangs.read import HEARTBEATS

logger = logging.getLogger("farsight")

LEASE = "lease.json"
BEAT_SECONDS = 20.0
GONE_SECONDS = 90.0
"""A lease that does not change for so long belongs to no run any more."""
POLL_SECONDS = 1.0
METRICS = "metrics.jsonl"


class RunStore:
    """The copy of a run folder's files on an object store; used by rank 0.

    Args:
        folder: the run folder on this machine, which is locked.
        url: the run's folder on the store.
        kept: names in the run folder that are not copied up, besides those that begin with a dot.
    """

    def __init__(self, folder: Path, url: str, kept: Collection[str] = ()) -> None:
        self.folder, self.store, self.kept = folder, StorePath(url), kept
        self.lease = Lease(self.store / LEASE, f"{socket.gethostname()}:{folder.absolute()}")
        self.sent: dict[Path, tuple[int, int]] = {}
        """Size and time of change of the files as they were last copied up."""

    def open(self, checkpoints: str) -> None:
        """Takes the lease, which shows that the store can be written, and copies down what this machine lacks.

        Args:
            checkpoints: the name of the folder that holds checkpoints, which are not copied.

        Raises:
            ConfigError: the store can't be used, or another run uses the folder.
        """
        try:
            self.lease.take()
            self.pull(lambda name: not name.startswith((f"{checkpoints}/", "model/")))
        except OSError as error:
            if self.lease.thread is not None:
                self.lease.give_back()  # or the next start would wait for this one
            raise ConfigError(f"job.store = {self.store} can't be used: {_reason(error, self.store)}") from error
        logger.info(f"checkpoints go to {self.store}; logs and figures lie in {self.folder} and are copied there")

    def pull(self, wanted: Callable[[str], bool]) -> None:
        """Copies files down that this machine lacks, and figures of steps that another one trained.

        Args:
            wanted: selects names, relative to the run folder.

        Raises:
            OSError: a file can't be read or written.
        """
        for path in sorted(self.store.rglob("*"), key=_config_last) if self.store.is_dir() else ():
            name, target = path.relative_to(self.store).as_posix(), self.folder / path.relative_to(self.store)
            if name == LEASE or not wanted(name) or ".." in target.parts:
                continue
            if not target.exists() or (name == METRICS and not target.read_bytes().startswith(path.read_bytes())):
                path.fetch(target)

    def push(self) -> None:
        """Copies up the files that have changed, a model's `config.json` after its weights.

        Raises:
            SaveError: a file can't be copied, or another run has taken the folder over.
        """
        self.lease.check()
        try:
            self._send_changed()
        except OSError as error:
            raise SaveError(
                f"{self.folder} can't be copied to {self.store}: {error}. The same command continues from the newest checkpoint."
            ) from error

    def _send_changed(self) -> None:
        changed = {}
        for path in self._files():
            with suppress(FileNotFoundError):  # deleted meanwhile, by a tracker or an evaluation
                found = path.stat()
                # Files of stacks are empty, and most are deleted so when the run ends.
                if found.st_size and self.sent.get(path) != (now := (found.st_size, found.st_mtime_ns)):
                    changed[path] = now
        order = sorted(changed, key=_config_last)
        with progress(
            total=sum(size for size, _ in changed.values()), unit="B", unit_scale=True, desc="copy up"
        ) as bar:
            for path in order:
                try:
                    (self.store / path.relative_to(self.folder)).send(path)
                    self.sent[path] = changed[path]
                except FileNotFoundError:
                    if path.exists():  # it is the bucket that is gone
                        raise
                bar.update(changed[path][0])

    def _files(self) -> list[Path]:
        """The files to copy up; without those that are being written under another name, or were when a start was killed."""
        return [
            path
            for path in sorted(self.folder.rglob("*"))
            if path.is_file()
            and (parts := path.relative_to(self.folder).parts)[0] not in self.kept
            and not any(part.startswith(".") or part.endswith(".part") for part in parts)
        ]

    def close(self) -> None:
        """Copies up what the end of the run wrote, and gives the lease back."""
        try:
            self.push()
        except SaveError as error:
            logger.warning(str(error))
        self.lease.give_back()


def _config_last(path: Path) -> tuple[bool, Path]:
    """Sorts a model's `config.json` behind its weights, since a folder with it counts as a model."""
    return path.name == "config.json", path


class Lease:
    """Holds a folder of a store for one run.

    Args:
        path: the object.
        holder: machine and run folder: of two runs with the same, one has ended, since the run folder is locked.
    """

    def __init__(self, path: StorePath, holder: str) -> None:
        self.path, self.holder, self.token = path, holder, uuid.uuid4().hex
        self.beats, self.lost = 0, ""
        self.ending = threading.Event()
        self.thread: threading.Thread | None = None

    def take(self) -> None:
        """Creates the object and keeps it fresh from now on.

        Raises:
            ConfigError: another run holds it.
            OSError: the store can't be written.
        """
        try:
            self.path.create(self._text())
        except FileExistsError:
            self._take_over()
        self.thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self.thread.start()

    def _take_over(self) -> None:
        first, said, begin = self._read(), False, time.monotonic()
        holder = _field(first, "holder") or "another run"
        while first is not None and holder != self.holder and time.monotonic() - begin < GONE_SECONDS:
            if not said:
                said = True
                logger.info(
                    f"{self.path.parent} was in use by {holder}: waiting {GONE_SECONDS:.0f} s to see whether it still is"
                )
            time.sleep(POLL_SECONDS)
            if (now := self._read()) != first and now is not None:
                raise ConfigError(
                    f"{self.path.parent} is in use by {holder}; wait for it, or set another job.dump_folder."
                )
            if now is None:
                break
        self.path.write_bytes(self._text())
        if _field(self._read(), "token") != self.token:
            raise ConfigError(
                f"{self.path.parent} was taken by another run at this moment; set another job.dump_folder."
            )

    def _text(self) -> bytes:
        return json.dumps(
            {"holder": self.holder, "process": os.getpid(), "token": self.token, "beats": self.beats}
        ).encode()

    def _read(self) -> bytes | None:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return None

    def _beat(self) -> None:
        while not self.ending.wait(BEAT_SECONDS):
            try:
                now = self._read()
                if now is not None and _field(now, "token") != self.token:
                    self.lost = _field(now, "holder") or "another run"
                    return
                self.beats += 1
                self.path.write_bytes(self._text())
            except OSError as error:
                logger.warning(f"{self.path} can't be written ({error}); it is tried again in {BEAT_SECONDS:.0f} s.")

    def check(self) -> None:
        """Raises `SaveError` if another run has taken the folder over, as it may if this one could not reach the store for long."""
        if self.lost:
            raise SaveError(f"{self.path.parent} has been taken over by {self.lost}; this run stops before they mix.")

    def give_back(self) -> None:
        """Deletes the object, if it is still ours."""
        self.ending.set()
        if self.thread is not None:
            self.thread.join()
        try:
            if _field(self._read(), "token") == self.token:
                self.path.unlink()
        except OSError as error:
            logger.warning(
                f"{self.path} can't be deleted ({error}); a run on another machine waits for it to grow old."
            )


def _field(text: bytes | None, name: str) -> str:
    try:
        return str(json.loads(text or b"{}").get(name, ""))
    except (ValueError, AttributeError):
        return ""


def checkpoints_of(folder: Path) -> Path:
    """The folder of a run's checkpoints, by the settings in its run folder on this machine; it may not exist."""
    return path_of(_store_of(folder) or folder) / "checkpoint"


def _store_of(folder: Path) -> str:
    """`job.store` of the run that has written a run folder; empty if there is none."""
    try:
        return tomllib.loads((folder / "config.toml").read_text(encoding="utf-8")).get("job", {}).get("store", "")
    except (OSError, ValueError):
        return ""


def refuse_another_store(folder: Path, store: str) -> None:
    """Refuses a run folder whose run keeps its checkpoints elsewhere: it would start again from its first step.

    Raises:
        ConfigError: naming both places.
    """
    if not (folder / "config.toml").is_file():
        return
    if (theirs := _store_of(folder)).rstrip("/") != store.rstrip("/"):
        raise ConfigError(
            f"{folder} holds the figures of a run whose checkpoints are in {theirs or 'it'}, and job.store = {store!r}: set it back, "
            "or name another job.dump_folder for this machine's files."
        )


def open_run_store(job: Job, checkpoints: str) -> RunStore | None:
    """The store of a run whose folder is locked, ready to be used; None for a run without one.

    Raises:
        ConfigError: as `refuse_another_store` and `RunStore.open`.
    """
    folder = Path(job.dump_folder)
    refuse_another_store(folder, job.store)
    if not job.store:
        return None
    run = RunStore(folder, job.store, {HEARTBEATS})
    run.open(checkpoints)
    return run


def _reason(error: OSError, store: StorePath) -> str:
    """The reason why a store can't be used, and the remedy."""
    text = str(error.strerror or error).rstrip(".")
    if isinstance(error, PermissionError):
        return f"access is denied ({text}). Its credentials must allow to list, read, write and delete objects there."
    if isinstance(error, FileNotFoundError):
        return f"there is no bucket {store.parts[1]!r} ({text}). Make it first, or correct the name."
    if "NoCredentials" in text or "DefaultCredentials" in text:
        return "no credentials were found. Set them as for the store's own tools (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, a role)."
    return f"{text}. Its address comes from the store's own settings, such as AWS_ENDPOINT_URL."
