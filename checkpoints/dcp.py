"""Reads and writes torch's distributed checkpoints (DCP) without running code from them.

DCP stores `.metadata` and single objects as pickles and unpickles them without restrictions, so a checkpoint from elsewhere
could run arbitrary code. Farsight opens every checkpoint with `load` or `read_metadata`, which build only plain values and
DCP's own classes, and writes it with `Writer`, which records checksums. `.metadata` is the last file of a save.
"""

import gc
import os
import pickle
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION,
    FileSystem,
    _FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from farsight.checkpoints.cards.model import CONFIG
from farsight.checkpoints.checksums import MANIFEST, FileSums, SummedFile, sums_of, write_manifest
from farsight.errors import ConfigError, UserError
from farsight.files import inside
from farsight.stores import StorePath, sync_to_disk

COMPLETE = ".metadata"
"""The last file of a save: a step folder without it was interrupted."""
UNFINISHED = f"{COMPLETE}.tmp"
"""Name of the same file until all others are on disk."""

# ── .metadata ─────────────────────────────────────────────────────────────────────────────────────────


class _Record:
    """An unpickled object: its state, without its class's code. `__setstate__` keeps pickles from setting attributes, also on
    classes."""

    state: Any

    def __new__(cls, *arguments: Any) -> "_Record":
        record = super().__new__(cls)
        record.state = {}
        return record

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _records(module: str, *names: str) -> dict[tuple[str, str], type]:
    return {(module, name): type(name, (_Record,), {}) for name in names}


