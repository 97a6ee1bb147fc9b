"""Identifies a source's files, so that a resuming run can check that they are the same, in the same order.

A file's identity is its size and a hash of a few blocks spread over it, so a hundred thousand files take seconds. Names
only serve messages: moved files count as the same, as long as their contents keep their order.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

from farsight.errors import DataError
from farsight.progress import progress

FileList = list[list[str]]
"""[name, identity] of each file, in reading order."""

_BLOCK, _BLOCKS = 4096, 8
_THREADS = 16
_NAMED = 3
"""Differences that a message names; further ones are counted."""


def identify(paths: Sequence[str | Path]) -> FileList:
    """Name (relative to the common folder) and identity of each file. Raises `DataError` for an unreadable one."""
    texts = [os.path.abspath(path) for path in paths]
    folder = os.path.commonpath([os.path.dirname(text) for text in texts])
    with (
        ThreadPoolExecutor(_THREADS) as pool,
        progress(desc="Identifying files", total=len(texts), unit="file", unit_scale=True) as shown,
    ):
        found = []
        for text, identity in zip(texts, pool.map(_identity, texts), strict=True):
            found.append([os.path.relpath(text, folder), identity])
            shown.update()
    return found


def difference(saved: FileList, now: FileList) -> str | None:
    """Describes how files changed since a checkpoint; None if contents and order are the same."""
    if [identity for _, identity in saved] == [identity for _, identity in now]:
        return None
    found = list(_differences(saved, now)) or ["their order changed"]
    more = f" and {len(found) - _NAMED:,} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more


def _differences(saved: FileList, now: FileList) -> Iterator[str]:
    before, after = dict(saved), dict(now)
    known, found = Counter(before.values()), Counter(after.values())
    names = {identity: name for name, identity in now}
    renamed = {}
    for name, identity in saved:
        if name in after and identity != after[name]:
            yield f"{name} changed"
        elif name not in after and found[identity] < known[identity]:
            yield f"{name} is gone"
        elif name not in after:
            renamed[name] = names[identity]
    for name, identity in now:
        if name not in before and known[identity] < found[identity]:
            yield f"{name} is new"
    kept = [identity for name, identity in saved if name in renamed or after.get(name) == identity]
    contents = set(kept)
    if kept != [identity for _, identity in now if identity in contents]:
        for name, new in renamed.items():
            yield f"{name} is now called {new}, and is read at a different place in the order"


def _identity(path: str) -> str:
    try:
        stat = os.stat(path)
        return f"{stat.st_size}:{_sampled_hash(path, stat.st_size, stat.st_mtime_ns)}"
    except OSError as error:
        raise DataError(
            f"{error.filename}: {error.strerror}. Put the file back, or correct its permissions."
        ) from error


@lru_cache(maxsize=1 << 20)
def _sampled_hash(path: str, size: int, modified: int) -> str:
    """A hash of a file's first and last block and some between, or of all of a small file; cached per process."""
    hashed = blake2b(digest_size=8)
    blocks = max(1, min(_BLOCKS, -(-size // _BLOCK)))
    with open(path, "rb", buffering=0) as file:
        for block in range(blocks):
            start = block * max(0, size - _BLOCK) // max(1, blocks - 1)
            hashed.update(os.pread(file.fileno(), _BLOCK, start))
    return hashed.hexdigest()
