"""Captured queries and keys, in memory or in the files of farsight capture.

Shapes: T sampled tokens, t those of one part, H head dim.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from farsight.analysis.capture.heads import Head, key_rows
from farsight.analysis.capture.options import MANIFEST
from farsight.errors import ConfigError


class Samples:
    """The captured tokens of all heads.

    Args:
        heads: query heads.
        length: tokens per sequence.
        buckets: number of equal-width buckets per sequence.
        parts: mappings of "q" [heads, t, H], "k" [key heads, t, H], "position" [t] and "sequence" [t], or files with those
            tensors. Of files, a head's rows are read only when it is asked for.
        key_rows: the row of "k" for each head of `heads`.
    """

    def __init__(
        self,
        heads: Sequence[Head],
        length: int,
        buckets: int,
        parts: Sequence[Mapping[str, Tensor] | Path],
        key_rows: Sequence[int],
    ) -> None:
        self.heads, self.length, self.buckets = tuple(heads), length, buckets
        self._parts = [safe_open(part, "pt") if isinstance(part, Path) else part for part in parts]  # mapped, not read
        self._key_rows = key_rows
        self.positions_T = self._all("position").long()
        """Each token's position in its sequence, from 0."""
        self.sequences_T = self._all("sequence").long()
        """The index of each token's sequence."""

    def __len__(self) -> int:
        return len(self.heads)

    @property
    def buckets_T(self) -> Tensor:
        """Each token's bucket, int64 [T]."""
        return self.positions_T * self.buckets // self.length

    def queries(self, number: int) -> Tensor:
        """Queries of `heads[number]`, fp64 [T, H]."""
        return self._all("q", number).double()

    def keys(self, number: int) -> Tensor:
        """Keys of the key head that `heads[number]` uses, fp64 [T, H]."""
        return self._all("k", self._key_rows[number]).double()

    def _all(self, name: str, row: int | None = None) -> Tensor:
        return torch.cat([_read(part, name, row) for part in self._parts]).cpu()


def _read(part: Any, name: str, row: int | None) -> Tensor:
    if isinstance(part, Mapping):
        return part[name] if row is None else part[name][row]
    return part.get_tensor(name) if row is None else part.get_slice(name)[row]


def read_capture(folder: Path) -> Samples:
    """Opens what farsight capture wrote.

    Raises:
        ConfigError: not a capture, or one with files missing.
    """
    manifest = read_manifest(folder)
    files = [folder / name for name in manifest["files"]]
    absent = next((file for file in files if not file.is_file()), None)
    if absent is not None:
        raise ConfigError(f"{absent} is missing: capture again.")
    heads = [Head(**head) for head in manifest["heads"]]
    return Samples(heads, manifest["length"], manifest["buckets"], files, key_rows(heads))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads capture.json: the model's path, the settings, the heads.

    Raises:
        ConfigError: no such file, or not JSON.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ConfigError(f"{folder} holds no {MANIFEST}: name a folder that farsight capture wrote.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}): capture again.") from None
