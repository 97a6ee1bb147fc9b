"""Sources: their documents, their order, and errors for bad ones."""

import gzip
import json
import logging
import os
import re
import tomllib
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from farsight.configs.load import build_config
from farsight.configs.schema import (
    Data,
    HubSource,
    JsonlSource,
    ParquetSource,
    ShardsSource,
    Source,
    StdlibSource,
    TextSource,
)
from farsight.data.order import EpochOrder, hash64, shuffled
from farsight.data.prepare.write import Job, prepare
from farsight.data.sources.build import open_source, open_sources
from farsight.data.sources.documents import DocumentSource
from farsight.data.tokenizers.tokenizer import BytesTokenizer
from farsight.errors import DataError


def open_train(config: Source, on_bad_row="error", held_out=0.0) -> DocumentSource:
    return open_source(config, held_out, "train", seed=1, on_bad_row=on_bad_row)


def read(source: DocumentSource, lane: int, lanes: int, rows: int) -> list[str]:
    reader = source.lane(lane, lanes)
    documents = [reader.read() for _ in range(rows)]
    return [document.text for document in documents if document is not None]


def write_jsonl(path: Path, texts: list[str], **columns) -> Path:
    path.write_text("".join(json.dumps({"text": text, **columns}) + "\n" for text in texts))
    return path


def names(count: int, prefix: str = "document") -> list[str]:
    return [f"{prefix} {i}" for i in range(count)]


@pytest.fixture(params=["text", "jsonl", "parquet"])
def local_source(request, tmp_path) -> DocumentSource:
    """Thirty documents in two or more files, row groups of 4."""
    texts = names(30)
    if request.param == "text":
        for i, text in enumerate(texts):
            (tmp_path / f"{i:02d}.txt").write_text(text)
        return open_train(TextSource(path=str(tmp_path)))
    if request.param == "jsonl":
        write_jsonl(tmp_path / "a.jsonl", texts[:10])
        write_jsonl(tmp_path / "b.jsonl", texts[10:])
        return open_train(JsonlSource(path=f"{tmp_path}/*.jsonl"))
    for name, part in (("a", texts[:10]), ("b", texts[10:])):
        pq.write_table(pa.table({"text": part}), tmp_path / f"{name}.parquet", row_group_size=4)
    return open_train(ParquetSource(path=f"{tmp_path}/*.parquet"))


class TestOrder:
    @settings(deadline=None)
    @given(size=st.integers(1, 300), seed=st.integers(0, 2**64 - 1))
    def test_shuffled_is_a_permutation(self, size, seed):
        assert sorted(shuffled(i, size, seed) for i in range(size)) == list(range(size))

    def test_shuffled_never_changes(self):
        """A run that resumes with a later version must find the same order."""
        assert [shuffled(i, 10, 7) for i in range(10)] == [0, 8, 5, 1, 7, 4, 2, 6, 9, 3]
        assert hash64(1, 2, 3) == 0xD56D0264932A233F

    @settings(deadline=None)
    @given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=9), seed=st.integers(0, 1000))
    def test_an_epoch_holds_every_row_once_and_keeps_blocks_together(self, sizes, seed):
        order = EpochOrder(sizes, seed)
        block_of = [block for block, size in enumerate(sizes) for _ in range(size)]
        for epoch in range(3):
            places = [order.row(epoch * order.rows + i) for i in range(order.rows)]
            assert {e for e, _ in places} == {epoch}
            assert sorted(row for _, row in places) == list(range(order.rows))
            blocks = [block_of[row] for _, row in places]
            assert sum(a != b for a, b in pairwise(blocks)) == len(sizes) - 1

    def test_epochs_and_seeds_differ(self):
        orders = {
            tuple(EpochOrder([50], seed).row(e * 50 + i)[1] for i in range(50)) for e in (0, 1) for seed in (0, 1)
        }
        assert len(orders) == 4


