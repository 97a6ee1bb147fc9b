"""Fingerprint and checksum of a base's weights: an adapter only fits the weights that it was trained with.

The fingerprint reads a few rows of each matrix and takes no time; the checksum reads every byte, which takes about as long as
loading. Adapters of earlier versions only have a fingerprint.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from farsight.checkpoints.model_dir.api import check_tensors, model_type, read_config
from farsight.checkpoints.model_dir.safetensors_files import Stored, TensorReader
from farsight.configs.typed import to_dict
from farsight.progress import progress

ROWS = 4
"""Rows sampled from each matrix, evenly spaced: any training changes all of them."""


def base_entry(directory: Path) -> dict[str, Any]:
    """An adapter's record of its base: path, model type, origin, positions, and the weights' fingerprint and checksum.

    Raises:
        ConfigError: not a model directory, or tensors that don't fit its config.
    """
    config = read_config(directory)
    files = check_tensors(directory, config)
    return {
        "path": str(directory.resolve()),
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
    """
    each: dict[str, str] = {}
    read = TensorReader(files)
    total = sum(path.stat().st_size for path in {stored.path for stored in files.values()})
    with progress(total=total, unit="B", unit_scale=True, desc="checksum of the base") as bar:
        for name in sorted(files, key=files.__getitem__):
            tensor = read(name)
            digest = xxhash.xxh3_128(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(_raw(tensor))
            each[name] = digest.hexdigest()
            bar.update(tensor.nbytes)
    read.close()
    return xxhash.xxh3_128("".join(each[name] for name in sorted(each)).encode()).hexdigest()


def _raw(tensor: Tensor) -> memoryview:
    """A tensor's bytes."""
    return tensor.contiguous().view(torch.uint8).numpy().data
