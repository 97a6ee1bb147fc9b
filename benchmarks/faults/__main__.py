"""Fault injection: bad input, attacks, kills, damaged checkpoints, full disks and stopped ranks, and whether anything is lost.

    python -m benchmarks.faults --json faults.json
    python -m benchmarks.faults --only inputs --name template

Each bad input has to end with status 2 and a sentence that has certain words; nothing hidden in a file may be executed, and no
file may change. Each run that was killed, damaged or ran out of disk has to end with the weights of an undisturbed one, bit for
bit. A tmpfs stands in for a full disk; without the right to mount one, these cases are skipped and counted as such. Commands
run in forks of a process that has imported everything, so that each takes less than a second; the whole takes about fifteen
minutes on two cores.
"""

import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from farsight.benchmarks import kills
from farsight.benchmarks.faults import data, hostile, settings, tools
from farsight.benchmarks.faults.runs import DISKS, Outcome, Runs, can_mount
from farsight.benchmarks.faults.workshop import Case, Workshop, fingerprint
from farsight.cli import command, new_parser, positive
from farsight.outputs import add_json_option, write_json

T = TypeVar("T")

SECTIONS = ("inputs", "kills", "damage", "disks", "stops")
KILLS = {"one rank": (40, 1, False), "asynchronous saves": (10, 1, True), "two ranks": (10, 2, False)}
"""Kills, ranks, and whether saves are asynchronous."""
DAMAGED = 24


def every_case() -> list[Case]:
    """The table of bad inputs."""
    return [case for module in (settings, data, hostile, tools) for case in module.cases()]


def side_by_side(work: Callable[..., T], items: Iterable[Any], what: str, workers: int) -> list[T]:
    """Results of `work` on each item, in order, with a progress bar."""
    items = list(items)
    with ThreadPoolExecutor(workers) as pool:
        return list(tqdm(pool.map(work, items), total=len(items), desc=what, disable=None, leave=False))


def inputs(workshop: Workshop, name: str, workers: int) -> list[dict[str, Any]]:
    chosen = [(number, case) for number, case in enumerate(every_case()) if name in case.name]
    before = fingerprint(workshop.folder)
    verdicts = side_by_side(lambda pair: workshop.check(pair[1], pair[0]), chosen, "inputs", workers)
    after = fingerprint(workshop.folder)
    changed = [name for name, found in before.items() if after.get(name) != found]
    rows: list[dict[str, Any]] = [
        {"name": "what no case may touch", "wrong": tuple(f"lost data: {name}" for name in changed)}
    ]
    return rows + [
        {"name": v.case.name, "command": v.command, "seconds": round(v.seconds, 2), "wrong": v.wrong,
         "said": (v.done.stderr or v.done.stdout).strip()[-300:]}
        for v in verdicts
    ]  # fmt: skip


def all_kills(folder: Path, workers: int) -> list[dict[str, Any]]:
    """Runs that are killed once each, at start-up, in training, while saving or in the export, and resumed."""
    found: list[dict[str, Any]] = []
    for what, (count, ranks, asynchronous) in KILLS.items():
        training = kills.Training(folder / what.replace(" ", "_"), ranks=ranks, asynchronous=asynchronous)
        training.folder.mkdir(parents=True)
        whole = kills.train_undisturbed(training)
        aims = list(zip(range(count), kills.aims(random.Random(0)), strict=False))

        def one(
            pair: tuple[int, str], training: kills.Training = training, whole: kills.Undisturbed = whole
        ) -> kills.Outcome:
            number, aim = pair
            return kills.kill_and_resume(training, f"run-{number}", whole, [aim], random.Random(number))

        outcomes = side_by_side(one, aims, f"kills, {what}", max(1, workers // ranks))
        for (number, aim), outcome in zip(aims, outcomes, strict=True):
            fell = outcome.kills[0] if outcome.kills else None
            found.append(
                {"name": f"{what} {number}, at {fell.where if fell else aim}", "wrong": tuple(outcome.wrong),
                 "steps_lost": fell.lost if fell else None}
            )  # fmt: skip
    return found


def _rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    return [
        {"name": o.name, "seconds": round(o.seconds, 2), "wrong": o.wrong, "said": o.said.strip()[-600:]}
        for o in outcomes
    ]


def kind_of(wrong: str) -> str:
    """The kind of fault: "status 1, not 2" is a wrong status."""
    return wrong.split(":")[0] if ":" in wrong[:20] else "status" if wrong.startswith("status") else wrong[:40]


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    lines = [f"{'':<10}{'tried':>7}{'wrong':>7}   how"]
    for section, rows in results.items():
        counts = Counter(kind_of(wrong) for row in rows for wrong in row["wrong"])
        bad = sum(bool(row["wrong"]) for row in rows)
        how = ", ".join(f"{kind} {count}" for kind, count in counts.most_common())
        lines.append(f"{section:<10}{len(rows):>7}{bad:>7}   {how or '–'}")
    return "\n".join(lines)


@command
def main(arguments: list[str] | None = None) -> int:
    parser = new_parser("python -m benchmarks.faults", __doc__)
    parser.add_argument("--only", choices=SECTIONS, nargs="+", default=SECTIONS, help="sections to run (default: all)")
    parser.add_argument("--name", default="", metavar="WORDS", help="only bad inputs with these words in their names")
    parser.add_argument("--workers", type=positive, default=2, help="side by side (%(default)s)")
    add_json_option(parser, "every case and its message")
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    begin = time.perf_counter()
    results: dict[str, list[dict[str, Any]]] = {}
    skipped = ""
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        workshop = Workshop(Path(temporary) / "workshop")
        workshop.build()
        if "inputs" in options.only:
            results["inputs"] = inputs(workshop, options.name, options.workers)
        if "kills" in options.only:
            results["kills"] = all_kills(Path(temporary) / "kills", options.workers)
        if {"damage", "disks", "stops"} & set(options.only):
            runs = Runs(workshop)
            if "damage" in options.only:
                results["damage"] = _rows(side_by_side(runs.damaged, range(DAMAGED), "damage", options.workers))
            if "disks" in options.only:
                if can_mount(Path(temporary)):
                    results["disks"] = _rows(side_by_side(runs.full, DISKS, "disks", options.workers))
                else:
                    skipped = f"; {len(DISKS)} full disks left out: this user may not mount a tmpfs"
            if "stops" in options.only:
                results["stops"] = _rows(side_by_side(runs.stopped, (False, True), "stops", 1))
    seconds = time.perf_counter() - begin
    for section, rows in results.items():
        for row in rows:
            if row["wrong"]:
                print(f"{section}: {row['name']}: {'; '.join(row['wrong'])}\n    {row.get('said', '')}\n")
    print(table(results))
    print(f"{seconds / 60:.1f} minutes{skipped}")
    figures = {"seconds": seconds, "sections": results, "skipped": skipped.removeprefix("; ")}
    write_json(options.json, figures)
    return int(any(row["wrong"] for rows in results.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
