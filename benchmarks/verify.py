"""Speed of verifying a checkpoint's checksums, compared with loading it, and of saving with and without checksums.

    python -m benchmarks.verify [--gb 4] [--json F]

A checkpoint of random fp32 matrices is saved and loaded, alternating with and without checksums, from the page cache and
from the disk. Before that, a flipped byte has to be found and named, and loading has to give back the saved bytes.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from tqdm import tqdm

from farsight.checkpoints.cards.model import CONFIG
from farsight.checkpoints.checksums import MANIFEST
from farsight.checkpoints.dcp import Writer, load
from farsight.checkpoints.intact.check import faults
from farsight.cli import above_zero, command, new_parser, positive
from farsight.configs.schema import Architecture, Position
from farsight.model.build import ModelConfig
from farsight.outputs import add_json_option, write_json

GB = 10**9
SIDE = 4096
"""Rows and columns of a matrix."""


def save(folder: Path, tensors: dict[str, torch.Tensor], checksums: bool) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    config = ModelConfig(Architecture(), Position(), trained_length=SIDE)
    config.save(folder / CONFIG, **({"checksums": MANIFEST} if checksums else {}))
    writer: Any = Writer(folder) if checksums else dcp.FileSystemWriter(folder)
    dcp.save(dict(tensors), storage_writer=writer, no_dist=True)


def forget(folder: Path) -> None:
    """Drops a folder's files from the page cache, so that the next reader reads from the disk."""
    os.sync()
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def check(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Raises unless loading gives back what was saved and a flipped byte is found."""
    found = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    load(found, folder)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert faults(folder) == []
    with (folder / "__0_0.distcp").open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        for value in (1, 0):
            file.seek(size * 2 // 3)
            byte = file.read(1)[0]
            file.seek(size * 2 // 3)
            file.write(bytes([byte ^ 1]))
            file.flush()
            assert bool(faults(folder)) == bool(value)


def measure(gb: float, rounds: int, folder: Path) -> dict[str, Any]:
    """Medians over `rounds`, in which all measurements alternate."""
    generator = torch.Generator().manual_seed(0)
    count = max(1, round(gb * GB / (4 * SIDE * SIDE)))
    tensors = {f"layers.{i}.weight": torch.randn(SIDE, SIDE, generator=generator) for i in range(count)}
    with_sums = folder / "step-1"
    save(with_sums, tensors, True)
    check(with_sums, tensors)
    state = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}

    def verified_load() -> None:
        assert not faults(with_sums)
        load(state, with_sums)

    work: dict[str, tuple[Path, Callable[[], Any]]] = {
        "verify": (with_sums, lambda: faults(with_sums)),
        "load": (with_sums, lambda: load(state, with_sums)),
        "verify and load": (with_sums, verified_load),
    }
    seconds: dict[tuple[str, str], list[float]] = {}
    # Into folders that nothing else reads: the page cache's state matters more than the checksums do.
    saves = [("save", folder / "step-2", False), ("save with checksums", folder / "step-3", True)]
    for _ in tqdm(range(rounds), unit="round", disable=not sys.stderr.isatty()):
        for what, (path, act) in work.items():
            for source in ("disk", "page cache"):
                if source == "disk":
                    forget(path)
                begin = time.perf_counter()
                act()
                seconds.setdefault((what, source), []).append(time.perf_counter() - begin)
        saves.reverse()
        for what, path, checksums in saves:
            os.sync()
            begin = time.perf_counter()
            save(path, tensors, checksums)
            seconds.setdefault((what, "disk"), []).append(time.perf_counter() - begin)
    size = sum(path.stat().st_size for path in with_sums.iterdir())
    rows = [
        {
            "what": what,
            "where": where,
            "seconds": statistics.median(taken),
            "gb_per_second": size / GB / statistics.median(taken),
            "spread": (max(taken) - min(taken)) / statistics.median(taken),
        }
        for (what, where), taken in seconds.items()
    ]
    return {"rows": rows, "bytes": size, "rounds": rounds, "cores": os.cpu_count(), "torch": torch.__version__}


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("python -m benchmarks.verify", __doc__)
    add = parser.add_argument
    add("--gb", type=above_zero, default=4.0, help="size of the checkpoint (default: 4)")
    add("--rounds", type=positive, default=5, help="runs of each (default: 5)")
    add("--folder", type=Path, help="work in a new folder in this one (default: the system's temporary)")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant here
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = measure(options.gb, options.rounds, Path(folder))
    print(f"{result['bytes'] / GB:.2f} GB, {result['cores']} cores, median of {result['rounds']}")
    print(f"{'':<22}{'':<12}{'seconds':>9}{'GB/s':>8}{'spread':>9}")
    for row in result["rows"]:
        print(
            f"{row['what']:<22}{row['where']:<12}{row['seconds']:>9.2f}{row['gb_per_second']:>8.2f}{row['spread']:>9.0%}"
        )
    write_json(options.json, result)


if __name__ == "__main__":
    main()
