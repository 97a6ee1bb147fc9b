"""Paths on object stores and web servers: s3://bucket/key, gs://bucket/key and https://host/path (read only).

`StorePath` is a `pathlib.Path`, so that code that reads and writes a checkpoint works on all of them; fsspec makes the requests. A
store has objects and no folders: a folder is there as long as an object lies below it, making one does nothing, and renaming one
copies and deletes its objects one by one. A single object appears whole or not at all.
"""

import importlib
import io
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path, PosixPath
from typing import Any, NoReturn, TypeVar, cast

T = TypeVar("T")

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}
"""Packages that fsspec needs, by scheme."""
READ_BYTES = 2**20
"""Bytes that a small read fetches at once."""
PART_BYTES = 64 * 2**20
"""A larger object is uploaded in parts of this size, which stay in memory until they are sent; S3 takes up to 10,000."""
TRIES = 8
"""Attempts at a request before its error counts; the waits between them double, up to 20 seconds."""
PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, FileExistsError)


class StorePath(PosixPath):
    """A path on an object store or a web server. What needs a file of the operating system raises `TypeError`."""

    def __str__(self) -> str:
        first, *rest = self.parts or ("",)
        return f"{first}//{'/'.join(rest)}" if first.endswith(":") else "/".join(self.parts)

    def __fspath__(self) -> NoReturn:
        raise TypeError(f"{self} is no file of the operating system")

    @property
    def scheme(self) -> str:
        """The scheme, such as "s3"."""
        return self.parts[0].removesuffix(":")

    @property
    def _is_web(self) -> bool:
        return self.scheme in ("http", "https")

    def resolve(self, strict: bool = False) -> "StorePath":
        return self

    def is_symlink(self) -> bool:
        return False

    # Reading ─────────────────────────────────────────────────────────────────────────────────────

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Size and time of change; raises FileNotFoundError if there is neither an object nor a folder of this name."""
        with _errors(self):
            info = self._call("info")
        when = info.get("LastModified") or info.get("mtime") or 0
        seconds = int(when.timestamp() if isinstance(when, datetime) else 0)
        kind = stat.S_IFDIR if info["type"] == "directory" else stat.S_IFREG
        return os.stat_result((kind, 0, 0, 1, 0, 0, info.get("size") or 0, seconds, seconds, seconds))

    def _is(self, kind: Callable[[int], bool]) -> bool:
        try:
            return kind(self.stat().st_mode)
        except FileNotFoundError:
            return False

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        return self.is_dir() if self._is_web else self._is(lambda mode: True)

    def is_file(self) -> bool:
        return self._is(stat.S_ISREG)

    def is_dir(self) -> bool:
        """Whether an object lies below. A web server does not tell: there a folder is one of a checkpoint, a model or an adapter."""
        if self._is_web:
            return any((self / name).is_file() for name in (".metadata", "config.json", "adapter_config.json"))
        return self._is(stat.S_ISDIR)

    def read_range(self, start: int, end: int | None = None) -> bytes:
        """Bytes [start, end) of the object, or fewer if it ends before."""
        try:
            with _errors(self):
                data: bytes = self._call("cat_file", start=start, end=end)
        except PERMANENT:
            raise
        except OSError:
            if start >= self.stat().st_size:  # which stores refuse
                return b""
            raise
        if end is None or len(data) <= end - start:
            return data
        if len(data) > PART_BYTES:
            raise OSError(
                None,
                "the server sends whole files where parts are asked for; serve large files from another",
                str(self),
            )
        return data[start:end]

    def iterdir(self) -> Iterator["StorePath"]:  # type: ignore[override]  # Path's yields its own class too
        with _errors(self):
            found = self._call("ls", detail=False)
        yield from sorted(path for path in map(self._named, found) if path != self)

    def glob(self, pattern: str, **options: Any) -> Iterator["StorePath"]:  # type: ignore[override]
        if self._is_web:
            return
        with _errors(self):
            found = _filesystem(self.scheme, os.getpid()).glob(f"{self}/{pattern}")
        yield from sorted(map(self._named, found))

    def rglob(self, pattern: str, **options: Any) -> Iterator["StorePath"]:  # type: ignore[override]
        """The objects below; only for the pattern "*"."""
        assert pattern == "*"
        with _errors(self):
            found = self._call("find")
        yield from sorted(map(self._named, found))

    def version(self) -> tuple[int, str]:
        """Bytes of the object, and what changes with its content, as far as the store tells."""
        with _errors(self):
            info = self._call("info")
        return info["size"] or 0, str(
            next((info[key] for key in ("ETag", "etag", "LastModified", "mtime") if info.get(key)), "")
        )

    def open(self, mode: str = "r", buffering: int = -1, encoding: str | None = None, *rest: Any, **more: Any) -> Any:  # type: ignore[override]
        """Opens the object for reading or writing. What is written is there once the file is closed, and not after an error."""
        if "w" in mode:
            with _errors(self):
                raw: Any = _Upload(self, self._call("open", mode="wb", block_size=PART_BYTES))
        else:
            raw = _Ranges(self)
            raw = raw if buffering == 0 else io.BufferedReader(raw, READ_BYTES)
        return raw if "b" in mode else io.TextIOWrapper(raw, encoding or "utf-8")

    # Writing ─────────────────────────────────────────────────────────────────────────────────────

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing."""

    def rmdir(self) -> None:
        """Does nothing."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Deletes the object. Most stores don't say whether there was one."""
        try:
            with _errors(self):
                self._call("rm_file")
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rename(self, target: Any) -> "StorePath":
        """Copies the object, or all below this folder, within the store, and deletes them here: not at one moment."""
        sources = [self] if self.is_file() else list(self.rglob("*"))
        with _errors(self):
            for source in sources:
                source._call("cp_file", str(target / source.relative_to(self) if source != self else target))
            for source in sources:
                source._call("rm_file")
        return cast(StorePath, target)

    def create(self, data: bytes) -> None:
        """Writes the object unless there is one.

        Raises:
            FileExistsError: there is one.
        """
        try:
            with _errors(self):
                self._call("pipe_file", data, mode="create")
        except OSError as error:
            if not isinstance(error, PERMANENT) and self.is_file():
                raise FileExistsError(f"{self} exists") from error
            raise

    def write_bytes(self, data: Any) -> int:
        with _errors(self):
            self._call("pipe_file", bytes(data))
        return len(data)

    def write_text(self, data: str, encoding: str | None = None, *rest: Any, **more: Any) -> int:
        return self.write_bytes(data.encode(encoding or "utf-8"))

    def delete_tree(self) -> None:
        """Deletes all objects below."""
        with _errors(self), suppress(FileNotFoundError):
            self._call("rm", recursive=True)

    def abort_uploads(self) -> int:
        """Discards the parts of uploads below that were never completed; returns their number. Others' stores do so by themselves."""
        if self.scheme != "s3":
            return 0
        _, bucket, *key = self.parts
        files = _filesystem(self.scheme, os.getpid())
        with _errors(self):
            uploads = files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix="/".join(key) + "/").get(
                "Uploads", []
            )
            for upload in uploads:
                names = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
                files.call_s3("abort_multipart_upload", **names)
        return len(uploads)

    def fetch(self, target: Path, resume: bool = False, moved: Callable[[int], Any] = lambda size: None) -> None:
        """Copies the object into a local file, which appears whole.

        Args:
            resume: go on from what an earlier call has left of the same object.
            moved: called with the bytes of each part, those of the earlier call included.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.part" if resume else f"{target.name}.{os.getpid()}.part")
        with self.open("rb", buffering=0) as source, part.open("ab" if resume else "wb") as file:
            moved(source.seek(file.tell()))
            whole = True
            while whole:
                data = source.read(PART_BYTES)
                file.write(data)
                moved(len(data))
                whole = len(data) == PART_BYTES
        part.replace(target)

    def send(self, source: Path) -> None:
        """Copies a local file into the object."""
        if source.stat().st_size < PART_BYTES:
            self.write_bytes(source.read_bytes())
            return
        with self.open("wb") as target, source.open("rb") as file:
            shutil.copyfileobj(file, target, PART_BYTES)

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        files = _filesystem(self.scheme, os.getpid())
        work = lambda: getattr(files, method)(str(self), *arguments, **options)  # noqa: E731
        return _retried(work) if self._is_web else work()

    def _named(self, name: str) -> "StorePath":
        return StorePath(name) if self._is_web else StorePath(f"{self.parts[0]}//{name}")


class _Ranges(io.RawIOBase):
    """Reads an object by ranges; its size is asked for when it is needed."""

    def __init__(self, path: StorePath) -> None:
        self.path, self.at = path, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            found = self.path.stat()
            if stat.S_ISDIR(found.st_mode):
                raise IsADirectoryError(f"{self.path} is a folder")
            self.at = found.st_size + offset
        else:
            self.at = offset + (self.at if whence == os.SEEK_CUR else 0)
        return self.at

    def readinto(self, buffer: Any) -> int:
        data = self.path.read_range(self.at, self.at + len(buffer))
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)

    def readall(self) -> bytes:
        data = self.path.read_range(self.at)
        self.at += len(data)
        return data


class _Upload(io.BufferedIOBase):
    """Writes an object. After an error in a `with` block its parts are discarded, where fsspec's own file would complete it."""

    def __init__(self, path: StorePath, file: Any) -> None:
        self.path, self.file = path, file

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.file.tell()

    def write(self, data: Any) -> int:
        with _errors(self.path):
            return self.file.write(data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            if self.file is not None:
                with _errors(self.path):
                    self.file.close()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            file, self.file = self.file, None
            file.closed = True  # or Python would try to complete it when it deletes it
            with suppress(Exception):
                file.discard()
        self.close()


@contextmanager
def _errors(path: StorePath) -> Iterator[None]:
    """Errors of the libraries below become `OSError`s, which callers expect of a path."""
    try:
        yield
    except (OSError, ImportError, MemoryError, NotImplementedError):
        raise
    except Exception as error:
        raise OSError(None, f"{type(error).__name__}: {error}", str(path)) from error


def _retried(work: Callable[[], T]) -> T:
    """The result of a request to a web server, for which fsspec has no retries, and takes every error for a missing file."""
    for number in range(TRIES):
        try:
            return work()
        except Exception as error:
            cause = error.__cause__ if isinstance(error, FileNotFoundError) else error
            status = getattr(cause, "status", 500)
            if cause is None or status in (404, 410):
                raise
            if status in (401, 403):
                raise PermissionError(f"the server refuses it with status {status}") from error
            if number == TRIES - 1 or (status < 500 and status != 429):
                raise cause from None
        time.sleep(min(0.5 * 2**number, 20))
    raise AssertionError


@lru_cache
def _filesystem(scheme: str, process: int) -> Any:
    """fsspec's filesystem; one for each process, as its connections do not survive a fork."""
    import fsspec

    importlib.import_module(PACKAGES[scheme])  # an error of its own for a missing package
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if scheme == "s3":
        for name in ("botocore", "aiobotocore"):
            logging.getLogger(name).setLevel(logging.WARNING)  # they say where they found credentials
        options["config_kwargs"] = {"retries": {"mode": "standard", "max_attempts": TRIES}, "read_timeout": 60}
    elif scheme == "gs":
        options["consistency"] = "md5"  # compares what the store has received
    return fsspec.filesystem(scheme, **options)


def is_remote(path: str | Path) -> bool:
    """Whether a path has the scheme of a store or a web server. `Path` drops one of the slashes, which makes no difference."""
    scheme, colon, rest = str(path).partition(":/")
    return bool(colon) and bool(rest.strip("/")) and scheme in PACKAGES


def path_of(path: str | Path) -> Path:
    """A `StorePath` for a path with a scheme, a plain `Path` for any other."""
    return StorePath(path) if is_remote(path) else Path(path)


def delete_tree(folder: Path) -> None:
    """Deletes a folder, here or on a store.

    Raises:
        OSError: it can't be deleted.
    """
    if isinstance(folder, StorePath):
        folder.delete_tree()
    else:
        shutil.rmtree(folder)


def sync_to_disk(file: Any) -> None:
    """Flushes a written file and waits until it is on disk; on a store it is there once it is closed."""
    file.flush()
    with suppress(io.UnsupportedOperation):
        os.fsync(file.fileno())
