"""Token shards: what is written equals what the source's documents tokenise to, whatever interrupts the writing."""

import bz2
import gzip
import json
import lzma
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from farsight.configs.schema import HubSource, JsonlSource, ParquetSource, TextSource
from farsight.data.prepare.check import damage_of, first_documents, summary_of
from farsight.data.prepare.write import Job, prepare
from farsight.data.shards.layout import Manifest, read_manifest
from farsight.data.shards.reader import Shards
from farsight.data.tokenizers.tokenizer import BytesTokenizer, train_sentencepiece
from farsight.errors import DataError
from tests.data.small_tokenizers import KINDS, small_tokenizer

BYTES = BytesTokenizer()
PART = 2000


def texts(number: int = 60) -> list[str]:
    drawn = random.Random(5)
    return [f"text {i} " + "é word " * drawn.randrange(60) for i in range(number)]


def jsonl(path: Path, rows: list[str | None]) -> JsonlSource:
    """A file with a line for each text; a blank one for None."""
    lines = ["" if text is None else json.dumps({"text": text}, ensure_ascii=False) for text in rows]
    path.write_text("".join(line + "\n" for line in lines))
    return JsonlSource(path=str(path))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stored(folder: Path) -> list[bytes]:
    """The text of each row, as the byte tokenizer's ids give it."""
    shards = Shards(folder)
    found = []
    for _, start, shard, length in shards.index.tolist():
        found.append(bytes(shards.tokens(shard, start, length).tolist()))
    return found


def written(source, out: Path, processes: int = 1, tokenizer=BYTES, **changes) -> Manifest:
    return prepare(Job(source, out, **{"shard_bytes": PART, **changes}), tokenizer, processes)


@pytest.mark.parametrize("processes", [1, 2])
def test_every_row_keeps_its_number_text_and_hash(tmp_path, processes):
    rows = [*texts(), None, "", *texts(9)]
    manifest = written(jsonl(tmp_path / "a.jsonl", rows), tmp_path / "out", processes)
    assert stored(tmp_path / "out") == [(text or "").encode() for text in rows]
    index = Shards(tmp_path / "out").index
    for record, text in zip(index, rows, strict=True):
        if text:
            assert int(record["hash"]) == int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
    kept = [text.encode() for text in rows if text]
    assert (manifest.rows, manifest.documents, manifest.tokens) == (len(rows), len(kept), sum(map(len, kept)))
    assert len(manifest.shards) > 5
    assert {shard.dtype for shard in map(np.load, (tmp_path / "out" / "tokens").iterdir())} == {np.dtype("uint16")}
    bins = Counter(str(1 << (len(text).bit_length() - 1)) for text in kept)
    assert {least: counts["documents"] for least, counts in manifest.lengths.items()} == dict(bins)


def test_the_number_of_processes_changes_no_byte(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", texts())
    for processes in (1, 2):
        written(source, tmp_path / str(processes), processes)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


@pytest.mark.parametrize("kind", KINDS)
def test_other_tokenizers(tmp_path, kind):
    tokenizer = small_tokenizer(kind, texts(), tmp_path)
    rows = [*texts(), "a long text of many words " * 12000]
    written(jsonl(tmp_path / "a.jsonl", rows), tmp_path / "out", tokenizer=tokenizer)
    shards = Shards(tmp_path / "out")
    for (_, start, shard, length), text in zip(shards.index.tolist(), rows, strict=True):
        assert shards.tokens(shard, start, length).tolist() == tokenizer.encode(text)
    assert shards.tokenizer.fingerprint == tokenizer.fingerprint


PACK = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda raw: b"".join(zstandard.compress(raw[i : i + 3000]) for i in range(0, len(raw), 3000)),
}


@pytest.mark.parametrize("suffix", PACK)
def test_compressed_lines(tmp_path, suffix):
    path = Path(jsonl(tmp_path / "a.jsonl", texts()).path)
    packed = tmp_path / f"a.jsonl{suffix}"
    packed.write_bytes(PACK[suffix](path.read_bytes()))
    manifest = written(JsonlSource(path=str(packed)), tmp_path / "out")
    assert stored(tmp_path / "out") == [text.encode() for text in texts()]
    assert len(manifest.shards) > 5
    packed.write_bytes(PACK[suffix](path.read_bytes())[:-7])
    with pytest.raises(DataError, match=rf"a\.jsonl\{suffix}: can't be read .*Replace the file"):
        written(JsonlSource(path=str(packed)), tmp_path / "cut")


