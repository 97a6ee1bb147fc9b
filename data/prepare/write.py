"""Writes token shards: processes tokenise the parts of a source on their own, and what they leave is put together.

A part's rows become shards of about SHARD_BYTES of text. A shard is written under another name, and counts as done when its
description is there; so a preparation that was killed goes on with the rows after the last finished shard of each part, and
ends with the same bytes as one that was not.
"""

import json
import multiprocessing
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

import numpy as np

from farsight.configs import schema
from farsight.data.prepare.parts import Part, identity_of, parts_of
from farsight.data.saved_order import source_settings
from farsight.data.shards.layout import (
    INDEX,
    JOB,
    MANIFEST,
    RECORD,
    TOKENIZER,
    TOKENS,
    Manifest,
    Shard,
    checksum,
    token_type,
)
from farsight.data.shards.reader import checked
from farsight.data.sources.documents import AnyDocument, OnBadRow, text_hash
from farsight.data.sources.identity import difference
from farsight.data.sources.rows import no_rows
from farsight.data.tokenizers.base import Tokenizer
from farsight.data.tokenizers.tokenizer import load_tokenizer_dir
from farsight.errors import DataError, UserError
from farsight.files import check_new_folder, write_text, written_whole
from farsight.json_files import read_object
from farsight.progress import DELAY, progress

SHARD_BYTES = 256 << 20
"""Text in a shard; a preparation that is killed loses at most this much work in each process."""
PARTS = "parts"

_BATCH_BYTES, _BATCH_ROWS = 1 << 20, 512
_COUNTED_ROWS = 1 << 20

Report = Callable[[int, int], None]
"""Takes the size of the work that was done, in the units of the part's `size`, and the tokens written."""


@dataclass(frozen=True)
class Job:
    """A source to be prepared."""

    source: schema.Source
    out: Path
    on_bad_row: OnBadRow = "error"
    drop_duplicates: bool = False
    shard_bytes: int = SHARD_BYTES

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer_dir(self.out / TOKENIZER)


def prepare(job: Job, tokenizer: Tokenizer, processes: int) -> Manifest:
    """Writes the shards of a source into `job.out`, or goes on with them; returns the manifest.

    Raises `DataError` for data that can't be read, for a folder with anything else in it, and for one that was begun with other
    data or settings.
    """
    blocks, content = identity_of(job.source, job.on_bad_row)
    source = _begin(job, tokenizer, content)
    if (job.out / MANIFEST).is_file():
        shutil.rmtree(job.out / PARTS, ignore_errors=True)
        return checked(job.out)
    parts, unusable = parts_of(job.source, job.on_bad_row, job.shard_bytes)
    with _progress(parts) as report:
        if processes == 1:
            for number, part in enumerate(parts):
                write_part(job, number, part, tokenizer, report)
        else:
            _write_parallel(job, parts, processes, report)
    return _finish(job, source, tokenizer, len(parts), blocks, Counter(unusable.skipped), content.get("bytes", 0))


def write_part(job: Job, number: int, part: Part, tokenizer: Tokenizer, report: Report) -> None:
    """Tokenises the rows of a part that are not in its finished shards yet."""
    done = _finished(job.out, number)
    tokens = sum(entry["shard"]["tokens"] for entry in done)
    if done and done[-1]["last"]:
        report(part.size, tokens)
        return
    counter, rows = part.open(job.source, job.on_bad_row)
    at, place = len(done), 0
    for _ in range(sum(entry["shard"]["rows"] for entry in done)):
        _, place = next(rows)
    report(place, tokens)
    counted = Counter(counter.skipped)
    shard = _NewShard(part.name, tokenizer, counted)
    for document, after in rows:
        if shard.bytes >= job.shard_bytes:
            report(0, shard.write(job.out, number, at, counted, last=False))
            at, shard = at + 1, _NewShard(part.name, tokenizer, counted)
        if document is None:
            counted = Counter(counter.skipped)
        if new := shard.add(document):
            report(after - place, new)
            place = after
    report(part.size - place, shard.write(job.out, number, at, counted, last=True))


