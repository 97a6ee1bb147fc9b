"""Kills training runs at random moments, resumes them, and compares each with an undisturbed run.

    python -m benchmarks.kills --json kills.json
    python -m benchmarks.kills --ranks 2 --async

Each run trains a tiny model, is killed with SIGKILL (all ranks at once) and resumed by the same command. Of ten kills, one
is aimed at start-up, four at training, four at a save and one at the export after the last step; the table counts where
they fell. A run passes if it resumes from its newest complete checkpoint, whose bytes match their checksums, loses only
the steps since that one, and ends with the same rows in metrics.jsonl and the same weights, bit for bit.
"""

import json
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tqdm import tqdm

from farsight.benchmarks.forked import Forked, start_server
from farsight.benchmarks.tiny import MODEL, SETTINGS
from farsight.checkpoints.dcp import COMPLETE
from farsight.checkpoints.intact.check import faults
from farsight.checkpoints.steps import complete_steps, step_folders
from farsight.cli import bounded, command, new_parser, positive
from farsight.outputs import add_json_option, write_json
from farsight.stores import delete_tree, path_of

CONFIG = (
    MODEL
    + SETTINGS
    + """
[position]
heads = { kind = "scope" }

[training]
seq_len = 32
global_batch_size = 2
mixed_precision_param = "float32"

[validation]
freq = 50
steps = 2

[metrics]
log_freq = 1
trackers = []
"""
)
AIMS = {"start-up": 1, "training": 4, "saving": 4, "export": 1}
"""Kills out of ten, by what they are aimed at."""
SPEED = {"time", "tokens_per_second", "tflops", "mfu", "memory_gib", "data_seconds", "plasticity_seconds"}
"""Figures in a row that differ between identical runs."""
EVENTS = {"run", "checkpoint", "ended"}
"""Keys of rows that tell of starts, checkpoints and ends, of which a run that was killed has others."""


@dataclass(frozen=True)
class Training:
    """The shape of the runs."""

    folder: Path
    """Holds the run folders."""
    steps: int = 200
    interval: int = 10
    ranks: int = 1
    asynchronous: bool = False
    store: str = ""
    """A folder on an object store that holds the runs' checkpoints."""
    environment: Mapping[str, str] = field(default_factory=dict)

    def checkpoints(self, name: str) -> Path:
        """The folder of a run's checkpoints."""
        return path_of(f"{self.store}/{name}" if self.store else self.folder / name) / "checkpoint"

    def start(self, name: str, log: Path) -> Forked:
        """Starts the run's ranks, which print into folder `log`.

        They are forks of a process that has imported everything, so there is no torchrun and no start-up time.
        """
        config = self.folder / "kills.toml"
        config.write_text(CONFIG)
        options = {
            "job.config_file": config, "job.dump_folder": self.folder / name, "training.steps": self.steps,
            "training.local_batch_size": 2 // self.ranks, "checkpoint.interval": self.interval,
            "checkpoint.async_mode": "async" if self.asynchronous else "disabled",
        }  # fmt: skip
        if self.store:
            options["job.store"] = f"{self.store}/{name}"
        arguments = [f"--{key}={value}" for key, value in options.items()]
        return Forked(arguments, self.ranks, log, environment=self.environment)


def join(ranks: Forked) -> set[int | None]:
    """Waits for the ranks to end and returns their exit statuses."""
    for process in ranks.processes:
        process.join()
    return {process.exitcode for process in ranks.processes}


def output(log: Path) -> str:
    """Returns the output of rank 0 so far."""
    file = log / "0.err"
    return file.read_text() if file.exists() else ""


@dataclass(frozen=True)
class Undisturbed:
    """The undisturbed run's results, and how long its parts took."""

    rows: list[dict]
    weights: bytes
    start_seconds: float
    save_seconds: float
    export_seconds: float


@dataclass
class Kill:
    where: str
    reached: int
    """The last step that was trained."""
    resumed: int
    """The step of the newest complete checkpoint; 0 for none."""

    @property
    def lost(self) -> int:
        return self.reached - self.resumed


