"""Published corpora: imitations of all that the documentation lists are read, whatever their layout, compression and columns."""

import re
import tomllib
from collections import Counter
from pathlib import Path

import datasets
import pytest

from farsight.configs.finetuning import InstructionHub
from farsight.configs.schema import HubSource
from farsight.data.instructions.conversations import to_conversation
from farsight.data.sources.build import open_source
from farsight.data.sources.documents import DocumentSource
from farsight.data.sources.streamed import open_dataset
from farsight.errors import DataError
from tests.published import ROWS, STARCODER, texts, write, write_published

PAGE = (Path(__file__).parents[2] / "docs/training/corpora.md").read_text()


def settings(heading: str) -> dict[str, dict]:
    """The settings of each row of a table of the page, by the name in its first column."""
    table = PAGE.split(f"| {heading} |")[1].split("\n\n")[0]
    found = re.findall(r"^\| (.+?) \| `(.+?)`", table, re.MULTILINE)
    return {name: tomllib.loads(f"source = {{ {inline} }}")["source"] for name, inline in found}


CORPORA, INSTRUCTIONS = settings("corpus"), settings("dataset")
FILES = {
    "RefinedWeb": ["train-00000-of-05534-b8fc5348cbe605a5", "train-00001-of-05534-9bca3ce859516338"],
    "C4, English": ["en"],
    "C4, Chinese (mC4)": ["zh"],
    "SlimPajama-627B": [f"cerebras/SlimPajama-627B/train/chunk{i}/example_train_0.jsonl.zst" for i in (1, 2)],
    "StarCoderData": [
        f"bigcode/starcoderdata/{name}/train-00000-of-00001.parquet" for name in ("c", "cpp", "java", "python")
    ],
    "Proof-Pile-2": ["algebraic-stack", "arxiv", "open-web-math"],
    "FineWeb-Edu": ["sample/10BT/000_00000"],
    "DCLM-baseline": [
        f"global-shard_{i:02}_of_10/local-shard_0_of_10/shard_00000000_processed.jsonl.zstd" for i in (1, 2)
    ],
    "Ultra-FineWeb": ["data/ultrafineweb_en/ultrafineweb-en-part-0001-of-2048.parquet"],
}
"""The imitated files that hold a corpus's training rows."""