class _NewShard:
    """A shard in memory: tokens, and a record for each row."""

    def __init__(self, source: str, tokenizer: Tokenizer, skipped: Counter[str]):
        self._source, self._tokenizer, self._skipped = source, tokenizer, skipped
        self._dtype = token_type(tokenizer.vocab_size)
        self.bytes = 0
        self._tokens: list[np.ndarray] = []
        self._lengths: list[int] = []
        self._hashes: list[int] = []
        self._waiting: list[AnyDocument | None] = []
        self._waiting_bytes = 0

    def add(self, document: AnyDocument | None) -> int:
        """Takes the next row; returns the number of tokens made of the rows that were waiting."""
        self._waiting.append(document)
        if document is not None:
            self.bytes += document.size
            self._waiting_bytes += document.size
        if self._waiting_bytes >= _BATCH_BYTES or len(self._waiting) >= _BATCH_ROWS:
            return self._tokenise()
        return 0

    def _tokenise(self) -> int:
        documents = [document for document in self._waiting if document is not None]
        try:
            encoded = self._tokenizer.encode_arrays([document.text for document in documents], self._dtype)
        except ValueError as error:
            raise DataError(f"{self._source}: {error}") from error
        self._tokens += encoded
        lengths = iter(map(len, encoded))
        for document in self._waiting:
            self._lengths.append(0 if document is None else next(lengths))
            self._hashes.append(0 if document is None else text_hash(document.text.encode()))
        self._waiting, self._waiting_bytes = [], 0
        return sum(map(len, encoded))

    def write(self, out: Path, part: int, at: int, skipped: Counter[str], last: bool) -> int:
        """Writes the files of the shard, its description last; returns the number of tokens made of the last rows."""
        new = self._tokenise()
        name = f"{part:05d}-{at:03d}"
        tokens = np.concatenate([np.empty(0, self._dtype), *self._tokens])
        records = np.zeros(len(self._lengths), RECORD)
        records["hash"], records["tokens"] = self._hashes, self._lengths
        records["start"] = np.cumsum(self._lengths, dtype=np.uint64) - records["tokens"] if len(records) else 0
        with _synced(out / TOKENS / f"{name}.npy") as file:
            np.save(file, tokens, allow_pickle=False)
        with _synced(out / PARTS / f"{name}.npy") as file:
            np.save(file, records, allow_pickle=False)
        written = Shard(
            file=f"{name}.npy",
            source=self._source,
            rows=len(records),
            documents=int((records["tokens"] > 0).sum()),
            tokens=len(tokens),
            bytes=self.bytes,
            largest=int(tokens.max()) if len(tokens) else -1,
            checksum=checksum(out / TOKENS / f"{name}.npy")[0],
            skipped=dict(skipped - self._skipped),
        )
        write_text(out / PARTS / f"{name}.json", json.dumps({"last": last, "shard": asdict(written)}))
        return new


def _begin(job: Job, tokenizer: Tokenizer, content: dict[str, Any]) -> dict[str, Any]:
    """Makes the folder, or checks that the preparation in it is the same; returns the settings of the source."""
    of_a_run = {field.name for field in fields(schema.SourceShare)}
    source = {key: value for key, value in asdict(job.source).items() if key not in of_a_run}
    settings = {
        **{key: value for key, value in source_settings(job.source).items() if key not in of_a_run},
        "tokenizer": tokenizer.fingerprint,
        "drop_duplicates": job.drop_duplicates,
        "shard_bytes": job.shard_bytes,
    }
    for leftover in job.out.rglob("*.part"):
        leftover.unlink()
    place, now = job.out / JOB, json.loads(json.dumps({"settings": settings, "content": content}))
    if place.is_file():
        if changed := list(_changes(read_object(place), now)):
            raise DataError(
                f"{job.out} was begun with other data or settings: {'; '.join(changed)}. Put them back, or name a new folder "
                "(sources are numbered in the order of the config)."
            )
    else:
        check_new_folder(job.out)
        write_text(place, json.dumps(now, indent=1))
    for name in (TOKENS, PARTS):
        (job.out / name).mkdir(exist_ok=True)
    tokenizer.save(job.out / TOKENIZER)
    return source


def _changes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """A phrase for each setting and file that differs from when a preparation was begun."""
    old, new = before.get("settings", {}), now["settings"]
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            yield f"{name} was {old.get(name)}, is {new.get(name)}"
    old, new = before.get("content", {}), now["content"]
    if old != new:
        yield difference(old.get("files", []), new.get("files", [])) or f"its data was {old}, is {new}"


def _finished(out: Path, part: int) -> list[dict[str, Any]]:
    """The descriptions of a part's finished shards, in order."""
    found: list[dict[str, Any]] = []
    while (path := out / PARTS / f"{part:05d}-{len(found):03d}.json").is_file():
        found.append(read_object(path))
    return found


