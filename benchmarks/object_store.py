"""Counts the bytes and requests of a run whose checkpoints are on an object store, beside the same run on the disk.

    python -m benchmarks.object_store --json store.json

A model of a few million parameters trains, is resumed by the same command as on another machine, with nothing there, and trains on;
once on the disk and once on an S3-compatible server on this machine (moto), behind a proxy that counts. "disk" is what the start has
written on the disk, "up" and "down" the bytes of requests and answers without their headers. The losses of both runs and
their final weights have to be equal.
"""

import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from farsight.benchmarks.forked import Forked
from farsight.benchmarks.kills import CONFIG, rows, weights
from farsight.benchmarks.local_store import BUCKET, LocalStore, about
from farsight.cli import command, new_parser, positive
from farsight.outputs import add_json_option, write_json

EVERY = 2
"""Steps between saves."""


@dataclass(frozen=True)
class Row:
    """Bytes and requests of one kind of files in one start of the run."""

    start: str
    what: str
    disk: int
    up: int
    down: int
    requests: int


def measure(folder: Path, dim: int) -> list[Row]:
    """The table; `folder` is for the runs.

    Raises:
        SystemExit: a run fails, or the runs differ.
    """
    found = []
    config = folder / "run.toml"
    config.write_text(CONFIG, encoding="utf-8")
    with LocalStore() as store:
        for number, start in enumerate(("new", "resumed")):
            options = {"training.steps": 2 * EVERY * (number + 1)}
            begin = time.time()
            _train(config, folder, "disk", dim, options)
            disk = _written(folder / "disk", begin)
            store.forget()
            shutil.rmtree(folder / "store", ignore_errors=True)
            _train(config, folder, "store", dim, {**options, "job.store": f"s3://{BUCKET}/run"}, store)
            found += [
                Row(start, what, disk[what], store.up[what], store.down[what], store.requests[what])
                for what in store.requests
            ]
    if rows(folder / "disk") != rows(folder / "store") or weights(folder / "disk") != weights(folder / "store"):
        raise SystemExit("the run on the store differs from the one on the disk")
    return found


def _train(
    config: Path, folder: Path, name: str, dim: int, options: dict[str, Any], store: LocalStore | None = None
) -> None:
    options = {
        "job.config_file": config, "job.dump_folder": folder / name, "checkpoint.interval": EVERY, "architecture.dim": dim,
        "architecture.n_layers": 8, "architecture.head_dim": dim // 4, "architecture.ffn_dim": 4 * dim,
        "checkpoint.keep_latest_k": 0, "lr_scheduler.total_steps": 4 * EVERY, "training.local_batch_size": 2, **options,
    }  # fmt: skip
    arguments = [f"--{key}={value}" for key, value in options.items()]
    done = Forked(arguments, 1, folder / f"{name}.log", environment=store and store.environment).wait()
    if done.returncode:
        raise SystemExit(f"the run {name} ended with {done.returncode}:\n{done.stderr[-4000:]}")


def _written(folder: Path, begin: float) -> Counter[str]:
    """Bytes of the files written in a run folder since a moment, by what they are about."""
    sizes: Counter[str] = Counter()
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_mtime >= begin:
            sizes[about(f"/{path.relative_to(folder).as_posix()}")] += path.stat().st_size
    return sizes


def table(found: list[Row]) -> str:
    """The rows as Markdown."""
    lines = ["| start | what | MB on disk | MB up | MB down | requests |", "|---|---|---|---|---|---|"]
    for row in found:
        size = " | ".join(f"{amount / 1e6:.2f}" for amount in (row.disk, row.up, row.down))
        lines.append(f"| {row.start} | {row.what} | {size} | {row.requests} |")
    return "\n".join(lines)


@command
def main(arguments: list[str] | None = None) -> int:
    parser = new_parser("python -m benchmarks.object_store", __doc__)
    parser.add_argument("--dim", type=positive, default=256, help="width of the model, a multiple of 8 (default: 256)")
    add_json_option(parser, "the table")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        found = measure(Path(temporary), options.dim)
    print(table(found))
    if options.json:
        write_json(
            options.json,
            {"tool": "benchmarks.object_store", "dim": options.dim, "rows": [asdict(row) for row in found]},
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
