"""Whether a checkpoint is whole: each file there, at the size that the checkpoint's own metadata gives it.

    python -m checkpoints.intact runs/my_run/checkpoint/step-1000 [MORE …]

A run looks at sizes alone, which takes no time. This command also reads every byte and compares checksums.
"""

import argparse
import io
import json
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader
from tqdm import tqdm

from checkpoints.card import CONFIG

COMPLETE = ".metadata"
"""DCP writes this file last: a step folder without it was interrupted."""


def is_complete(checkpoint: Path) -> bool:
    """Whether a folder's save came to its end.

    Raises:
        OSError: that can't be told now.
    """
    return _size(checkpoint / COMPLETE) is not None


def faults(checkpoint: Path, progress: Callable[[int], Any] | None = None) -> list[str]:
    """What is wrong with a checkpoint folder, a line a file; nothing where it is whole.

    Args:
        progress: with it, every byte is read and compared with its checksum; called with bytes done.

    Raises:
        OSError, MemoryError: a file can't be read now, which says nothing about what is in it.
    """
    if not is_complete(checkpoint):
        return [f"{COMPLETE} is missing: the save was interrupted, or the file was lost"]
    found = []
    try:
        json.loads((checkpoint / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        found.append(f"{CONFIG} is missing")
    except ValueError as error:
        found.append(f"{CONFIG} can't be read ({error})")
    try:
        pieces = _pieces(checkpoint)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a pickle that was cut short or altered may raise anything
        return [*found, f"{COMPLETE} can't be read ({type(error).__name__}: {error})"]
    for name, places in sorted(pieces.items()):
        # Pieces follow each other without gaps, and nothing follows the last.
        path, expected = checkpoint / name, max(offset + length for offset, length, _ in places)
        if (size := _size(path)) is None:
            found.append(f"{name} is missing ({expected:,} bytes expected)")
        elif size != expected:
            found.append(f"{name} has {size:,} bytes, {expected:,} expected")
        elif progress is not None:
            found += _altered(path, places, progress)
    return found


def _size(path: Path) -> int | None:
    """Bytes; None where there is no such file. NFS asks the server when a file is opened, and may not for `stat`."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def _pieces(checkpoint: Path) -> dict[str, list[tuple[int, int, str]]]:
    """File → offset and length in bytes of each piece in it, and the name of what it is a piece of."""
    files: dict[str, list[tuple[int, int, str]]] = {}
    for index, place in FileSystemReader(checkpoint).read_metadata().storage_data.items():
        files.setdefault(place.relative_path, []).append((place.offset, place.length, index.fqn))
    return files


def _altered(path: Path, places: list[tuple[int, int, str]], progress: Callable[[int], Any]) -> list[str]:
    """Pieces whose checksums differ. Each is a zip archive with CRC-32s, which `torch.load` does not compare."""
    found = []
    with path.open("rb") as file:
        for offset, length, tensor in sorted(places):
            file.seek(offset)
            try:
                with zipfile.ZipFile(io.BytesIO(file.read(length))) as archive:
                    same = archive.testzip() is None
            except (zipfile.BadZipFile, NotImplementedError, EOFError):  # what zipfile says of altered headers
                same = False
            if not same:
                found.append(f"{path.name} was altered between bytes {offset:,} and {offset + length:,}, in {tensor}")
            progress(length)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m checkpoints.intact", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", type=Path, nargs="+", help="step-N folders")
    damaged = False
    for checkpoint in parser.parse_args(arguments).checkpoints:
        total = sum(path.stat().st_size for path in checkpoint.glob("*.distcp"))
        with tqdm(total=total, unit="B", unit_scale=True, desc=checkpoint.name, disable=None, leave=False) as bar:
            try:
                found = faults(checkpoint, bar.update)
            except (OSError, MemoryError) as error:
                sys.exit(f"{checkpoint} can't be read ({error!r}).")
        damaged |= bool(found)
        for line in found or ["whole"]:
            print(f"{checkpoint}: {line}")
    return int(damaged)


if __name__ == "__main__":
    sys.exit(main())
