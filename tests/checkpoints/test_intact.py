"""Detects truncated, missing, altered and unreadable files of checkpoints, with and without checksums."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash

from farsight.checkpoints import checksums
from farsight.checkpoints.checksums import Manifest, SummedFile, altered, read_manifest, sums_of
from farsight.checkpoints.dcp import Writer
from farsight.checkpoints.intact.__main__ import main
from farsight.checkpoints.intact.check import faults
from farsight.configs.schema import Architecture, Position
from farsight.errors import ConfigError
from farsight.model.build import ModelConfig
from tests.running import contents, train

CONFIG = ModelConfig(Architecture(), Position(), trained_length=64)


@pytest.fixture
def old(tmp_path):
    """A checkpoint of two shards, as saved by earlier versions."""
    tensors = {name: torch.randn(50, 20) for name in "abc"} | {"step": 3}
    writer = dcp.FileSystemWriter(tmp_path / "step-3", thread_count=2)
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    CONFIG.save(tmp_path / "step-3" / "farsight.json")
    return tmp_path / "step-3"


def save(folder, **state):
    """A checkpoint with checksums and one file per tensor."""
    folder.mkdir(parents=True)
    CONFIG.save(folder / "farsight.json", checksums="checksums.json")
    dcp.save(state, storage_writer=Writer(folder, single_file_per_rank=False), no_dist=True)
    return folder


@pytest.fixture
def new(tmp_path):
    return save(tmp_path / "step-3", **{name: torch.randn(50, 20) for name in "ab"}, step=3)


@pytest.fixture(params=["old", "new"])
def folder(request):
    return request.getfixturevalue(request.param)


def test_a_whole_folder_has_no_faults(folder, capsys):
    assert len(list(folder.glob("*.distcp"))) >= 2
    assert faults(folder) == faults(folder, verify=False) == []
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}: whole\n"


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("by", [1, 20, 5000])
def test_a_truncated_shard(folder, by, verify):
    path = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    size = path.stat().st_size
    cut(path, size - by)
    assert faults(folder, verify) == [f"{path.name} has {max(0, size - by):,} bytes, {size:,} expected"]


@pytest.mark.parametrize("verify", [True, False])
def test_a_missing_shard(folder, verify):
    size = (folder / "__0_0.distcp").stat().st_size
    (folder / "__0_0.distcp").unlink()
    assert faults(folder, verify) == [f"__0_0.distcp is missing ({size:,} bytes expected)"]


@pytest.mark.parametrize("left", [0, 1, 200, -1])
def test_truncated_metadata(folder, left):
    cut(folder / ".metadata", left)
    (found,) = faults(folder)
    assert found.startswith((".metadata can't be read (", ".metadata has "))


PICKLES = {
    "of something else": b"\x80\x04K\x01.",  # 1
    "of nothing": b"\x80\x04N.",
}


@pytest.mark.parametrize("kind", PICKLES)
def test_metadata_that_is_something_else(old, kind):
    (old / ".metadata").write_bytes(PICKLES[kind])
    (found,) = faults(old)
    assert found.startswith(".metadata can't be read (")


@pytest.mark.parametrize(
    "text", ["[]", "{}", '"x"', "null", '{"model": 3}', '{"architecture": ', "[" * 100_000, "\ufeff{}"]
)
def test_a_config_that_is_none(old, text):
    (old / "farsight.json").write_text(text)
    (found,) = faults(old)
    assert found.startswith("farsight.json can't be read (")


def test_no_config(folder):
    (folder / "farsight.json").unlink()
    (found,) = faults(folder)
    assert found.startswith("farsight.json is missing")


@pytest.mark.parametrize("name", [".metadata", "farsight.json", "__0_1.distcp", "checksums.json"])
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError()], ids=["EIO", "memory"])
def test_what_cannot_be_read_now_is_not_damaged(folder, unreadable, name, error):
    unreadable(folder / name, error)
    with pytest.raises(type(error)):
        faults(folder)
    with pytest.raises(SystemExit, match="can't be read"):
        main([str(folder)])


def test_an_empty_folder(tmp_path):
    assert faults(tmp_path) == [".metadata is missing: the save was interrupted, or the file was lost"]


def flip(path: Path, at: int, by: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= by
    path.write_bytes(data)


def test_without_checksums_the_command_compares_crcs(old, capsys):
    saved = contents(old)
    path = next(p for p in old.glob("*.distcp") if saved["a"].numpy().tobytes() in p.read_bytes())
    at = path.read_bytes().find(saved["a"].numpy().tobytes()) + 100
    flip(path, at)
    assert not torch.equal(contents(old)["a"], saved["a"])  # neither torch nor sizes reveal it
    assert faults(old) == []
    assert main([str(old)]) == 1
    _, name, *_, start, _, end, _, tensor = capsys.readouterr().out.replace(",", "").split()
    assert (name, tensor) == (path.name, "a")
    assert int(start) < at < int(end)


# ── Checksums ─────────────────────────────────────────────────────────────────────────────────────────


def test_checksums_are_xxh3_s(new):
    values = json.loads((new / "checksums.json").read_text())
    names = {path.name for path in new.iterdir()} - {"checksums.json"}
    assert values["files"].keys() == names == {".metadata", "farsight.json", *(f"__0_{i}.distcp" for i in range(3))}
    for name, sums in values["files"].items():
        data = (new / name).read_bytes()
        assert sums == {"bytes": len(data), "blocks": [xxhash.xxh3_128_hexdigest(data)]}


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 20, 95])
def test_blocks_of_a_file(tmp_path, monkeypatch, size):
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 10)
    monkeypatch.setattr(checksums, "READ_BYTES", 3)
    data = random.Random(size).randbytes(size)
    with (tmp_path / "file").open("wb") as raw:
        file = SummedFile(raw)
        pieces = [data[:7], data[7:8], data[8:40], data[40:]]
        assert [file.write(memoryview(piece)) for piece in pieces] == [len(piece) for piece in pieces]
        file.close()
    expected = [xxhash.xxh3_128_hexdigest(data[i : i + 10]) for i in range(0, size, 10)]
    assert (file.sums.bytes, file.sums.blocks) == (size, expected)
    assert sums_of(tmp_path / "file") == file.sums
    manifest = Manifest({"file": file.sums}, 10)
    assert altered(tmp_path, manifest) == []
    if size == 95:
        flip(tmp_path / "file", 33)
        flip(tmp_path / "file", 94)
        found = ["file was altered between bytes 30 and 40", "file was altered between bytes 90 and 95"]
        assert altered(tmp_path, manifest) == found
        # Ranks share the blocks: each block is read by one rank.
        shares = [altered(tmp_path, manifest, rank, 4) for rank in range(4)]
        assert sorted(line for share in shares for line in share) == found
        assert shares.count([]) == 2


@pytest.mark.slow
def test_every_flipped_byte_is_noticed(tmp_path, monkeypatch):
    """Every byte of every file of a small checkpoint, one at a time."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # starting more threads takes longer than reading
    folder = save(tmp_path / "step-1", weight=torch.ones(2), step=1)
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        for at in range(len(data)):
            path.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
            found = faults(folder)
            assert found, f"{path.name}, byte {at}"
            assert found[0].startswith(path.name), f"{found}, {path.name}, byte {at}"
        path.write_bytes(data)
        assert faults(folder) == []


