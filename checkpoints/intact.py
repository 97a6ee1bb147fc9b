"""Whether a checkpoint is whole: every file there, at its size, with the bytes that were saved.

    farsight intact runs/my_run/checkpoint/step-1000 [MORE …]

Every file is compared with its checksums in `checksums.json`. A checkpoint without them, saved by an earlier version, is
looked at by sizes when a run starts from it; this command compares the CRC-32 of its tensors too.
"""

import argparse
import io
import json
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

from farsight.checkpoints.cards.model import CONFIG
from farsight.checkpoints.checksums import MANIFEST, Manifest, altered, read_manifest
from farsight.checkpoints.dcp import COMPLETE, read_metadata
from farsight.cli import command
from farsight.configs.load import ConfigError


def is_complete(checkpoint: Path) -> bool:
    """Whether a folder's save came to its end.

    Raises:
        OSError: that can't be told now.
    """
    return _size(checkpoint / COMPLETE) is not None


def faults(checkpoint: Path, verify: bool = True) -> list[str]:
    """Lists the damage in a checkpoint folder, one line per file or block; empty if it is intact.

    Args:
        verify: read every byte and compare checksums, where the checkpoint has them; else look at sizes.

    Raises:
        OSError, MemoryError: a file can't be read now, which says nothing about what is in it.
    """
    found, manifest = look(checkpoint, verify)
    if found or manifest is None or not verify:
        return found
    return altered(checkpoint, manifest)


def refuse_damaged(checkpoint: Path, verify: bool = True) -> None:
    """Raises `ConfigError` unless a folder is a whole checkpoint."""
    if found := faults(checkpoint, verify):
        raise ConfigError(f"{checkpoint} is not an intact checkpoint folder (step-N): {'; '.join(found)}.")


def look(checkpoint: Path, verify: bool = True) -> tuple[list[str], Manifest | None]:
    """Checks everything that can be checked without reading the large files.

    Args:
        verify: compare the small ones with their checksums.

    Returns:
        The faults, and the checksums; None where the checkpoint has none.
    """
    if not is_complete(checkpoint):
        return [f"{COMPLETE} is missing: the save was interrupted, or the file was lost"], None
    try:
        manifest = read_manifest(checkpoint)
    except FileNotFoundError:
        manifest = None
    except ConfigError as error:
        return [str(error)], None
    if manifest is not None:
        found = _other_sizes(checkpoint, {name: sums.bytes for name, sums in manifest.files.items()})
        if verify and not found:
            found = altered(checkpoint, manifest, only=lambda name: not name.endswith(".distcp"))
        if found:
            return found, manifest
    found = _config_faults(checkpoint, manifest)
    try:
        pieces = _pieces(checkpoint)
    except ConfigError as error:
        return [*found, f"{COMPLETE} can't be read ({error})"], manifest
    if manifest is None:
        # Pieces follow each other without gaps, and nothing follows the last.
        sizes = {name: max(offset + length for offset, length, _ in places) for name, places in pieces.items()}
        found += _other_sizes(checkpoint, sizes)
    else:
        missing = {CONFIG, COMPLETE, *pieces} - manifest.files.keys()
        found += [f"{MANIFEST} has no checksums of {name}" for name in sorted(missing)]
    return found, manifest


def _config_faults(checkpoint: Path, manifest: Manifest | None) -> list[str]:
    try:
        values: Any = json.loads((checkpoint / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return [f"{CONFIG} is missing"]
    except (ValueError, RecursionError) as error:
        return [f"{CONFIG} can't be read ({error})"]
    if not isinstance(values, dict) or not isinstance(values.get("model"), dict):
        return [f"{CONFIG} can't be read (it holds no model's config)"]
    return [f"{MANIFEST} is missing"] if manifest is None and "checksums" in values else []


def _other_sizes(checkpoint: Path, sizes: dict[str, int]) -> list[str]:
    found = []
    for name, expected in sorted(sizes.items()):
        if (size := _size(checkpoint / name)) is None:
            found.append(f"{name} is missing ({expected:,} bytes expected)")
        elif size != expected:
            found.append(f"{name} has {size:,} bytes, {expected:,} expected")
    return found


def _size(path: Path) -> int | None:
    """Bytes; None where there is no such file. NFS asks the server when a file is opened, and may not for `stat`."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def _pieces(checkpoint: Path) -> dict[str, list[tuple[int, int, str]]]:
    """File → offset and length in bytes of each piece in it, and the name of what it is a piece of."""
    files: dict[str, list[tuple[int, int, str]]] = {}
    for index, place in read_metadata(checkpoint).storage_data.items():
        files.setdefault(place.relative_path, []).append((place.offset, place.length, index.fqn))
    return files


def _altered_pieces(checkpoint: Path) -> list[str]:
    """Pieces whose CRC-32 differ. Each piece is a zip archive, and `torch.load` does not compare them."""
    found = []
    for name, places in sorted(_pieces(checkpoint).items()):
        with (checkpoint / name).open("rb") as file:
            for offset, length, tensor in sorted(places):
                file.seek(offset)
                try:
                    with zipfile.ZipFile(io.BytesIO(file.read(length))) as archive:
                        same = archive.testzip() is None
                except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, ValueError):
                    same = False  # what zipfile says of altered headers
                if not same:
                    found.append(f"{name} was altered between bytes {offset:,} and {offset + length:,}, in {tensor}")
    return found


@command
def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="farsight intact", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", type=Path, nargs="+", help="step-N folders")
    damaged = False
    for checkpoint in parser.parse_args(arguments).checkpoints:
        if not checkpoint.is_dir():
            raise ConfigError(
                f"{checkpoint} is no folder; name a checkpoint's, such as runs/my_run/checkpoint/step-1000."
            )
        try:
            found, manifest = look(checkpoint)
            if not found:
                found = altered(checkpoint, manifest) if manifest is not None else _altered_pieces(checkpoint)
        except (OSError, MemoryError) as error:
            raise ConfigError(f"{checkpoint} can't be read ({error!r}).") from error
        damaged |= bool(found)
        for line in found or ["whole"]:
            print(f"{checkpoint}: {line}")
    return int(damaged)


if __name__ == "__main__":
    sys.exit(main())