def _write_parallel(job: Job, parts: Sequence[Part], processes: int, report: Report) -> None:
    # Not forked: a tokenizer's threads do not survive it.
    context = multiprocessing.get_context("spawn")
    done, tokens = context.Value("q", 0), context.Value("q", 0)
    workers = min(processes, len(parts))
    threads = max(1, processes // workers)
    shown = [0, 0]

    def show() -> None:
        now = [done.value, tokens.value]
        report(now[0] - shown[0], now[1] - shown[1])
        shown[:] = now

    with ProcessPoolExecutor(workers, context, _start_worker, (job, done, tokens, threads)) as pool:
        waiting = {pool.submit(_work, number, part) for number, part in enumerate(parts)}
        try:
            while waiting:
                ended, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
                show()
                for one in ended:
                    one.result()
        except BaseException as error:
            for child in multiprocessing.active_children():  # or they would finish their parts first
                child.terminate()
            if isinstance(error, BrokenProcessPool):
                raise UserError(
                    "a process was killed, perhaps because memory ran out: start again with fewer --processes. What is written is kept."
                ) from error
            raise


_worker: dict[str, Any] = {}


def _start_worker(job: Job, done: Any, tokens: Any, threads: int) -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the process that started this one ends it
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"

    def report(size: int, new: int) -> None:
        with done.get_lock():
            done.value += size
            tokens.value += new

    _worker.update(job=job, tokenizer=job.tokenizer(), report=report)


def _work(number: int, part: Part) -> None:
    write_part(_worker["job"], number, part, _worker["tokenizer"], _worker["report"])


def _finish(
    job: Job,
    source: dict[str, Any],
    tokenizer: Tokenizer,
    parts: int,
    blocks: list[int],
    skipped: Counter[str],
    source_bytes: int,
) -> Manifest:
    """Puts the records of all shards into one index, drops duplicates there, and writes the manifest."""
    shards = [Shard(**entry["shard"]) for part in range(parts) for entry in _finished(job.out, part)]
    rows = sum(shard.rows for shard in shards)
    if not any(shard.tokens for shard in shards):
        raise no_rows(f"{job.source.kind} source")
    first = 0
    with written_whole(job.out / INDEX) as place:
        index = np.lib.format.open_memmap(place, mode="w+", dtype=RECORD, shape=(rows,))
        for number, shard in enumerate(shards):
            records = np.load(job.out / PARTS / shard.file, allow_pickle=False)
            records["shard"] = number
            index[first : first + shard.rows] = records
            first += shard.rows
            skipped.update(shard.skipped)
        duplicates = _drop_duplicates(index) if job.drop_duplicates else 0
        lengths, documents, tokens = _lengths(index)
        index.flush()
    manifest = Manifest(
        source=source,
        tokenizer={"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size},
        dtype=str(token_type(tokenizer.vocab_size)),
        rows=rows,
        documents=documents,
        tokens=tokens,
        duplicates=duplicates,
        skipped=dict(sorted(skipped.items())),
        source_bytes=source_bytes,
        blocks=blocks,
        lengths=lengths,
        index_checksum=checksum(job.out / INDEX)[0],
        shards=shards,
    )
    write_text(job.out / MANIFEST, json.dumps(asdict(manifest), indent=1))
    shutil.rmtree(job.out / PARTS)
    return manifest


def _drop_duplicates(index: np.ndarray) -> int:
    """Leaves only the first of the documents with equal texts; returns how many it dropped."""
    rows = np.flatnonzero(index["tokens"])
    _, first = np.unique(index["hash"][rows], return_index=True)
    dropped = np.delete(rows, first)
    index["tokens"][dropped] = 0
    return len(dropped)


def _lengths(index: np.ndarray) -> tuple[dict[str, dict[str, int]], int, int]:
    """The histogram of a manifest, and the number of documents and tokens."""
    bins: dict[int, list[int]] = {}
    for first in range(0, len(index), _COUNTED_ROWS):
        lengths = index["tokens"][first : first + _COUNTED_ROWS]
        exponents = np.frexp(lengths[lengths > 0].astype(np.float64))[1] - 1
        documents = np.bincount(exponents)
        tokens = np.bincount(exponents, lengths[lengths > 0])
        for exponent in np.flatnonzero(documents):
            counts = bins.setdefault(int(exponent), [0, 0])
            counts[0] += int(documents[exponent])
            counts[1] += int(tokens[exponent])
    found = {str(1 << e): {"documents": n, "tokens": t} for e, (n, t) in sorted(bins.items())}
    return found, sum(n for n, _ in bins.values()), sum(t for _, t in bins.values())


@contextmanager
def _synced(path: Path) -> Iterator[IO[bytes]]:
    """A file that appears under its name once its bytes are on the disk."""
    with written_whole(path) as place, open(place, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _progress(parts: Sequence[Part]) -> Iterator[Report]:
    """A bar of the work on all parts, with tokens a second."""
    unit = "file" if all(part.size == 1 for part in parts) else "B"
    start, tokens = time.perf_counter(), 0
    with progress(desc="Preparing", total=sum(p.size for p in parts), unit=unit, unit_scale=unit == "B") as shown:

        def report(size: int, new: int) -> None:
            nonlocal tokens
            tokens += new
            seconds = time.perf_counter() - start
            shown.set_postfix_str(f"{tokens:,} tokens, {tokens / seconds:,.0f} tokens/s", refresh=False)
            shown.update(size)
            if new and not size and seconds > DELAY:  # in the middle of a streamed file
                shown.refresh()

        yield report
