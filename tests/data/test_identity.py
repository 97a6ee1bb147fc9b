"""Files are identified by content: renamed, reordered, added and edited ones are detected and named at a resume."""

import json
import logging
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farsight.configs.schema import Data, HubSource, JsonlSource, ParquetSource, TextSource
from farsight.data.sources.identity import difference, identify
from farsight.errors import DataError
from tests.data.test_loader import global_batches, loader

KINDS = {"text": TextSource, "jsonl": JsonlSource, "parquet": ParquetSource, "hub": HubSource}


def write(folder: Path, kind: str, names: list[str]) -> Data:
    """Files of equal size and number of rows, read in the order of their names."""
    folder.mkdir(exist_ok=True)
    for name in names:
        texts = [f"{name} {row} " * 30 for row in range(5)]
        if kind == "parquet":
            pq.write_table(pa.table({"text": texts}), folder / name, compression="none")
        else:
            rows = texts if kind == "text" else [json.dumps({"text": text}) for text in texts]
            (folder / name).write_text("\n".join(rows) + "\n")
    glob = f"{folder}/*"
    source = HubSource(name="json", data_files=glob) if kind == "hub" else KINDS[kind](path=glob)
    return Data(sources=(source,), held_out=0.0)


def resume(config: Data, state: dict) -> None:
    loader(config, global_batch_size=2).load_state_dict(state)


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


def test_what_happened_to_a_file_is_named(tmp_path, kind):
    config = write(tmp_path / "d", kind, ["a", "b", "c", "e"])
    running = loader(config, global_batch_size=2)
    global_batches([running], 2)
    state = running.state_dict()

    def refused(*parts: str) -> None:
        with pytest.raises(DataError) as error:
            resume(config, state)
        for part in ("the files of data.sources[0]: ", *parts):
            assert part in str(error.value)

    folder = tmp_path / "d"
    resume(config, state)
    (folder / "a").rename(folder / "d")  # total bytes and rows are unchanged
    refused("a is now called d, and is read at a different place in the order")
    (folder / "d").rename(folder / "a")
    content = (folder / "b").read_bytes()
    (folder / "b").write_bytes(content.replace(b"b 4", b"B 4"))
    refused("b changed")
    (folder / "b").write_bytes(content)
    shutil.copy(folder / "a", folder / "f")
    refused("f is new")
    (folder / "f").unlink()
    (folder / "e").unlink()
    refused("e is gone")


def test_files_that_moved_or_changed_names_but_not_places_resume(tmp_path, kind):
    config = write(tmp_path / "d", kind, ["a", "b"])
    running = loader(config, global_batch_size=2)
    batches = global_batches([running], 8)
    state = loader(config, global_batch_size=2).state_dict()
    (tmp_path / "d").rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "a").rename(tmp_path / "elsewhere" / "aa")
    os.utime(tmp_path / "elsewhere" / "b", (0, 0))
    glob = f"{tmp_path}/elsewhere/*"
    moved = HubSource(name="json", data_files=glob) if kind == "hub" else KINDS[kind](path=glob)
    again = loader(Data(sources=(moved,), held_out=0.0), global_batch_size=2)
    again.load_state_dict(state)
    for one, other in zip(global_batches([again], 8), batches, strict=True):
        assert (one["input"] == other["input"]).all()


def test_checkpoints_from_before_resume_with_a_word(tmp_path, caplog):
    config = write(tmp_path / "d", "jsonl", ["a", "b"])
    state = loader(config, global_batch_size=2).state_dict()
    order = json.loads(state["order"])
    assert order.pop("the files of data.sources[0]")
    with caplog.at_level(logging.INFO):
        resume(config, state | {"order": json.dumps(order)})
    assert "the checkpoint does not record the files of data.sources[0]" in caplog.text


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 20_000, 1_000_003])
def test_ends_of_files_are_sampled_and_all_of_small_ones(tmp_path, size):
    path = tmp_path / "a"
    path.write_bytes(bytes(size))
    ((name, before),) = identify([path])
    assert (name, before.split(":")[0]) == ("a", str(size))
    for place in {0, 1, 4095, size // 7, size - 4000, size - 1}:
        if 0 <= place < size and (size < 30_000 or place < 4096 or place >= size - 4096):
            content = bytearray(size)
            content[place] = 1
            path.write_bytes(content)
            os.utime(path, ns=(place, place))
            assert identify([path])[0][1] != before


def test_words():
    a, b, c, d = (["a", "1"], ["b", "2"], ["c", "3"], ["d", "4"])
    assert difference([a, b], [["x", "1"], ["y", "2"]]) is None
    assert difference([a, b], [a, ["b", "9"]]) == "b changed"
    assert difference([a, b, c], [a, c]) == "b is gone"
    assert difference([a, c], [a, b, c]) == "b is new"
    assert difference([a, b], [["a", "2"], ["b", "1"]]) == "a changed, b changed"
    assert difference([a, b], [["x", "2"], ["y", "1"]]) == (
        "a is now called y, and is read at a different place in the order, b is now called x, and is read at a different place in the order"
    )
    assert difference([a, b], []) == "a is gone, b is gone"
    assert difference([], [a, b, c, d, ["e", "5"]]) == "a is new, b is new, c is new and 2 more"
    assert difference([a, ["b", "1"]], [a]) == "b is gone"
    assert difference([a], [a, ["b", "1"]]) == "b is new"


def test_a_file_that_vanishes_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone: No such file or directory\. Put the file back"):
        identify([tmp_path / "gone"])
