"""Is a checkpoint whole? Files cut short, missing, altered, and unreadable."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpoints.intact import faults, main


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of two shards."""
    tensors = {name: torch.randn(50, 20) for name in "abc"} | {"step": 3}
    writer = dcp.FileSystemWriter(tmp_path / "step-3", thread_count=2)
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    (tmp_path / "step-3" / "farsight.json").write_text("{}")
    return tmp_path / "step-3"


def test_a_whole_folder_has_no_faults(folder, capsys):
    assert len(list(folder.glob("*.distcp"))) == 2
    assert faults(folder) == []
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}: whole\n"


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize("by", [1, 20, 5000])
def test_a_truncated_shard(folder, by):
    path = folder / "__0_1.distcp"
    size = path.stat().st_size
    cut(path, size - by)
    assert faults(folder) == [f"__0_1.distcp has {size - by:,} bytes, {size:,} expected"]


def test_a_missing_shard(folder):
    size = (folder / "__0_0.distcp").stat().st_size
    (folder / "__0_0.distcp").unlink()
    assert faults(folder) == [f"__0_0.distcp is missing ({size:,} bytes expected)"]


@pytest.mark.parametrize("left", [0, 1, 200, -1])
def test_truncated_metadata(folder, left):
    cut(folder / ".metadata", left)
    (found,) = faults(folder)
    assert found.startswith(".metadata can't be read (")


def test_metadata_that_is_something_else(folder):
    (folder / ".metadata").write_bytes(b"\x80\x04K\x01.")  # the pickle of 1
    (found,) = faults(folder)
    assert found.startswith(".metadata can't be read (")


def test_no_config(folder):
    (folder / "farsight.json").unlink()
    assert faults(folder) == ["farsight.json is missing"]
    (folder / "farsight.json").write_text('{"architecture": ')
    (found,) = faults(folder)
    assert found.startswith("farsight.json can't be read (")


@pytest.mark.parametrize("name", [".metadata", "farsight.json", "__0_1.distcp"])
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError()], ids=["EIO", "memory"])
def test_what_cannot_be_read_now_is_not_damaged(folder, unreadable, name, error):
    unreadable(folder / name, error)
    with pytest.raises(type(error)):
        faults(folder)
    with pytest.raises(SystemExit, match="can't be read"):
        main([str(folder)])


def test_an_empty_folder(tmp_path):
    assert faults(tmp_path) == [".metadata is missing: the save was interrupted, or the file was lost"]


def test_flipped_bits_are_found_where_all_is_read(folder, capsys):
    saved = {name: torch.zeros(50, 20) for name in "abc"}
    dcp.load(saved, checkpoint_id=folder, no_dist=True)
    path = next(p for p in folder.glob("*.distcp") if saved["a"].numpy().tobytes() in p.read_bytes())
    altered = bytearray(path.read_bytes())
    at = altered.find(saved["a"].numpy().tobytes())
    altered[at + 100] ^= 1
    path.write_bytes(altered)
    dcp.load(again := {"a": torch.zeros(50, 20)}, checkpoint_id=folder, no_dist=True)
    assert not torch.equal(again["a"], saved["a"])  # torch does not notice, and neither do sizes
    assert faults(folder) == []
    assert main([str(folder)]) == 1
    _, name, *_, start, _, end, _, tensor = capsys.readouterr().out.replace(",", "").split()
    assert (name, tensor) == (path.name, "a")
    assert int(start) < at + 100 < int(end)