def test_other_kinds_of_source(tmp_path):
    for i, text in enumerate(texts()):
        (tmp_path / f"{i:03}.txt").write_text(text)
    written(TextSource(path=str(tmp_path / "*.txt")), tmp_path / "out-text")
    pq.write_table(pa.table({"body": texts()}), tmp_path / "a.parquet", row_group_size=7)
    manifest = written(ParquetSource(path=str(tmp_path / "a.parquet"), field="body"), tmp_path / "out-parquet")
    for name in ("out-text", "out-parquet"):
        assert stored(tmp_path / name) == [text.encode() for text in texts()]
    assert manifest.blocks == [7] * 8 + [4]
    for part in range(3):
        jsonl(tmp_path / f"{part}.jsonl", texts()[part::3])
    written(HubSource(name="json", data_files=str(tmp_path / "*.jsonl")), tmp_path / "out-hub")
    assert sorted(stored(tmp_path / "out-hub")) == sorted(text.encode() for text in texts())


def test_duplicates_are_dropped_once_whatever_part_they_are_in(tmp_path):
    drawn = random.Random(1)
    rows = [drawn.choice(texts()) for _ in range(150)]
    manifest = written(jsonl(tmp_path / "a.jsonl", rows), tmp_path / "out", drop_duplicates=True)
    first = [text.encode() if text not in rows[:i] else b"" for i, text in enumerate(rows)]
    assert stored(tmp_path / "out") == first
    assert manifest.duplicates == len(rows) - len(set(rows))
    assert f"{manifest.duplicates} rows dropped" in summary_of(tmp_path / "out")


def test_bad_rows(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text}) for text in texts()]
    lines[20], lines[40], lines[41] = "{", '{"body": "x"}', "{"
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"a\.jsonl:\d+ from byte \d+: bad JSON"):
        written(JsonlSource(path=str(path)), tmp_path / "out")
    manifest = written(JsonlSource(path=str(path)), tmp_path / "skipping", on_bad_row="skip")
    assert manifest.skipped == {"bad JSON": 2, "missing field": 1}
    assert stored(tmp_path / "skipping") == [b"" if i in (20, 40, 41) else t.encode() for i, t in enumerate(texts())]
    assert sum(sum(shard.skipped.values()) for shard in manifest.shards) == 3


class Killed(BaseException):
    """Stands for SIGKILL: nothing may catch it."""


def written_with_kills(monkeypatch, first: int, source, out: Path, **changes) -> int:
    """As `written`, but dying at the `first`-th fsync or rename, then a little later each time; returns the number of deaths."""
    done, deaths = 0, 0
    replaced, synced = Path.replace, os.fsync

    def step(do, *args):
        nonlocal done
        done += 1
        if done > first + deaths:
            raise Killed
        return do(*args)

    monkeypatch.setattr(Path, "replace", lambda *args: step(replaced, *args))
    monkeypatch.setattr(os, "fsync", lambda *args: step(synced, *args))
    while True:
        try:
            written(source, out, **changes)
        except Killed:
            done, deaths = 0, deaths + 1
        else:
            monkeypatch.undo()
            return deaths


@pytest.mark.parametrize("first", range(6))
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_killed_at_any_write_it_ends_with_the_same_bytes(tmp_path, monkeypatch, suffix, first):
    lines = [json.dumps({"text": text}) for text in [*texts(30), *texts()]]
    lines[10] = lines[70] = "{"
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes((gzip.compress if suffix else bytes)("\n".join(lines).encode()))
    changes = {"on_bad_row": "skip", "drop_duplicates": True}
    written(JsonlSource(path=str(path)), tmp_path / "whole", **changes)
    assert written_with_kills(monkeypatch, first, JsonlSource(path=str(path)), tmp_path / "killed", **changes) > 5
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