class TestLanes:
    @pytest.mark.parametrize("lanes", [1, 4, 7])
    def test_lanes_share_every_epoch_without_overlap(self, local_source, lanes):
        by_epoch: dict[int, Counter] = {0: Counter(), 1: Counter()}
        for lane in range(lanes):
            reader = local_source.lane(lane, lanes)
            while True:
                document = reader.read()
                if reader.epoch > 1:
                    break
                by_epoch[reader.epoch][document.text] += 1
        assert by_epoch[0] == by_epoch[1] == Counter(names(30))

    def test_more_lanes_than_documents(self, local_source):
        first = [read(local_source, lane, 90, 1)[0] for lane in range(90)]
        assert Counter(first[:30]) == Counter(first[30:60]) == Counter(first[60:]) == Counter(names(30))
        assert first[:30] != first[30:60]
        assert [local_source.lane(lane, 90).epoch for lane in (0, 29, 30, 89)] == [0, 0, 1, 2]

    def test_resume(self, local_source):
        reader = local_source.lane(2, 4)
        for _ in range(11):
            reader.read()
        again = local_source.lane(2, 4)
        again.load_state(json.loads(json.dumps(reader.state())))
        assert again.epoch == reader.epoch
        assert [again.read() for _ in range(20)] == [reader.read() for _ in range(20)]

    def test_documents_are_all(self, local_source):
        assert Counter(document.text for document in local_source.documents()) == Counter(names(30))


class TestSplit:
    def test_split_is_disjoint_complete_and_independent_of_the_seed(self, tmp_path):
        path = write_jsonl(tmp_path / "a.jsonl", names(1000))
        config = JsonlSource(path=str(path))
        held = {d.text for d in open_source(config, 0.1, "validation", 0).documents()}
        kept = {d.text for d in open_source(config, 0.1, "train", 0).documents()}
        assert not held & kept
        assert held | kept == set(names(1000))
        assert 70 < len(held) < 130
        assert held == {d.text for d in open_source(config, 0.1, "validation", 5).documents()}
        more = {d.text for d in open_source(config, 0.2, "validation", 0).documents()}
        assert held < more

    @pytest.mark.parametrize("share", [-0.1, 1.0])
    def test_share_that_is_none(self, share):
        with pytest.raises(DataError, match=f"data.held_out = {share}: .* set 0"):
            open_source(StdlibSource(), share, "train", 0)

    def test_nothing_held_out(self):
        with pytest.raises(DataError, match=r"data.held_out = 0 keeps no documents for validation; set e.g. 0.01"):
            open_source(StdlibSource(), 0.0, "validation", 0)


def test_stdlib_is_the_same_each_time_and_only_source_files():
    source, again = open_train(StdlibSource()), open_train(StdlibSource())
    assert read(source, 3, 8, 20) == read(again, 3, 8, 20)
    keys = [document.key for document in source.documents()]
    assert keys == sorted(keys)
    assert "json/decoder.py" in keys
    assert not [key for key in keys if "site-packages" in key or not key.endswith(".py")]
    assert len(keys) > 500


def test_text_keeps_line_ends(tmp_path):
    (tmp_path / "a.txt").write_bytes("one\r\ntwo\té\n".encode())
    assert read(open_train(TextSource(path=str(tmp_path / "a.txt"))), 0, 1, 1) == ["one\r\ntwo\té\n"]


def test_jsonl_reads_any_layout_of_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n\n{"text": "b\xc3\xa9"}\n   \n{"text": ""}\n{"text": "c"}')
    assert sorted(read(open_train(JsonlSource(path=str(path))), 0, 1, 7)) == ["a", "bé", "c"]