@pytest.fixture(scope="module", autouse=True)
def published(tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", root / "cache")
        write_published(root)
        yield root


def opened(**settings) -> DocumentSource:
    return open_source(HubSource(**settings), 0.0, "train", seed=1)


def read(source: DocumentSource) -> Counter:
    return Counter(document.text for document in source.documents())


@pytest.mark.parametrize("corpus", CORPORA)
def test_every_row_of_a_corpus_is_read_once(corpus):
    given = dict(CORPORA[corpus])
    if "data_files" in given:
        given["data_files"] = given["data_files"].removeprefix("hf://datasets/")
    source = opened(**given)
    assert source.shards == len(FILES[corpus])
    assert read(source) == Counter(text for file in FILES[corpus] for text in texts(file))


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_datasets_for_fine_tuning(name):
    rows = open_dataset(InstructionHub(**INSTRUCTIONS[name]), name)
    assert len(rows) == ROWS
    assert [m["content"] for m in to_conversation(rows[0], "auto", "instruction", "output").messages] == ["a", "b"]


class TestFolders:
    """Several folders of a dataset as one source."""

    def lanes(self, folders, lanes: int, rows: int = 25) -> list[list[str]]:
        source = opened(name="bigcode/starcoderdata", data_dir=folders, field="content")
        readers = [source.lane(lane, lanes) for lane in range(lanes)]
        return [[d.text for _ in range(rows) if (d := reader.read()) is not None] for reader in readers]

    @pytest.mark.parametrize("lanes", [1, 3, 12, 30])
    def test_lanes_share_each_pass(self, lanes):
        source = opened(name="bigcode/starcoderdata", data_dir=STARCODER, field="content")
        found: Counter = Counter()
        for lane in range(lanes):
            reader = source.lane(lane, lanes)
            while reader.epoch == 0:
                if (document := reader.read()) is not None:
                    found[document.text] += 1
        files = (f"bigcode/starcoderdata/{folder}/train-00000-of-00001.parquet" for folder in STARCODER)
        assert found == Counter(text for file in files for text in texts(file))

    def test_order_is_that_of_the_files_in_one_folder(self, published):
        """Shards are numbered through all folders, as `datasets` numbers the files of one."""
        names = ("c", "go", "python")
        parts = [str(published / f"bigcode/starcoderdata/{name}/*.parquet") for name in names]
        for number, part in enumerate(parts):
            (found,) = published.glob(str(Path(part).relative_to(published)))
            write_to = published / f"one/{number}.parquet"
            write_to.parent.mkdir(exist_ok=True)
            write_to.write_bytes(found.read_bytes())
        together = opened(name="parquet", data_files=f"{published}/one/*.parquet", field="content")
        for lanes in (2, 5):
            readers = [together.lane(lane, lanes) for lane in range(lanes)]
            expected = [[d.text for _ in range(25) if (d := reader.read()) is not None] for reader in readers]
            assert self.lanes(names, lanes) == expected
        assert self.lanes(("python", "go", "c"), 2) != self.lanes(names, 2)

    def test_a_file_in_another_place_is_noticed(self):
        """Resuming compares files in their order over all folders."""
        first, second = (
            opened(name="bigcode/starcoderdata", data_dir=folders, field="content").describe()["files"]
            for folders in (("c", "go"), ("go", "c"))
        )
        assert [identity for _, identity in first] == [identity for _, identity in reversed(second)]
        assert len(first) == 2

    def test_a_folder_without_the_column_or_that_is_missing_is_named(self):
        with pytest.raises(
            DataError, match=r"starcoderdata \(c, git-commits-cleaned\)', git-commits-cleaned: no column 'content'"
        ):
            opened(name="bigcode/starcoderdata", data_dir=("c", "git-commits-cleaned"), field="content")
        with pytest.raises(DataError, match=r"it can't be opened: EmptyDatasetError.*/pyhton.*data_dir = 'c, pyhton'"):
            opened(name="bigcode/starcoderdata", data_dir=("c", "pyhton"), field="content")


class TestColumns:
    """Files may differ in all columns but that of the text."""

    def test_a_dataset_whose_files_have_other_columns_is_read_whole(self, published):
        with pytest.raises(Exception, match="column names don't match"):  # what the library itself does
            list(datasets.load_dataset("mlfoundations/dclm-baseline-1.0", split="train", streaming=True))
        folders = (*STARCODER, "github-issues-filtered-structured", "jupyter-structured-clean-dedup")
        source = opened(name="bigcode/starcoderdata", data_dir=folders, field="content")
        assert sum(read(source).values()) == ROWS * len(folders)

    def test_a_parquet_file_without_the_column_stops_the_run(self):
        source = opened(name="bigcode/starcoderdata", field="content")
        with pytest.raises(DataError, match=r"shard \d+ of 15 .*no column 'content': in the source's `data_dir`"):
            read(source)

    def test_rows_without_the_column_are_bad_rows(self, tmp_path):
        write(tmp_path / "a.jsonl", [{"text": "x", "id": 1}, {"text": "y", "id": 2}])
        write(tmp_path / "b.jsonl", [{"body": "z"}, {"body": "z", "text": None}])
        write(tmp_path / "c.jsonl", [{"text": "w", "id": {"a": [1]}}])
        config = HubSource(name="json", data_files=f"{tmp_path}/*.jsonl")
        with pytest.raises(DataError, match=r"/b\.jsonl row 0: not a string: 'text' is null"):
            read(open_source(config, 0.0, "train", 1))
        source = open_source(config, 0.0, "train", 1, "skip")
        assert read(source) == Counter("xyw")
        assert source.skipped == {"not a string": 2}

    def test_a_column_without_text_is_refused_at_once(self):
        with pytest.raises(DataError, match=r"column 'score' holds double, not text. Set the source's `field`"):
            opened(name="HuggingFaceFW/fineweb-edu", field="score")
        with pytest.raises(DataError, match=r"no column 'body'.*those there: meta, text"):
            opened(name="cerebras/SlimPajama-627B", field="body")
