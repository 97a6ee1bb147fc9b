"""Fingerprint and checksum of a base's weights: an adapter only fits the weights that it was trained with.

The fingerprint reads a few rows of each matrix and takes no time; the checksum reads every byte, in threads, at the speed of the disk.
It is not kept between runs: whoever needs it loads the base anyway, and a file can change without another size or time.
Adapters and checkpoints of earlier versions only have a fingerprint.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from farsight.checkpoints.model_dir.api import check_tensors, model_type, read_config
from farsight.checkpoints.model_dir.safetensors_files import DTYPES, Stored, TensorReader
from farsight.configs.typed import to_dict
from farsight.errors import ConfigError
from farsight.progress import progress
from farsight.remote import shown

ROWS = 4
"""Rows sampled from each matrix, evenly spaced: any training changes all of them."""
_THREADS, _BLOCK = 8, 1 << 20
"""Threads that read and hash, and the bytes that each takes at a time, which stay in its cache."""


def base_entry(directory: Path) -> dict[str, Any]:
    """An adapter's record of its base: path, model type, origin, positions, and the weights' fingerprint and checksum.

    Raises:
        ConfigError: not a model directory, or tensors that don't fit its config.
    """
    config = read_config(directory)
    files = check_tensors(directory, config)
    return {
        "path": shown(directory.resolve()),
        "position": to_dict(config.position),
        "family": config.family,
        "model_type": model_type(directory),
        "fingerprint": fingerprint(files),
        "checksum": checksum(files),
    }


def fingerprint(files: Mapping[str, Stored]) -> str:
    """A hash of the tensors' names, dtypes, shapes and some rows, independent of their division into files.

    A few MB are read of a model of 8 B parameters.

    Args:
        files: from `check_tensors`.
    """
    each: dict[str, str] = {}
    read = TensorReader(files)
    for name in sorted(files, key=files.__getitem__):
        part = read.part(name)
        digest = hashlib.blake2b(f"{name} {part.dtype} {list(part.shape)}".encode(), digest_size=16)
        rows = torch.linspace(0, part.shape[0] - 1, ROWS).long().tolist() if len(part.shape) == 2 else []
        for values in [part[slice(row, row + 1), slice(None)] for row in rows] or [part.whole()]:
            digest.update(_raw(values))
        each[name] = digest.hexdigest()
    read.close()
    return hashlib.blake2b("".join(each[name] for name in sorted(each)).encode(), digest_size=16).hexdigest()


def checksum(files: Mapping[str, Stored]) -> str:
    """A hash of the tensors' names, dtypes, shapes and all bytes, independent of their division into files.

    Args:
        files: from `check_tensors`.

    Raises:
        ConfigError: a file that is shorter than its header says.
    """
    headers = {path: _header(path) for path in {stored.path for stored in files.values()}}
    total = sum(path.stat().st_size for path in headers)
    with (
        progress(total=total, unit="B", unit_scale=True, desc="checksum of the base") as bar,
        ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads,
    ):

        def of_tensor(name: str) -> str:
            stored = files[name]
            path, (start, header) = stored.path, headers[stored.path]
            entry = header[stored.key]
            dtype = next(dtype for dtype, kept in DTYPES.items() if kept == entry["dtype"])
            (begin, end), (rows, *columns) = entry["data_offsets"], entry["shape"]
            first, last = stored.rows or (0, rows)
            of_row = (end - begin) // rows
            begin, end = begin + first * of_row, begin + last * of_row
            digest = xxhash.xxh3_128(f"{name} {dtype} {(last - first, *columns)}".encode())
            with path.open("rb", buffering=0) as file:
                file.seek(start + begin)
                block = memoryview(bytearray(min(_BLOCK, end - begin)))
                while begin < end:
                    if not (count := file.readinto(block[: end - begin])):
                        raise ConfigError(f"{path} is damaged: it ends within {stored.key}. Copy it again.")
                    digest.update(block[:count])
                    begin += count
                    bar.update(count)
            return digest.hexdigest()

        each = threads.map(of_tensor, sorted(files))
        return xxhash.xxh3_128("".join(each).encode()).hexdigest()


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """The byte at which the tensors of a safetensors file begin, and the header's entry of each by its name in the file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return 8 + size, json.loads(file.read(size))


def _raw(tensor: Tensor) -> memoryview:
    """A tensor's bytes."""
    return tensor.contiguous().view(torch.uint8).numpy().data
