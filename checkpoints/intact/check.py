"""Checks whether a checkpoint is complete and undamaged."""

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

from farsight.checkpoints.cards.model import CONFIG
from farsight.checkpoints.checksums import MANIFEST, Manifest, altered, read_manifest
from farsight.checkpoints.dcp import COMPLETE, read_metadata
from farsight.errors import ConfigError


def is_complete(checkpoint: Path) -> bool:
    """Whether the save of a checkpoint folder was completed.

    Raises:
        OSError: the folder can't be read now.
    """
    return _size(checkpoint / COMPLETE) is not None


def faults(checkpoint: Path, verify: bool = True) -> list[str]:
    """Lists the damage in a checkpoint folder, one line per file or block; empty if it is intact.

    Args:
        verify: read every byte and compare checksums, if the checkpoint has them; otherwise check sizes.

    Raises:
        OSError, MemoryError: a file can't be read now, which does not mean that it is damaged.
    """
    found, manifest = look(checkpoint, verify)
    if found or manifest is None or not verify:
        return found
    return altered(checkpoint, manifest)


def every_fault(checkpoint: Path) -> list[str]:
    """`faults`, which also compares the CRC-32 of the tensors in a checkpoint without checksums."""
    found, manifest = look(checkpoint)
    if found:
        return found
    return altered(checkpoint, manifest) if manifest is not None else _altered_pieces(checkpoint)


def refuse_damaged(checkpoint: Path, verify: bool = True) -> None:
    """Raises `ConfigError` unless a folder is an intact checkpoint, and says so if it is a model directory or a run folder."""
    if not is_complete(checkpoint):
        if (checkpoint / "config.json").is_file():
            raise ConfigError(f"{checkpoint} is a model directory already, not a checkpoint folder (step-N).")
        within = [path for above in ("", "*/", "*/*/") for path in checkpoint.glob(f"{above}step-*/{COMPLETE}")]
        if newest := max(within, key=lambda path: path.stat().st_mtime, default=None):
            raise ConfigError(f"{checkpoint} is a run folder, not a checkpoint. Did you mean {newest.parent}?")
    if found := faults(checkpoint, verify):
        raise ConfigError(f"{checkpoint} is not an intact checkpoint folder (step-N): {'; '.join(found)}.")


def look(checkpoint: Path, verify: bool = True) -> tuple[list[str], Manifest | None]:
    """Checks what can be checked without reading the large files.

    Args:
        verify: compare the small files with their checksums.

    Returns:
        The faults, and the checksums, or None if the checkpoint has none.
    """
    if not checkpoint.is_dir():
        return ["there is no such folder"], None
    if not is_complete(checkpoint):
        return [f"{COMPLETE} is missing: the save was interrupted, or the file was lost"], None
    try:
        manifest = read_manifest(checkpoint)
    except FileNotFoundError:
        manifest = None
    except ConfigError as error:
        return [str(error)], None
    if manifest is not None:
        found = other_sizes(checkpoint, {name: sums.bytes for name, sums in manifest.files.items()})
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
        found += other_sizes(checkpoint, sizes)
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


def other_sizes(checkpoint: Path, sizes: dict[str, int]) -> list[str]:
    """Describes the files of a checkpoint that are missing or not as long as they should be, one line each.

    Args:
        sizes: expected bytes by name.

    Raises:
        OSError: a file can't be opened now.
    """
    found = []
    for name, expected in sorted(sizes.items()):
        if (size := _size(checkpoint / name)) is None:
            found.append(f"{name} is missing ({expected:,} bytes expected)")
        elif size != expected:
            found.append(f"{name} has {size:,} bytes, {expected:,} expected")
    return found


def _size(path: Path) -> int | None:
    """Bytes, or None if there is no such file. The file is opened because NFS may answer `stat` from a stale cache."""
    try:
        with path.open("rb") as file:
            return file.seek(0, os.SEEK_END)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def _pieces(checkpoint: Path) -> dict[str, list[tuple[int, int, str]]]:
    """By file: offset and length in bytes of each piece in it, and the name of the object it belongs to."""
    files: dict[str, list[tuple[int, int, str]]] = {}
    for index, place in read_metadata(checkpoint).storage_data.items():
        files.setdefault(place.relative_path, []).append((place.offset, place.length, index.fqn))
    return files


def _altered_pieces(checkpoint: Path) -> list[str]:
    """Pieces whose CRC-32 is wrong. Each piece is a zip archive, and `torch.load` does not check it."""
    found = []
    for name, places in sorted(_pieces(checkpoint).items()):
        with (checkpoint / name).open("rb") as file:
            for offset, length, tensor in sorted(places):
                file.seek(offset)
                try:
                    with zipfile.ZipFile(io.BytesIO(file.read(length))) as archive:
                        same = archive.testzip() is None
                except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, ValueError):
                    same = False  # zipfile's errors for altered headers
                if not same:
                    found.append(f"{name} was altered between bytes {offset:,} and {offset + length:,}, in {tensor}")
    return found
