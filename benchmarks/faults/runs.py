"""Runs with damaged checkpoints, full disks or a rank that hangs: what they say, and what they leave."""

import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from farsight.benchmarks.faults.workshop import Workshop
from farsight.benchmarks.forked import Finished

STEPS = 16
"""The steps of a complete run; it is spoiled at step 12."""
TRAIN = (
    f"train.py --job.config_file {{config}} --checkpoint.keep_latest_k 0 --training.steps {STEPS} --job.dump_folder "
)


@dataclass(frozen=True)
class Outcome:
    name: str
    seconds: float
    wrong: tuple[str, ...]
    said: str


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


class Runs:
    """Spoils runs in a workshop and compares their results with those of an undisturbed run."""

    def __init__(self, workshop: Workshop) -> None:
        self.workshop = workshop
        self.whole = workshop.folder / "whole"
        done = self.train(self.whole)
        assert done.returncode == 0, done.stderr
        self.at_twelve = workshop.folder / "at_twelve"
        shutil.copytree(self.whole, self.at_twelve)
        shutil.rmtree(self.at_twelve / "checkpoint" / f"step-{STEPS}")
        shutil.rmtree(self.at_twelve / "model")

    def train(self, run: Path, more: str = "", ranks: int = 1, bound: float = 120.0) -> Finished:
        """Trains in a run folder to the end, resuming if there is something to resume."""
        command = f"{TRAIN.format(config=self.workshop.paths['config'])}{run} {more}"
        # Elsewhere: the run's own disk may be full.
        logs = Path(tempfile.mkdtemp(dir=self.workshop.folder))
        return self.workshop.start(command, logs, ranks).wait(bound)

    # ── Damaged checkpoints ───────────────────────────────────────────────────────────────────────────

    def damaged(self, number: int) -> Outcome:
        """Damages the newest of three checkpoints and goes on: the damage is named, and the run ends with the same weights."""
        rng = random.Random(number)
        run = self.workshop.folder / "damaged" / str(number)
        shutil.copytree(self.at_twelve, run)
        newest = run / "checkpoint" / "step-12"
        file = rng.choice(sorted(path for path in newest.iterdir() if path.is_file()))
        how = rng.choice(DAMAGES)
        how(file, rng)
        begin = time.monotonic()
        done = self.train(run)
        wrong = _judge(done, 0, (file.name, "damaged-12", "step 8"))
        if not wrong and weights(run) != weights(self.whole):
            wrong.append("changed result: other weights than the undisturbed run's")
        if not wrong and not any((run / "checkpoint").glob("damaged-12*")):
            wrong.append("lost data: the damaged checkpoint is gone")
        return Outcome(f"{how.__name__} in {file.name}", time.monotonic() - begin, tuple(wrong), done.stderr)

    # ── Full disks ────────────────────────────────────────────────────────────────────────────────────

    def full(self, name: str) -> Outcome:
        """Runs one of `DISKS` on a tmpfs that is too small."""
        folder = self.workshop.folder / "full" / name.replace(" ", "_")
        folder.mkdir(parents=True)
        begin = time.monotonic()
        wrong, said = DISKS[name](self, folder)
        return Outcome(name, time.monotonic() - begin, tuple(wrong), said)

    # ── Ranks that hang ───────────────────────────────────────────────────────────────────────────────

    def stopped(self, for_good: bool) -> Outcome:
        """Stops one of two ranks for two seconds, or for good: then the other has to end within its timeout and say so."""
        name = "a rank stopped for good" if for_good else "a rank stopped for two seconds"
        run = self.workshop.folder / "stopped" / str(for_good)
        logs = run.parent / f"{run.name}.printed"
        logs.mkdir(parents=True)
        # While they save, ranks wait for each other for hours: none is to be stopped there for good.
        interval = STEPS * 20 if for_good else 4
        more = f"--training.steps {STEPS * 20} --checkpoint.interval {interval} --comm.train_timeout_seconds 6"
        command = f"{TRAIN.format(config=self.workshop.paths['config'])}{run} --training.local_batch_size 1 {more}"
        begin, ranks = time.monotonic(), self.workshop.start(command, logs, 2)
        while not re.search(r"^step [4-9]", (logs / "printed" / "0.err").read_text(), re.MULTILINE):
            if time.monotonic() > begin + 60:
                return Outcome(name, 60.0, ("the run did not begin",), ranks.wait(1).stderr)
            time.sleep(0.02)
        pid = ranks.processes[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        if for_good:
            while ranks.processes[0].is_alive() and time.monotonic() < begin + 90:
                time.sleep(0.1)
        else:
            time.sleep(2)
            os.kill(pid, signal.SIGCONT)
        done = ranks.wait(90)
        seconds = time.monotonic() - begin
        wrong = [] if not for_good and done.returncode == 0 else _judge(done, None if for_good else 0, ())
        if seconds > 90:
            wrong.append("hang")
        if for_good and done.returncode == 0:
            wrong.append("status 0 without a rank")
        return Outcome(name, seconds, tuple(wrong), done.stderr)


def _judge(done: Finished, status: int | None, says: tuple[str, ...]) -> list[str]:
    printed = done.stdout + done.stderr
    wrong = ["traceback"] if "Traceback (most recent call last)" in printed or "fault in Farsight" in printed else []
    if status is not None and done.returncode != status:
        wrong.append(f"status {done.returncode}, not {status}")
    if missing := [word for word in says if word not in printed]:
        wrong.append(f"unclear: nothing of {', '.join(map(repr, missing))}")
    return wrong


def _flip(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def _cut(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size))


def _grow(file: Path, rng: random.Random) -> None:
    with file.open("ab") as opened:
        opened.write(rng.randbytes(rng.randint(1, 100)))


def _empty(file: Path, rng: random.Random) -> None:
    os.truncate(file, 0)


def _overwrite(file: Path, rng: random.Random) -> None:
    file.write_bytes(rng.randbytes(file.stat().st_size))


DAMAGES = (_flip, _flip, _flip, _cut, _grow, _empty, _overwrite)


@contextmanager
def tmpfs(folder: Path, kilobytes: int) -> Iterator[Callable[[int], None]]:
    """Mounts a small disk at `folder`; yields a function that changes its size."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", folder], check=True, capture_output=True
    )
    try:
        yield lambda size: subprocess.run(["mount", "-o", f"remount,size={size}k", folder], check=True) and None
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def can_mount(folder: Path) -> bool:
    """Returns whether this user may mount a tmpfs."""
    try:
        with tmpfs(folder / "trial", 64):
            return True
    except (subprocess.CalledProcessError, OSError):
        return False


def _save(runs: Runs, folder: Path, more: str = "") -> tuple[list[str], str]:
    """Checkpoints no longer fit: the run ends, keeps what it has, and goes on when there is room."""
    with tmpfs(folder, 1300) as resize:
        run = folder / "run"
        done = runs.train(run, f"--metrics.trackers=[] {more}")
        wrong = _judge(done, 4, ("could not be saved", "free"))
        resize(20000)
        again = runs.train(run, more)
        wrong += _judge(again, 0, ())
        if not wrong and weights(run) != weights(runs.whole):
            wrong.append("changed result: other weights than the undisturbed run's")
        return wrong, done.stderr + again.stderr


def _metrics(runs: Runs, folder: Path) -> tuple[list[str], str]:
    """metrics.jsonl can't grow: training goes on, and says how many rows are missing."""
    with tmpfs(folder / "disk", 4):
        run = folder / "run"
        run.mkdir()
        (run / ".lock").touch()
        (folder / "disk" / "metrics.jsonl").write_bytes(b"")
        (folder / "disk" / "filler").write_bytes(b"x" * 4096)
        (run / "metrics.jsonl").symlink_to(folder / "disk" / "metrics.jsonl")
        done = runs.train(run)
        wrong = _judge(done, 0, ("metrics.jsonl",))
        if not wrong and weights(run) != weights(runs.whole):
            wrong.append("changed result: other weights than the undisturbed run's")
        return wrong, done.stderr


def _tensorboard(runs: Runs, folder: Path) -> tuple[list[str], str]:
    """TensorBoard's files can't grow: training goes on, and says so."""
    with tmpfs(folder / "disk", 4):
        run = folder / "run"
        run.mkdir()
        (run / "tb").symlink_to(folder / "disk")
        (folder / "disk" / "filler").write_bytes(b"x" * 4096)
        done = runs.train(run, "--metrics.trackers tensorboard")
        wrong = _judge(done, 0, ("TensorBoard",))
        if not wrong and weights(run) != weights(runs.whole):
            wrong.append("changed result: other weights than the undisturbed run's")
        return wrong, done.stderr


def _start(runs: Runs, folder: Path) -> tuple[list[str], str]:
    """A run's first files do not fit."""
    with tmpfs(folder, 4):
        (folder / "filler").write_bytes(b"x" * 4096)
        done = runs.train(folder / "run", bound=60)
        return _judge(done, 2, (str(folder / "run"), "space")), done.stderr


def _export(runs: Runs, folder: Path) -> tuple[list[str], str]:
    """The model directory does not fit, and is written when there is room."""
    with tmpfs(folder / "disk", 64) as resize:
        run = folder / "run"
        shutil.copytree(runs.whole, run)
        shutil.rmtree(run / "model")
        # Checkpoints lie on the large disk, the rest of the run on the small one.
        small = folder / "disk" / "run"
        small.mkdir()
        (small / "checkpoint").symlink_to(run / "checkpoint")
        done = runs.train(small)
        wrong = _judge(done, 4, ("can't be written", "space"))
        if (small / "model").exists():
            wrong.append("a part of a model directory is visible")
        resize(20000)
        again = runs.train(small)
        wrong += _judge(again, 0, ())
        if not wrong and weights(small) != weights(runs.whole):
            wrong.append("changed result: other weights than the undisturbed run's")
        return wrong, done.stderr + again.stderr


def _tool(command: str, made: str) -> Callable[[Runs, Path], tuple[list[str], str]]:
    """A tool whose output does not fit: it says so, and leaves nothing that looks whole."""

    def run(runs: Runs, folder: Path) -> tuple[list[str], str]:
        with tmpfs(folder / "disk", 8):
            logs = folder / "printed_"
            logs.mkdir()
            paths = runs.workshop.paths
            done = runs.workshop.start(command.format(disk=folder / "disk", **paths), logs).wait(120)
            wrong = _judge(done, 2, ("space",))
            if (folder / "disk" / made).exists():
                wrong.append("lost data: what did not fit looks whole")
            return wrong, done.stderr

    return run


DISKS: dict[str, Callable[[Runs, Path], tuple[list[str], str]]] = {
    "at a save": _save,
    "at an asynchronous save": lambda runs, folder: _save(runs, folder, "--checkpoint.async_mode async"),
    "under metrics.jsonl": _metrics,
    "under TensorBoard": _tensorboard,
    "at the start": _start,
    "at the export": _export,
    "in convert to-hf": _tool("convert to-hf {checkpoint} {disk}/out", "out"),
    "in convert from-hf": _tool("convert from-hf {model} {disk}/out", "out"),
    "in merge": _tool("merge {adapter} --out {disk}/out", "out"),
    "in tokenizer training": _tool("tokenizer train --vocab-size 300 --text {text} --out {disk}/out", "out"),
}
