"""Checks the bytes of token shards, and shows their documents."""

import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from farsight.data.shards.layout import INDEX, TOKENS, checksum, read_manifest
from farsight.data.shards.reader import Shards
from farsight.progress import progress


def damage_of(folder: Path) -> Iterator[str]:
    """A sentence for each file of a folder of shards that is missing, damaged, or does not belong to the others.

    Raises `DataError` if the folder has no manifest.
    """
    manifest = read_manifest(folder)
    files = [(folder / INDEX, manifest.index_checksum)]
    files += [(folder / TOKENS / shard.file, shard.checksum) for shard in manifest.shards]
    total = sum(path.stat().st_size for path, _ in files if path.is_file())
    sound = True
    with progress(desc=f"Checking {folder}", total=total, unit="B", unit_scale=True) as shown:
        for path, wanted in files:
            if not path.is_file():
                yield f"{path} is missing"
                sound = False
                continue
            found, size = checksum(path)
            shown.update(size)
            if found != wanted:
                yield f"{path} is damaged: its checksum is {found}, and was {wanted}"
                sound = False
    if sound:
        yield from _wrong_records(folder)


def _wrong_records(folder: Path) -> Iterator[str]:
    shards = Shards(folder)
    manifest, index = shards.manifest, shards.index
    sizes = np.array([shard.tokens for shard in manifest.shards], np.uint64)
    with_tokens = index[index["tokens"] > 0]
    if len(with_tokens) != manifest.documents:
        yield f"{folder / INDEX} has {len(with_tokens)} documents, the manifest {manifest.documents}"
    if (with_tokens["start"] + with_tokens["tokens"] > sizes[with_tokens["shard"]]).any():
        yield f"{folder / INDEX} has documents that end behind their shard"


def summary_of(folder: Path) -> str:
    """A folder's content in a few lines: counts, and how long its documents are."""
    manifest = read_manifest(folder)
    source = manifest.source
    named = source.get("path") or source.get("name") or ""
    lines = [
        f"{folder}: {source['kind']} source {named}".rstrip(),
        f"{manifest.documents:,} documents in {manifest.rows:,} rows, {manifest.tokens:,} tokens of {manifest.dtype} in "
        f"{len(manifest.shards)} shard{'s' * (len(manifest.shards) != 1)}",
    ]
    of_no_document = {f"skipped: {reason}": count for reason, count in manifest.skipped.items()}
    of_no_document["dropped: their text occurs earlier"] = manifest.duplicates
    skipped = sum(sum(shard.skipped.values()) for shard in manifest.shards)
    of_no_document["empty"] = manifest.rows - manifest.documents - manifest.duplicates - skipped
    lines += [f"{count:,} row{'s' * (count != 1)} {why}" for why, count in of_no_document.items() if count > 0]
    lines.append(f"{'tokens from':>12} {'documents':>12} {'tokens':>16} {'of all':>7}")
    for least, counts in manifest.lengths.items():
        share = counts["tokens"] / manifest.tokens
        lines.append(f"{int(least):>12,} {counts['documents']:>12,} {counts['tokens']:>16,} {share:>7.1%}")
    return "\n".join(lines)


def first_documents(folder: Path, count: int) -> Iterator[str]:
    """The first documents, each with its row, its length and the beginning of its text."""
    shards = Shards(folder)
    for row in np.flatnonzero(shards.index["tokens"])[:count]:
        _, start, shard, length = shards.records(np.array([row]))[0].tolist()
        ids = shards.tokens(shard, start, length)
        text = textwrap.shorten(shards.text(ids[:_SHOWN_TOKENS]), _SHOWN_CHARACTERS, placeholder=" …")
        yield f"── row {row}, {length:,} tokens: {' '.join(map(str, ids[:8]))} … ──\n{text}"


_SHOWN_TOKENS, _SHOWN_CHARACTERS = 400, 600