class TestBadRows:
    """Every message names the file, the line and the remedy."""

    def fails(self, config: Source, *parts: str) -> None:
        with pytest.raises(DataError) as error:
            list(open_train(config).documents())
        for part in parts:
            assert part in str(error.value)

    SKIP = 'data.on_bad_row = "skip"'

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            (b'{"text": nope}', ["bad JSON", "Expecting value", "column 10", "repair the line"]),
            (b"[" * 100_000, ["bad JSON", "repair the line"]),
            (b'{"body": "x", "id": 1}', ["missing field", "no 'text'", "body, id", "set the source's `field`"]),
            (b"{}", ["missing field", "there are: none"]),
            (b'{"text": ' + b"1" * 5000 + b"}", ["bad JSON", "repair the line"]),
            (b'{"text": 5}', ["not a string", "'text' is int", "set the source's `field`"]),
            (b'{"text": null}', ["not a string", "'text' is null"]),
            (b'["text"]', ["not an object", "found list"]),
            (b'{"text": "\xff"}', ["not UTF-8", "convert the file to UTF-8"]),
            (b'{"text": "\\ud800"}', ["not UTF-8", "lone surrogate"]),
        ],
    )
    def test_jsonl(self, tmp_path, line, words):
        path = tmp_path / "a.jsonl"
        path.write_bytes(b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine too"}\n')
        self.fails(JsonlSource(path=str(path)), f"{path}:3:", self.SKIP, *words)

        source = open_train(JsonlSource(path=str(path)), on_bad_row="skip")
        for _ in range(2):  # a row counts once, no matter how often it is read
            assert [document.text for document in source.documents()] == ["fine", "fine too"]
        assert source.skipped == {words[0]: 1}

    def test_skips_are_counted_by_reason_and_logged_once_a_file(self, tmp_path, caplog):
        for name in ("a", "b"):
            (tmp_path / f"{name}.jsonl").write_text('{"text": "fine"}\n{"text": 1}\n{"text": 2}\nnope\n')
        source = open_train(JsonlSource(path=f"{tmp_path}/*.jsonl"), on_bad_row="skip")
        with caplog.at_level(logging.WARNING):
            assert len(list(source.documents())) == 2
        assert source.skipped == {"not a string": 4, "bad JSON": 2}
        assert [record.getMessage().split(": ")[0] for record in caplog.records] == [
            f"{tmp_path}/a.jsonl:2",
            f"{tmp_path}/b.jsonl:2",
        ]

    def test_text(self, tmp_path):
        path = tmp_path / "a.txt"
        path.write_bytes(b"\xff\xfe")
        self.fails(TextSource(path=str(path)), f"{path}: not UTF-8", "convert the file to UTF-8", self.SKIP)

    @pytest.mark.parametrize("kind", [TextSource, JsonlSource])
    def test_empty_file(self, tmp_path, kind):
        for name, content in (("a", ""), ("b", '{"text": "x"}\n')):
            (tmp_path / name).write_text(content)
        config = kind(path=f"{tmp_path}/*")
        self.fails(config, f"{tmp_path}/a: empty file", "remove the file", self.SKIP)
        source = open_train(config, on_bad_row="skip")
        assert len(list(source.documents())) == 1
        assert source.skipped == {"empty file": 1}
        (tmp_path / "b").write_text("")
        with pytest.raises(DataError, match="no documents; every file is empty"):
            open_train(config, on_bad_row="skip")

    def test_parquet(self, tmp_path):
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table({"text": ["x", None, "y"], "id": [1, 2, 3]}), path, row_group_size=2)
        self.fails(ParquetSource(path=str(path)), f"{path} row 1: not a string", "null", self.SKIP)
        self.fails(ParquetSource(path=str(path), field="body"), f"{path}: no column 'body'", "id, text", "`field`")
        self.fails(ParquetSource(path=str(path), field="id"), f"{path}: column 'id' holds int64, not text", "`field`")
        source = open_train(ParquetSource(path=str(path)), on_bad_row="skip")
        assert [document.key for document in source.documents()] == [f"{path} row 0", f"{path} row 2"]
        assert source.skipped == {"not a string": 1}

        path.write_text("not parquet")
        self.fails(ParquetSource(path=str(path)), f"{path}: not a Parquet file", "Correct the source's path")
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
        self.fails(ParquetSource(path=str(path)), f"{path}: empty file", "remove the file")

    def test_file_that_disappears(self, tmp_path):
        source = open_train(TextSource(path=str(write_jsonl(tmp_path / "a.txt", names(1)))))
        (tmp_path / "a.txt").unlink()
        with pytest.raises(DataError, match=r"No such file or directory: '.*a.txt'\. Put the file back"):
            list(source.documents())

    @pytest.mark.parametrize("kind", [TextSource, JsonlSource, ParquetSource])
    def test_pipes_devices_and_links_are_no_files(self, tmp_path, kind):
        """None of them is opened, which could block forever."""
        os.mkfifo(tmp_path / "pipe.md")
        (tmp_path / "loop.md").symlink_to("loop.md")
        (tmp_path / "gone.md").symlink_to("nowhere")
        for path, words in [
            ("pipe.md", "pipe.md is a pipe or device, not a file"),
            ("p*.md", "pipe.md is a pipe or device"),
            ("loop.md", "loop.md is a link to nothing, or to itself"),
            ("g*.md", "gone.md is a link to nothing"),
            ("/dev/zero", "/dev/zero is a pipe or device"),
        ]:
            self.fails(kind(path=str(tmp_path / path)), words, "Make the path match files only")

    def test_a_loop_of_links_repeats_no_file(self, tmp_path):
        (tmp_path / "below").mkdir()
        write_jsonl(tmp_path / "a.jsonl", names(3))
        write_jsonl(tmp_path / "below" / "b.jsonl", names(2, "below"))
        (tmp_path / "below" / "up").symlink_to(tmp_path)
        (tmp_path / "aside").symlink_to(tmp_path / "below" / "b.jsonl")  # a link to a file is the user's intent
        texts = [d.text for d in open_train(JsonlSource(path=f"{tmp_path}/**")).documents()]
        assert Counter(texts) == Counter(names(3) + 2 * names(2, "below"))

    def test_utf16_and_arrays_are_called_by_their_names(self, tmp_path):
        (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": "y"}\n', encoding="utf-16")
        self.fails(JsonlSource(path=f"{tmp_path}/a.jsonl"), "a.jsonl:", "not UTF-8", "it is UTF-16", "iconv -f UTF-16")
        (tmp_path / "a.txt").write_text("words", encoding="utf-16")
        self.fails(TextSource(path=f"{tmp_path}/a.txt"), "a.txt: not UTF-8: it is UTF-16", "iconv")
        for layout in (None, 1):
            (tmp_path / "b.jsonl").write_text(json.dumps([{"text": "x"}, {"text": "y"}], indent=layout))
            self.fails(JsonlSource(path=f"{tmp_path}/b.jsonl"), "b.jsonl:1: ", "JSON array", "jq -c '.[]'")

    @pytest.mark.parametrize("change", ["shorter", "longer"])
    def test_files_that_change_while_they_are_read(self, tmp_path, change):
        path = tmp_path / "a.jsonl"
        write_jsonl(path, names(20))
        lines, text = open_train(JsonlSource(path=str(path))), open_train(TextSource(path=str(path)))
        content = path.read_bytes()
        path.write_bytes(content[:100] if change == "shorter" else content * 2)
        with pytest.raises(DataError, match=r"a\.jsonl was changed while it is being read: .* Put the file back"):
            list(text.documents())
        if change == "shorter":
            with pytest.raises(DataError, match=r"changed while it is being read: line \d+ had"):
                list(lines.documents())
        else:
            assert len(list(lines.documents())) == 20

    def test_paths(self, tmp_path):
        (tmp_path / "directory.jsonl").mkdir()
        (tmp_path / "a.jsonl.gz").write_bytes(b"x")
        for config, words in [
            (JsonlSource(), ["path is empty", "glob"]),
            (JsonlSource(path="/nowhere/*.jsonl"), ["/nowhere/*.jsonl", "no such file", "Correct the source's path"]),
            (JsonlSource(path=str(tmp_path)), [str(tmp_path), "is a directory", "glob"]),
            (JsonlSource(path=f"{tmp_path}/*.jsonl"), ["directory.jsonl", "match files only"]),
            (JsonlSource(path=f"{tmp_path}/*.gz"), ["a.jsonl.gz", "Decompress", 'kind = "huggingface"', "data_files"]),
            (TextSource(path=str(tmp_path)), ["no *.txt or *.md file"]),
            (HubSource(), ["name is empty"]),
        ]:
            self.fails(config, *words)


class TestStreamed:
    """`datasets`' own builders on local files, streamed like a dataset of the hub."""

    @pytest.fixture
    def shards(self, tmp_path):
        for shard in range(4):
            write_jsonl(tmp_path / f"{shard}.jsonl", names(300, f"shard {shard}, row"), id=1)
        return HubSource(name="json", data_files=f"{tmp_path}/*.jsonl")

    @pytest.mark.parametrize("lanes", [1, 3, 4, 10])
    def test_lanes_share_every_pass_without_overlap(self, shards, lanes):
        source = open_train(shards)
        by_epoch: dict[int, Counter] = {0: Counter(), 1: Counter()}
        for lane in range(lanes):
            reader = source.lane(lane, lanes)
            while reader.epoch < 2:
                epoch = reader.epoch
                if (document := reader.read()) is not None:
                    by_epoch[epoch][document.text] += 1
        everything = Counter(text for shard in range(4) for text in names(300, f"shard {shard}, row"))
        assert by_epoch[0] == by_epoch[1] == everything

    @pytest.mark.parametrize("lanes", [2, 10])
    @pytest.mark.parametrize("rows", [0, 5, 290, 700])
    def test_resume(self, shards, lanes, rows):
        source = open_train(shards)
        reader = source.lane(1, lanes)
        for _ in range(rows):
            reader.read()
        again = open_train(shards).lane(1, lanes)
        again.load_state(json.loads(json.dumps(reader.state())))
        assert [again.read() for _ in range(40)] == [reader.read() for _ in range(40)]

    def test_other_formats(self, tmp_path):
        pq.write_table(pa.table({"body": names(5)}), tmp_path / "a.parquet")
        (tmp_path / "a.csv").write_text("body,id\nx,1\ny,2\n")
        parquet = open_train(HubSource(name="parquet", data_files=str(tmp_path / "a.parquet"), field="body"))
        assert read(parquet, 0, 1, 5) == names(5)
        csv = open_train(HubSource(name="csv", data_files=str(tmp_path / "a.csv"), field="body"))
        assert read(csv, 0, 1, 2) == ["x", "y"]

    @pytest.mark.parametrize("suffix", ["gz", "zst", "zstd"])
    def test_compressed_lines_as_the_jsonl_source_advises(self, tmp_path, suffix):
        path = write_jsonl(tmp_path / "a.jsonl", names(300))
        compress = gzip.compress if suffix == "gz" else zstandard.compress
        packed = tmp_path / f"a.jsonl.{suffix}"
        packed.write_bytes(compress(path.read_bytes()))
        with pytest.raises(DataError, match="write its tokens once with `farsight prepare`") as error:
            open_train(JsonlSource(path=str(packed)))
        settings = dict(re.findall(r'(name|data_files) = "(.*?)"', str(error.value)))
        assert read(open_train(HubSource(**settings)), 0, 1, 300) == names(300)

    def test_data_dir(self, tmp_path):
        write_jsonl(tmp_path / "a.jsonl", names(3))
        assert read(open_train(HubSource(name="json", data_dir=str(tmp_path))), 0, 1, 3) == names(3)

    def test_errors(self, tmp_path, shards):
        with pytest.raises(DataError, match=r"huggingface source 'json \(.*/\*\.jsonl\)': no column 'body'.* id, text"):
            open_train(HubSource(name="json", data_files=shards.data_files, field="body"))
        with pytest.raises(DataError, match=r"can't be opened.*data_files = '/nowhere/\*'\.$"):
            open_train(HubSource(name="json", data_files="/nowhere/*"))
        with pytest.raises(DataError, match=r"Bad split: test.*split = 'test'"):
            open_train(HubSource(name="json", data_files=shards.data_files, split="test"))
        path = tmp_path / "null.json"
        path.write_text('{"text": "x"}\n{"text": null}\n')
        config = HubSource(name="json", data_files=str(path))
        with pytest.raises(DataError, match=r"/null\.json row 1: not a string: 'text' is null.*skip"):
            list(open_train(config).documents())
        source = open_train(config, on_bad_row="skip")
        assert len(list(source.documents())) == 1
        assert source.skipped == {"not a string": 1}

    def test_file_that_breaks_while_it_is_read(self, tmp_path):
        write_jsonl(tmp_path / "a.jsonl", names(3))
        (tmp_path / "b.jsonl").write_text('{"text": "x"}\n{"text": nope}\n')
        source = open_train(HubSource(name="json", data_files=f"{tmp_path}/*.jsonl"))
        with pytest.raises(
            DataError,
            match=r"shard 1 of 2 can't be read after row 0: .*JSON parse error.* Repair or replace .*/b\.jsonl\.",
        ):
            list(source.documents())

    @pytest.mark.parametrize("first", [{"text": "x"}, {"text": "x", "other": 1}], ids=["read", "opened"])
    def test_lines_that_are_not_json(self, tmp_path, first):
        """Streaming stops at one even if told to skip, and names what skips it; with columns of two types as it is opened."""
        lines = [json.dumps(first), json.dumps({"text": "y", "other": "z"}), "not json"]
        path = tmp_path / "a.jsonl.gz"
        path.write_bytes(gzip.compress("\n".join(lines).encode()))
        with pytest.raises(DataError) as error:
            list(open_train(HubSource(name="json", data_files=str(path)), on_bad_row="skip").documents())
        said = str(error.value)
        assert ("can't be opened" in said) == ("other" in first)
        assert f"Repair or replace {path}. Streaming can't skip" in said
        assert "hub" not in said.partition("': ")[2]
        job = Job(JsonlSource(path=str(path)), tmp_path / "shards", *re.findall(r'data.on_bad_row = "(.*?)"', said))
        prepare(job, BytesTokenizer(), processes=1)
        shards = open_source(ShardsSource(path=str(job.out)), 0.0, "train", 0, tokenizer=BytesTokenizer())
        assert sorted(document.text for document in shards.documents()) == ["x", "y"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Data(sources=()), "data.sources is empty"),
        (Data(sources=(StdlibSource(weight=0),)), r"data.sources\[0\] \(stdlib\): weight = 0; set a positive number"),
        (Data(sources=(StdlibSource(), StdlibSource(weight=-1.0))), r"data.sources\[1\].*weight = -1.0"),
        (Data(sources=(StdlibSource(weight=float("nan")),)), "weight = nan"),
        (Data(sources=(StdlibSource(min_tokens=-1),)), "min_tokens = -1.*can't be negative"),
        (
            Data(sources=(StdlibSource(min_tokens=9, max_tokens=8),)),
            "at least min_tokens = 9 and at most max_tokens = 8",
        ),
    ],
)
def test_settings_that_make_no_sense(config, words):
    with pytest.raises(DataError, match=words):
        open_sources(config, "train")


def test_configs_of_the_documentation_load():
    text = (Path(__file__).parents[2] / "docs" / "training" / "data.md").read_text()
    examples = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL)]
    configs = [build_config(example) for example in examples]
    assert [source.kind for source in configs[0].data.sources] == ["jsonl", "stdlib"]
    assert [len(config.data.sources) for config in configs[1:3]] == [1, 2]
    assert [source.weight for source in configs[4].data.sources] == [0.3, 0.2, 0.1, 0.4]
    assert configs[5].data.sources[0].packing == "best_fit"
    assert configs[6].tokenizer.path == "tokenizers/code"
