"""Reads safetensors files, possibly written by others, and writes them one tensor at a time, refusing non-finite weights."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from farsight.checkpoints.model_dir.names import readable_name
from farsight.errors import ConfigError

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""Dtypes of weights, and their names in a file."""


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite; takes one pass and no copy."""
    return all(bool(bound.isfinite()) for bound in tensor.aminmax())


def refuse_non_finite(name: str, tensor: Tensor) -> None:
    """Refuses to save weights that training, or conversion to a smaller dtype, has made non-finite.

    Raises:
        ConfigError: naming the tensor.
    """
    if not is_finite(tensor):
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ConfigError(
            f"{readable_name(name)} has values that are infinite or not a number in {dtype}; such weights are not saved."
        )


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, order=True)
class Stored:
    """The place of a parameter in a model directory: a tensor, or some rows of one. In this order, each file is opened once."""

    path: Path
    key: str
    """The tensor's name in the file."""
    rows: tuple[int, int] | None = None
    """Begin and end of the parameter's rows, where several share the tensor; None is all of it."""

    def part(self, file: Any) -> "StoredPart":
        """The parameter in the opened file; nothing is read yet."""
        return StoredPart(file.get_slice(self.key), self.rows)


class StoredPart:
    """A parameter that is read row by row, or as a whole; like safetensors' slices."""

    def __init__(self, tensor: Any, rows: tuple[int, int] | None) -> None:
        self.tensor, whole = tensor, tensor.get_shape()
        self.begin, end = rows or (0, whole[0])
        self.shape = (end - self.begin, *whole[1:])
        self.dtype: str = tensor.get_dtype()

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """The values at some slices, one for each dimension."""
        first, *others = index
        begin, end, _ = first.indices(self.shape[0])
        return self.tensor[(slice(self.begin + begin, self.begin + end), *others)]

    def whole(self) -> Tensor:
        """All values."""
        return self[tuple(slice(None) for _ in self.shape)]


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """`safe_open` with errors that name the file. The header is checked against the file's size.

    Raises:
        ConfigError: no such file, or a damaged one.
    """
    with _naming(path), safe_open(path, framework="pt") as file:
        yield file


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, by their names in it.

    Raises:
        ConfigError: no such file, a damaged one, or a dtype that is not one of weights.
    """
    with opened(path) as file:
        for name in file.keys():  # noqa: SIM118  safe_open is not a dict
            kept_dtype(file, name, path)
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def kept_dtype(file: Any, name: str, path: Path) -> torch.dtype:
    """The stored dtype of a tensor.

    Raises:
        ConfigError: a dtype that our weights don't have, as in quantised models.
    """
    kept = file.get_slice(name).get_dtype()
    known = {name: dtype for dtype, name in DTYPES.items()}
    if kept not in known:
        raise ConfigError(f"{path} keeps {name} as {kept}; weights are read as {', '.join(known)}.")
    return known[kept]


class TensorReader:
    """Reads a model directory's tensors by our names, with one file open at a time.

    Args:
        files: from `check_tensors`.
    """

    def __init__(self, files: Mapping[str, Stored]) -> None:
        self.files = files
        self._path: Path | None = None
        self._file: Any = None

    def __call__(self, name: str) -> Tensor:
        return self.part(name).whole()

    def part(self, name: str) -> StoredPart:
        """A parameter of which only some rows are read."""
        stored = self.files[name]
        if stored.path != self._path:
            self.close()
            with _naming(stored.path):
                self._file = safe_open(stored.path, framework="pt").__enter__()
            self._path = stored.path
        return stored.part(self._file)

    def close(self) -> None:
        """Closes the open file, which releases the pages that were read."""
        if self._file is not None:
            self._file.__exit__(None, None, None)
        self._path = self._file = None


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise ConfigError(f"{path} is damaged ({path.stat().st_size:,} bytes): {error}. Copy it again.") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}.") from None


# ── Writing ───────────────────────────────────────────────────────────────────────────────────────────


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor], progress: Callable[[int], Any]
) -> None:
    """Writes one file, a tensor at a time: safetensors' own `save_file` needs them all at once.

    Args:
        tensors: shapes and dtypes, on the meta device, by their names in the file.
        read: returns the values of the tensor of that name.
        progress: called with the bytes of each tensor written.

    Raises:
        ConfigError: a value of another shape, or weights that are not finite in their dtype.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end],
        }  # fmt: skip
    encoded = json.dumps(header).encode("utf-8")
    encoded += b" " * (-len(encoded) % 8)  # the format requires aligned data
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, tensor in tensors.items():
            value = read(name).detach().to(device="cpu", dtype=tensor.dtype).contiguous()
            if value.shape != tensor.shape:
                raise ConfigError(f"{name} has shape {tuple(value.shape)}, expected {tuple(tensor.shape)}.")
            refuse_non_finite(name, value)
            file.write(value.reshape(-1).view(torch.uint8).numpy().data)
            progress(value.nbytes)