@dataclass
class Outcome:
    kills: list[Kill] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def train_undisturbed(training: Training) -> Undisturbed:
    start_server()  # so that this run's start-up takes as long as the others'
    log, begin = training.folder / "undisturbed.log", time.time()
    (status,) = join(training.start("undisturbed", log))
    if status:
        raise SystemExit(f"the undisturbed run ended with {status}:\n{output(log)[-4000:]}")
    folder = training.folder / "undisturbed"
    last = training.checkpoints("undisturbed") / f"step-{training.steps}"
    saved = _modified(last / COMPLETE)
    return Undisturbed(
        rows=rows(folder),
        weights=weights(folder),
        # The lock and the tokenizer come early, the config just before the first step.
        start_seconds=_modified(folder / "config.toml") - begin,
        save_seconds=saved - _modified(last / "farsight.json"),
        export_seconds=_modified(folder / "model" / "README.md") - saved,
    )


def _modified(path: Path) -> float:
    return path.stat().st_mtime


def rows(folder: Path) -> list[dict]:
    """The rows of `metrics.jsonl` with figures of a step, without those of speed."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found = [row for row in map(json.loads, lines) if not EVENTS & row.keys()]
    return [{key: value for key, value in row.items() if key not in SPEED} for row in found]


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def aims(rng: random.Random) -> Iterator[str]:
    """An endless sequence of what to aim kills at."""
    while True:
        ten = [aim for aim, count in AIMS.items() for _ in range(count)]
        rng.shuffle(ten)
        yield from ten


def kill_and_resume(
    training: Training, name: str, whole: Undisturbed, aimed_at: Sequence[str], rng: random.Random
) -> Outcome:
    """Trains in a new run folder, killed once for each aim and resumed after each.

    Args:
        whole: from `train_undisturbed`, to compare with.
        aimed_at: keys of `AIMS`.
    """
    folder, outcome = training.folder / name, Outcome()
    checkpoints = training.checkpoints(name)
    for attempt, aim in enumerate(aimed_at):
        log = training.folder / f"{name}.{attempt}.log"
        while True:
            newest = max(complete_steps(checkpoints), default=0)
            if newest == training.steps:
                # The kill came after the last save. Remove that save, so that there is something left to aim at.
                delete_tree(checkpoints / f"step-{newest}")
                newest = max(complete_steps(checkpoints), default=0)
            ranks = training.start(name, log)
            _wait_for(aim, training, checkpoints, newest, log, whole, rng, ranks)
            for process in ranks.processes:
                process.kill()
            statuses = join(ranks)
            if -signal.SIGKILL in statuses and statuses <= {-signal.SIGKILL, 0}:
                break
            if statuses != {0}:
                outcome.wrong.append(f"{name} ended with {statuses} before it was killed:\n{output(log)[-2000:]}")
                return outcome
            _check_start(outcome, log, newest)  # the run ended before the kill
        _check_start(outcome, log, newest)
        outcome.kills.append(_look(training, checkpoints, log, outcome))
    log = training.folder / f"{name}.log"
    newest = max(complete_steps(checkpoints), default=0)
    statuses = join(training.start(name, log))
    printed = output(log)
    if statuses != {0}:
        outcome.wrong.append(f"{name} ended with {statuses} when resumed:\n{printed[-2000:]}")
        return outcome
    _check_start(outcome, log, newest)
    if rows(folder) != whole.rows:
        outcome.wrong.append(f"{name}: the rows of metrics.jsonl differ from the undisturbed run's")
    if weights(folder) != whole.weights:
        outcome.wrong.append(f"{name}: the final weights differ from the undisturbed run's")
    return outcome


def _wait_for(
    aim: str, training: Training, checkpoints: Path, newest: int, log: Path, whole: Undisturbed, rng: random.Random,
    ranks: Forked,
) -> None:  # fmt: skip
    """Waits for a random moment in the phase that is aimed at, or until a process has ended.

    Args:
        newest: the step that the processes resume from.
    """
    saves = range(newest + training.interval, training.steps + 1, training.interval)
    reached: Callable[[], bool]
    if aim == "start-up":
        seconds, reached = whole.start_seconds, lambda: True
    elif aim == "training":
        step = rng.randint(newest + 1, training.steps - 1)
        seconds, reached = 0.03, lambda: _last_step(log) >= step
    elif aim == "saving":
        save = checkpoints / f"step-{rng.choice(saves)}"
        # The folder of an interrupted save may stay until the run has loaded.
        seconds, reached = whole.save_seconds, lambda: save.exists() and _started_at(log) is not None
    else:
        seconds, reached = whole.export_seconds, (checkpoints / f"step-{training.steps}" / COMPLETE).exists
    delay, end = rng.random() * seconds, None
    while all(process.is_alive() for process in ranks.processes):
        if end is None and reached():
            end = time.monotonic() + delay
        if end is not None and time.monotonic() >= end:
            return
        time.sleep(0.001)


def _last_step(log: Path) -> int:
    """The last training step that a process has reported; 0 for none."""
    steps = re.findall(r"^step (\d+)/\d+  loss ", output(log), re.MULTILINE)
    return int(steps[-1]) if steps else 0


def _started_at(log: Path) -> int | None:
    """The step that a process resumed from: 0 for a new run, None if it was killed before it had loaded."""
    printed = output(log)
    resumed = re.search(r"^resuming from .*step-(\d+)$", printed, re.MULTILINE)
    return int(resumed[1]) if resumed else 0 if re.search(r"^step 0/", printed, re.MULTILINE) else None


def _check_start(outcome: Outcome, log: Path, newest: int) -> None:
    """Checks that a process resumed from the newest complete checkpoint that it found."""
    found = _started_at(log)
    if found not in (None, newest):
        outcome.wrong.append(f"{log.name} started at step {found}; the newest complete checkpoint was {newest}")
    if "damaged" in (printed := output(log)):
        outcome.wrong.append(f"{log.name} found a damaged checkpoint:\n{printed[-2000:]}")


def _look(training: Training, checkpoints: Path, log: Path, outcome: Outcome) -> Kill:
    """Finds out where a kill fell, by what it left behind."""
    newest = max(complete_steps(checkpoints), default=0)
    if newest and (found := faults(checkpoints / f"step-{newest}")):
        outcome.wrong.append(f"{log.name}: step {newest} is complete and damaged: {'; '.join(found)}")
    begun = max(step_folders(checkpoints), default=0)
    started = _started_at(log)
    reached = max(_last_step(log), started if started is not None else newest)
    if begun > newest:
        where = "saving"
    elif newest == training.steps:
        where = "export"
    else:
        where = "training" if _last_step(log) else "start-up"
    kill = Kill(where, reached, newest)
    # The next save waits for one that is under way.
    if kill.lost > training.interval * (2 if training.asynchronous else 1):
        outcome.wrong.append(f"{log.name}: {kill.lost} steps lost, saved every {training.interval}")
    return kill


def table(kills: Sequence[Kill]) -> str:
    lines = [("killed in", "kills", "steps lost, mean", "largest")]
    for where in AIMS:
        lost = [kill.lost for kill in kills if kill.where == where]
        if lost:
            lines.append((where, str(len(lost)), f"{sum(lost) / len(lost):.1f}", str(max(lost))))
    lost = [kill.lost for kill in kills]
    lines.append(("all", str(len(lost)), f"{sum(lost) / max(1, len(lost)):.1f}", str(max(lost, default=0))))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


@command
def main() -> int:
    parser = new_parser("python -m benchmarks.kills", __doc__)
    parser.add_argument("--runs", type=positive, default=30, help="how many runs are killed, once each (default: 30)")
    parser.add_argument("--seed", type=bounded(int), default=0, help="of the moments (default: 0)")
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1, help="2 trains with FSDP (default: 1)")
    parser.add_argument("--async", dest="asynchronous", action="store_true", help="save while training goes on")
    add_json_option(parser, "the kills")
    args = parser.parse_args()

    begin, rng = time.perf_counter(), random.Random(args.seed)
    kills: list[Kill] = []
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        training = Training(Path(temporary), ranks=args.ranks, asynchronous=args.asynchronous)
        whole = train_undisturbed(training)
        for run, aim in tqdm(
            zip(range(args.runs), aims(rng), strict=False), total=args.runs, disable=None, unit="run", leave=False
        ):
            outcome = kill_and_resume(training, f"run-{run}", whole, [aim], rng)
            kills += outcome.kills
            wrong += outcome.wrong
    print(table(kills))
    print(
        f"{args.runs} runs of {training.steps} steps on {args.ranks} rank{'s' * (args.ranks > 1)}, saved every "
        f"{training.interval}{' asynchronously' * args.asynchronous}: {len(wrong)} failures, "
        f"{time.perf_counter() - begin:.0f} s"
    )
    found = {"runs": args.runs, "seed": args.seed, "ranks": args.ranks, "asynchronous": args.asynchronous}
    found |= {"steps": training.steps, "interval": training.interval}
    lines = [asdict(kill) | {"lost": kill.lost} for kill in kills]
    write_json(args.json, {**found, "kills": lines, "wrong": wrong})
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
