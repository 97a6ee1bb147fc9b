"""Checksums of a checkpoint's files, so that damage after the save is detected and named, not trained on.

`checksums.json` lists each file's size and the XXH3 (128 bits) of each of its blocks, so that threads and ranks can share the
reading, and a checksum of its own text. It protects against accidents, not against people who can write the files.
"""

import json
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import xxhash

from farsight.errors import ConfigError
from farsight.files import inside
from farsight.progress import progress
from farsight.stores import PART_BYTES, StorePath, sync_to_disk

logger = logging.getLogger("farsight")

MANIFEST = "checksums.json"
ALGORITHM = "xxh3_128"
BLOCK_BYTES = 64 * 2**20
"""Size of a checksummed block: the unit of work for a thread, and of a damage report."""
READ_BYTES = 2**20
"""Size of one read, small enough to be hashed in the CPU cache."""
SLOW_SECONDS = 3
"""Verification that takes longer logs its time."""


@dataclass
class FileSums:
    """A file's size in bytes, and the hexadecimal checksums of its blocks."""

    bytes: int = 0
    blocks: list[str] = field(default_factory=list)


@dataclass
class Manifest:
    """The checksums of a checkpoint's files, by relative path: the content of `checksums.json`."""

    files: dict[str, FileSums]
    block_bytes: int = BLOCK_BYTES

    def text(self) -> str:
        """The JSON text, with its own checksum."""
        body = {"algorithm": ALGORITHM, **asdict(self)}
        checksum = xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
        return json.dumps({"checksum": checksum, **body}, sort_keys=True, indent=1) + "\n"

    def blocks(self) -> list[tuple[str, int]]:
        """File and block number of every block."""
        return [(name, n) for name, sums in sorted(self.files.items()) for n in range(len(sums.blocks))]

    def range(self, name: str, number: int) -> tuple[int, int]:
        """Bytes [start, end) of a block in its file."""
        start = number * self.block_bytes
        return start, min(start + self.block_bytes, self.files[name].bytes)


class SummedFile:
    """Wraps a file that is written sequentially, and computes its checksums."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.sums = file, FileSums()
        self._block = xxhash.xxh3_128()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        while view:
            now = view[: BLOCK_BYTES - self.sums.bytes % BLOCK_BYTES]
            self._block.update(now)
            self.sums.bytes += len(now)
            if self.sums.bytes % BLOCK_BYTES == 0:
                self.sums.blocks.append(self._block.hexdigest())
                self._block.reset()
            view = view[len(now) :]
        return self.file.write(data)

    def close(self) -> None:
        if not self.file.closed and self.sums.bytes % BLOCK_BYTES:
            self.sums.blocks.append(self._block.hexdigest())
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def sums_of(path: Path) -> FileSums:
    """The checksums of an existing file."""
    size = path.stat().st_size
    manifest = Manifest({path.name: FileSums(size, [""] * -(-size // BLOCK_BYTES))}, BLOCK_BYTES)
    return FileSums(size, [_sum(path, *manifest.range(*block)) for block in manifest.blocks()])


def _sum(path: Path, start: int, end: int) -> str:
    """The checksum of bytes [start, end), or of those up to the end of the file."""
    most = PART_BYTES if isinstance(path, StorePath) else READ_BYTES
    found, buffer = xxhash.xxh3_128(), memoryview(bytearray(min(most, end - start)))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while start < end and (read := file.readinto(buffer[: end - start])):  # type: ignore[attr-defined]  # unbuffered
            found.update(buffer[:read])
            start += read
    return found.hexdigest()


def write_manifest(folder: Path, files: dict[str, FileSums]) -> None:
    """Writes `checksums.json` and syncs it to disk."""
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(Manifest(files, BLOCK_BYTES).text())
        sync_to_disk(file)


def read_manifest(folder: Path) -> Manifest:
    """Reads `checksums.json`.

    Raises:
        ConfigError: the file was altered.
        OSError: it is missing, or can't be read now.
    """
    with (folder / MANIFEST).open("rb") as file:
        data = file.read()
    try:
        values = json.loads(data)
        manifest = Manifest({n: FileSums(**sums) for n, sums in values["files"].items()}, values["block_bytes"])
        if manifest.text().encode() != data:
            raise ValueError("its own checksum differs")
        for name, sums in manifest.files.items():
            inside(folder, name, MANIFEST)
            if type(sums.bytes) is not int or len(sums.blocks) != -(-sums.bytes // manifest.block_bytes):
                raise ValueError(f"it has {len(sums.blocks)} checksums of {name}")
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, RecursionError) as error:
        raise ConfigError(f"{MANIFEST} was altered: {error or type(error).__name__}") from error
    return manifest


def fault(folder: Path, manifest: Manifest, name: str, number: int) -> list[str]:
    """Describes a block that differs from its checksum in one line; nothing if it doesn't.

    Raises:
        OSError, MemoryError: the file can't be read now.
    """
    start, end = manifest.range(name, number)
    same = _sum(folder / name, start, end) == manifest.files[name].blocks[number]
    return [] if same else [f"{name} was altered between bytes {start:,} and {end:,}"]


def drop_cached(path: Path) -> None:
    """Has the system forget what it holds of a file in memory, where it can, so that the next read comes from the disk."""
    if hasattr(os, "posix_fadvise") and not isinstance(path, StorePath):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def altered(
    folder: Path, manifest: Manifest, rank: int = 0, ranks: int = 1, only: Callable[[str], bool] = lambda name: True
) -> list[str]:
    """Describes the blocks that differ from their checksums, one line each; a rank checks its share of all blocks.

    Args:
        only: selects the files to read.

    Raises:
        OSError, MemoryError: a file can't be read now.
    """
    blocks = [block for block in manifest.blocks() if only(block[0])][rank::ranks]
    sizes = [end - start for start, end in (manifest.range(*block) for block in blocks)]
    total, begin, found = sum(sizes), time.perf_counter(), []
    bar = progress(total=total, unit="B", unit_scale=True, desc=f"verify {folder.name}", disable=rank != 0)
    with bar, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for size, lines in zip(sizes, pool.map(lambda block: fault(folder, manifest, *block), blocks), strict=True):
            found += lines
            bar.update(size)
    if rank == 0 and (seconds := time.perf_counter() - begin) > SLOW_SECONDS:
        of_all = total * ranks / 1e9
        logger.info(f"{folder}: {of_all:.1f} GB verified in {seconds:.0f} s ({of_all / seconds:.1f} GB/s)")
    return found