def test_a_lost_manifest_is_noticed(new):
    (new / "checksums.json").unlink()
    assert faults(new) == faults(new, verify=False) == ["checksums.json is missing"]


def test_a_manifest_that_lacks_a_file_is_noticed(new):
    manifest = read_manifest(new)
    rest = {name: sums for name, sums in manifest.files.items() if name != "__0_1.distcp"}
    (new / "checksums.json").write_text(replace(manifest, files=rest).text())
    assert faults(new) == ["checksums.json has no checksums of __0_1.distcp"]


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", ""])
def test_a_manifest_does_not_lead_out_of_the_folder(new, name):
    manifest = read_manifest(new)
    (new / "checksums.json").write_text(
        replace(manifest, files={**manifest.files, name: manifest.files[".metadata"]}).text()
    )
    with pytest.raises(ConfigError, match=r"checksums\.json was altered: checksums.json names"):
        read_manifest(new)
    assert len(faults(new)) == 1


def test_without_verification_sizes_are_looked_at(new):
    flip(new / "__0_0.distcp", 700)
    assert faults(new, verify=False) == []
    (found,) = faults(new)
    assert found.startswith("__0_0.distcp was altered between bytes 0 and ")


def test_what_a_run_saves_has_checksums_of_all(tmp_path):
    """A sample of the bytes of a real run's checkpoint, including the files of two ranks."""
    train(tmp_path / "run", "--training.steps=2", "--training.local_batch_size=2", "--validation.no_enable", ranks=2)
    folder = tmp_path / "run" / "checkpoint" / "step-2"
    files = sorted(path.name for path in folder.iterdir())
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "checksums.json", "farsight.json"]
    assert faults(folder) == []
    rng = random.Random(0)
    for name in files:
        data = (folder / name).read_bytes()
        for at in rng.sample(range(len(data)), 20):
            flip(folder / name, at, 1 << rng.randrange(8))
            (found,) = faults(folder)
            assert found.startswith(name)
            (folder / name).write_bytes(data)