@pytest.mark.processes
def test_a_killed_command_goes_on(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", texts(4000))
    written(source, tmp_path / "whole", shard_bytes=20000)
    code = (
        "import sys; from pathlib import Path; from farsight.configs.schema import JsonlSource\n"
        "from farsight.data.prepare.write import Job, prepare\n"
        "from farsight.data.tokenizers.tokenizer import BytesTokenizer\n"
        f"prepare(Job(JsonlSource(path={source.path!r}), Path(sys.argv[1]), shard_bytes=20000), BytesTokenizer(), 1)"
    )
    out = tmp_path / "out"
    killed = 0
    for parts in (3, 20):
        running = subprocess.Popen([sys.executable, "-c", code, str(out)])
        while running.poll() is None and len(list(out.glob("parts/*.json"))) < parts:
            pass
        killed += running.poll() is None
        running.send_signal(signal.SIGKILL)
        running.wait()
    subprocess.run([sys.executable, "-c", code, str(out)], check=True)
    assert killed
    assert contents(out) == contents(tmp_path / "whole")


def test_other_settings_do_not_go_on_with_it(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", texts())
    written(source, tmp_path / "out")
    before = contents(tmp_path / "out")
    assert written(source, tmp_path / "out") == read_manifest(tmp_path / "out")
    with pytest.raises(DataError, match="other data or settings: drop_duplicates was False, is True"):
        written(source, tmp_path / "out", drop_duplicates=True)
    with pytest.raises(DataError, match="settings: tokenizer was bytes, is "):
        written(source, tmp_path / "out", tokenizer=train_sentencepiece(texts(), 300, tmp_path / "tokenizer"))
    jsonl(tmp_path / "a.jsonl", texts(59))
    with pytest.raises(DataError, match=r"other data or settings: a\.jsonl changed\. Put them back"):
        written(source, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    with pytest.raises(ValueError, match="not empty"):
        written(source, tmp_path / "full")
    assert contents(tmp_path / "out") == before


def test_moved_data_goes_on(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "a.jsonl", texts())
    written(source, tmp_path / "whole")
    monkeypatch.chdir(tmp_path)
    written(JsonlSource(path="a.jsonl"), tmp_path / "whole")


def test_bad_rows_may_be_skipped_from_then_on(tmp_path):
    lines = [json.dumps({"text": text}) for text in texts()]
    lines[50] = "{"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = JsonlSource(path=str(tmp_path / "a.jsonl"))
    with pytest.raises(DataError, match="bad JSON"):
        written(source, tmp_path / "out")
    assert len(list((tmp_path / "out" / "parts").glob("*.json"))) > 3
    assert written(source, tmp_path / "out", on_bad_row="skip").skipped == {"bad JSON": 1}
    assert stored(tmp_path / "out") == [b"" if i == 50 else text.encode() for i, text in enumerate(texts())]


def test_a_finished_folder_that_was_cut_is_not_taken_for_good(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", texts())
    written(source, tmp_path / "out")
    path = sorted((tmp_path / "out" / "tokens").iterdir())[2]
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=path.name):
        written(source, tmp_path / "out")


def test_damage_is_found(tmp_path):
    written(jsonl(tmp_path / "a.jsonl", texts()), tmp_path / "out")
    assert list(damage_of(tmp_path / "out")) == []
    files = sorted((tmp_path / "out" / "tokens").iterdir())
    for path in (files[1], files[3], tmp_path / "out" / "index.npy"):
        raw = bytearray(path.read_bytes())
        raw[-2] ^= 1
        path.write_bytes(raw)
    files[5].unlink()
    found = list(damage_of(tmp_path / "out"))
    assert [sentence.split()[0] for sentence in found] == [
        str(tmp_path / "out" / "index.npy"), str(files[1]), str(files[3]), str(files[5])
    ]  # fmt: skip
    assert found[-1].endswith("is missing")
    files[1].write_bytes(files[1].read_bytes()[:-4])
    shards = Shards(tmp_path / "out")
    with pytest.raises(DataError, match="Copy the folder"):
        shards.tokens(1, 0, 1)


def test_records_that_leave_their_shard_are_found(tmp_path):
    written(jsonl(tmp_path / "a.jsonl", texts()), tmp_path / "out")
    index = np.load(tmp_path / "out" / "index.npy")
    index["start"][7] += 10**6
    np.save(tmp_path / "out" / "index.npy", index)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    manifest["index_checksum"] = blake2b((tmp_path / "out" / "index.npy").read_bytes(), digest_size=16).hexdigest()
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(manifest))
    assert "behind their shard" in " ".join(damage_of(tmp_path / "out"))


def test_documents_are_shown(tmp_path):
    written(jsonl(tmp_path / "a.jsonl", [None, "two words", *texts()]), tmp_path / "out")
    (shown,) = first_documents(tmp_path / "out", 1)
    assert shown == "── row 1, 9 tokens: 116 119 111 32 119 111 114 100 … ──\ntwo words"


def test_a_folder_that_was_not_finished_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no manifest\.json in it"):
        Shards(tmp_path)
    written(jsonl(tmp_path / "a.jsonl", texts()), tmp_path / "x" / "source-0")
    with pytest.raises(DataError, match="There are source-0 in it"):
        Shards(tmp_path / "x")
    manifest = json.loads((tmp_path / "x" / "source-0" / "manifest.json").read_text())
    (tmp_path / "x" / "source-0" / "manifest.json").write_text(json.dumps(manifest | {"format": 9}))
    with pytest.raises(DataError, match="format 9, and this version of Farsight reads 1"):
        Shards(tmp_path / "x" / "source-0")


def test_settings_of_a_run_are_not_those_of_the_shards(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", texts())
    written(source, tmp_path / "out")
    written(replace(source, weight=3.0, min_tokens=7, packing="best_fit"), tmp_path / "out")


def test_rows_without_a_document_are_counted(tmp_path):
    rows = [*texts(), "", None, texts()[0]]
    written(jsonl(tmp_path / "a.jsonl", rows), tmp_path / "out", drop_duplicates=True)
    shown = summary_of(tmp_path / "out")
    assert "60 documents in 63 rows" in shown
    assert "1 row dropped: their text occurs earlier\n2 rows empty\n" in shown