_KNOWN = {
    **_records(
        "torch.distributed.checkpoint.metadata", "Metadata", "MetadataIndex", "TensorStorageMetadata",
        "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    **_records("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    **_records("torch.serialization", "_get_layout"),
    # The folder in which a checkpoint was saved.
    **_records("pathlib", "PosixPath", "WindowsPath"), **_records("pathlib._local", "PosixPath", "WindowsPath"),
}  # fmt: skip
"""The classes allowed in `.metadata`, besides `torch.Size` and dtypes."""


def _enum_member(kind: Any, name: Any) -> _Record:
    """Stands in for `getattr`, which Python 3.11.0 to 3.11.3 uses to pickle enum members; refuses every other use."""
    if kind is not _KNOWN["torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"]:
        raise pickle.UnpicklingError(f"it asks for builtins.getattr, {_ANY_CODE}")
    return kind()


_ANY_CODE = "which no checkpoint needs and which could run arbitrary code"


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        value = vars(torch).get(name) if module == "torch" else None
        if value is torch.Size or isinstance(value, torch.dtype):
            return value
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, {_ANY_CODE}")
        return _KNOWN[module, name]


def read_metadata(checkpoint: Path) -> Metadata:
    """Reads `.metadata`: name, shape and dtype of everything in a checkpoint, and where its parts are stored.

    Raises:
        ConfigError: it is damaged, or asks for something that no checkpoint needs; none of its code was run.
        OSError: it is missing, or can't be opened now.
    """
    path = checkpoint / COMPLETE
    with path.open("rb") as file:
        data = file.read()
    collects = gc.isenabled()
    gc.disable()  # it would traverse half a million parts again and again
    try:
        return _rebuilt(_Unpickler(BytesIO(data)).load(), checkpoint)
    except MemoryError:
        raise
    except Exception as error:  # a truncated or altered pickle may raise anything
        raise ConfigError(
            f"{path} is not a checkpoint's table of contents: {error or type(error).__name__}."
        ) from error
    finally:
        if collects:
            gc.enable()


def _rebuilt(record: Any, checkpoint: Path) -> Metadata:
    """DCP's metadata object, rebuilt from checked values."""
    whole = _state(record, "Metadata")
    contents: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, entry in whole["state_dict_metadata"].items():
        if type(entry).__name__ == "BytesStorageMetadata":
            contents[name] = BytesStorageMetadata()
            continue
        fields = _state(entry, "TensorStorageMetadata")
        size, dtype = fields["size"], _state(fields["properties"], "TensorProperties")[0]
        chunks = [_chunk(_state(chunk, "ChunkStorageMetadata"), size) for chunk in fields["chunks"]]
        _check(isinstance(name, str) and isinstance(dtype, torch.dtype), name)
        contents[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)
    places: dict[MetadataIndex, _StorageInfo] = {}
    files: set[str] = set()
    for key, entry in whole["storage_data"].items():
        index, place = _state(key, "MetadataIndex"), _state(entry, "_StorageInfo")
        path, offset, length = place["relative_path"], place["offset"], place["length"]
        _check(type(offset) is int and type(length) is int and offset >= 0 and length >= 0, index.get("fqn"))
        _check(index["fqn"] in contents and not place.get("transform_descriptors"), index.get("fqn"))
        if path not in files:
            inside(checkpoint, path, COMPLETE)
            files.add(path)
        places[MetadataIndex(index["fqn"], index.get("offset"), index.get("index"))] = _StorageInfo(
            path, offset, length
        )
    return Metadata(contents, storage_data=places, storage_meta=StorageMeta())


def _state(record: Any, name: str) -> Any:
    if not isinstance(record, _Record) or type(record).__name__ != name:
        raise ValueError(f"{record!r} stands where a {name} is expected")
    return record.state


def _chunk(fields: Any, size: torch.Size) -> ChunkStorageMetadata:
    offsets, sizes = fields["offsets"], fields["sizes"]
    whole = isinstance(size, torch.Size) and isinstance(offsets, torch.Size) and isinstance(sizes, torch.Size)
    _check(
        whole and all(o >= 0 and n >= 0 and o + n <= most for o, n, most in zip(offsets, sizes, size, strict=True)),
        f"a part of size {sizes} at {offsets} of {size}",
    )
    return ChunkStorageMetadata(offsets, sizes)


def _check(sane: bool, what: Any) -> None:
    if not sane:
        raise ValueError(f"its entry for {what} is impossible")


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────────


REQUEST_BYTES = 8 * 2**20
"""Neighbouring pieces up to this size together are read from a store by one request."""
GAP_BYTES = 2**16
"""Bytes between two pieces that are rather read too than left out by another request."""


@dataclass
class _Request:
    """Bytes [begin, end) of a file."""

    name: str
    begin: int
    end: int


class Reader(dcp.FileSystemReader):
    """Reads a checkpoint folder. It can be used for several loads, and reads `.metadata` once."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint)
        self.folder, self.place = checkpoint, ""
        self.metadata: Metadata | None = None
        self.error: Exception | None = None
        self.requests: dict[tuple[str, int], _Request] = {}
        """The request that brings each piece, by file and offset; on a store."""
        self.held: _Request | None = None
        self.data = b""

    def read_metadata(self) -> Metadata:  # type: ignore[override]  # without `rank`, DCP looks for no other file
        # DCP would log an exception raised here with its traceback, and raise another one.
        try:
            self.metadata = self.metadata or read_metadata(self.folder)
        except (UserError, OSError) as error:
            self.error = error
        return self.metadata or Metadata({}, storage_data={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self.error is not None:
            raise self.error
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if isinstance(self.folder, StorePath):
            plan = self._in_requests(plan)
        try:
            return super().read_data(plan, planner)
        except (OSError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # from torch.load: the file may hold anything
            wanted = re.search(r"GLOBAL (\S+)", str(error))
            what = f"asks for {wanted[1]}, which could run arbitrary code" if wanted else f"can't be read ({error})"
            raise ConfigError(f"{self.folder}: {self.place} {what}. None of its code was run.") from error

    def _in_requests(self, plan: LoadPlan) -> LoadPlan:
        """The plan in the order of the files, with neighbouring pieces put into one request to the store."""
        places = [self.storage_data[item.storage_index] for item in plan.items]
        order = sorted(range(len(places)), key=lambda number: (places[number].relative_path, places[number].offset))
        self.requests = {}
        request = _Request("", 0, 0)
        for place in (places[number] for number in order):
            end = place.offset + place.length
            fits = end - request.begin <= REQUEST_BYTES and place.offset - request.end <= GAP_BYTES
            if place.relative_path != request.name or not fits:
                request = _Request(place.relative_path, place.offset, end)
            request.end = max(request.end, end)
            self.requests[place.relative_path, place.offset] = request
        return replace(plan, items=[plan.items[number] for number in order])

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> Any:
        self.place = f"{sinfo.relative_path}, bytes {sinfo.offset:,} to {sinfo.offset + sinfo.length:,},"
        if not isinstance(self.folder, StorePath):
            return super()._slice_file(file, sinfo)
        request = self.requests[sinfo.relative_path, sinfo.offset]
        if self.held is not request:
            self.held, self.data = request, (self.folder / request.name).read_range(request.begin, request.end)
        begin = sinfo.offset - request.begin
        return BytesIO(self.data[begin : begin + sinfo.length])


class _Planner(dcp.DefaultLoadPlanner):
    """DCP's planner, with `weights_only=True`: DCP's own would unpickle single objects without restrictions."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, torch.load(value, weights_only=True))


def load(state: dict[str, Any], checkpoint: Path | Reader, group: dist.ProcessGroup | None = None) -> None:
    """`torch.distributed.checkpoint.load` without running code from the checkpoint; fills `state` in place.

    Args:
        group: the ranks that read together; None reads in this process alone.

    Raises:
        ConfigError: on all ranks, naming the file and what is wrong with it.
        OSError: a file can't be read.
    """
    reader = checkpoint if isinstance(checkpoint, Reader) else Reader(checkpoint)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # intended
        try:
            dcp.load(state, storage_reader=reader, planner=_Planner(), process_group=group, no_dist=group is None)
        except CheckpointException as error:
            causes = [cause for _, (cause, _) in sorted(error.failures.items())]
            ours = [
                cause
                for cause in causes
                if isinstance(cause, (UserError, OSError, MemoryError, torch.OutOfMemoryError))
            ]
            if ours:
                raise ours[0] from error
            if all(isinstance(cause, (RuntimeError, ValueError, KeyError)) for cause in causes):
                raise ConfigError(f"{reader.folder} lacks what is to be loaded: {causes[0]}") from error
            raise


# ── Writing ───────────────────────────────────────────────────────────────────────────────────────────


class _SummingFileSystem(FileSystem):
    """Records the checksums of the files that it writes."""

    def __init__(self) -> None:
        self.sums: dict[str, FileSums] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:  # type: ignore[override]  # no IOBase
        with super().create_stream(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            file = SummedFile(stream)  # type: ignore[arg-type]  # DCP's IOBase is a binary file
            yield file
            file.close()
        self.sums[Path(path).name] = file.sums


class Writer(_FileSystemWriter):
    """Writes a checkpoint folder with its `checksums.json`, which also covers `farsight.json` and `tokenizer/`.

    Args:
        single_file_per_rank: if false, each tensor gets a file of its own.
    """

    fs: _SummingFileSystem

    def __init__(self, checkpoint: str | Path, single_file_per_rank: bool = True) -> None:
        self.folder = checkpoint if isinstance(checkpoint, Path) else Path(checkpoint)
        on_disk = not isinstance(self.folder, StorePath)
        super().__init__(self.folder, single_file_per_rank=single_file_per_rank, sync_files=on_disk)
        self.fs = _SummingFileSystem()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = super().write_data(plan, planner).value()
        # The results go to rank 0, and the checksums with them.
        done: Future[list[WriteResult]] = Future()
        done.set_result([*written, WriteResult(MetadataIndex(MANIFEST), 0, self.fs.sums)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0: writes `checksums.json`, and `.metadata` once everything else is on disk."""
        sums = {name: file for *_, last in results for name, file in last.storage_data.items()}
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_meta = StorageMeta(checkpoint_id=str(self.folder), save_id=self.save_id)
        metadata.storage_data = {result.index: result.storage_data for *written, _ in results for result in written}
        for path in (self.folder / CONFIG, *sorted((self.folder / "tokenizer").rglob("*"))):
            if path.is_file():
                sums[path.relative_to(self.folder).as_posix()] = sums_of(path)
                with path.open("rb") as file:
                    sync_to_disk(file)
        part = self.folder / UNFINISHED
        with self.fs.create_stream(part, "wb") as stream:
            pickle.dump(metadata, stream)
            sync_to_disk(stream)
        write_manifest(self.folder, {**sums, COMPLETE: self.fs.sums[part.name]})
        part.rename(self.folder / COMPLETE)
