"""Reads files that may be compressed, as their names say: .gz, .bz2, .xz and .zst (or .zstd)."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

DAMAGE = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)
"""Raised while a damaged file is read."""


@contextmanager
def open_unpacked(path: str | Path) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """Opens a file to be read as it was before compression; also yields a function for the place in the file itself, in bytes."""
    with open(path, "rb") as raw:
        unpack = _READERS.get(Path(path).suffix)
        if unpack is None:
            yield raw, raw.tell
        else:
            with unpack(raw) as file:
                yield file, raw.tell


class _ZstdReader(io.RawIOBase):
    """The content of a .zst file, frame by frame: the library's own reader takes a truncated frame for the end of the file."""

    def __init__(self, raw: IO[bytes]):
        import zstandard

        self._raw, self._new, self._error = raw, zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = (
                self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            ) or self._raw.read(1 << 20)
            if not packed:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._new()
            try:
                self._ready = memoryview(self._frame.decompress(packed))
            except self._error as error:
                raise ValueError(error) from error
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size


_READERS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": lambda raw: io.BufferedReader(_ZstdReader(raw), 1 << 20),
}
_READERS[".zstd"] = _READERS[".zst"]
COMPRESSED = tuple(_READERS)
