"""Documents of a mixture, each once: by weight, behind the filters, and without copies."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from farsight.configs.schema import Data, HubSource, JsonlSource, ShardsSource, StdlibSource
from farsight.data.prepare.write import Job, prepare
from farsight.data.sample import sample_documents, sample_texts, write_samples
from farsight.data.sources.build import open_sources
from farsight.data.sources.documents import split_of
from farsight.data.texts import read_texts
from farsight.data.tokenizers.tokenizer import BytesTokenizer
from tests.data.test_mixture import corpus, three

__all__ = ["three"]
BYTES = BytesTokenizer()


class TestTexts:
    def test_texts_are_drawn_by_weight_in_bytes(self, three):
        size: Counter = Counter()
        for text in sample_texts(three, 8_000):
            size[text[0]] += len(text)
        assert 8_000 <= sum(size.values()) < 9_000
        for letter, weight in {"a": 0.7, "b": 0.2, "c": 0.1}.items():
            assert size[letter] / sum(size.values()) == pytest.approx(weight, abs=0.05)

    def test_a_source_is_read_once_at_most(self, tmp_path):
        path = corpus(tmp_path / "a.jsonl", "a", [5, 6])
        config = Data(sources=(JsonlSource(path=path),), held_out=0.0)
        assert sorted(len(text) for text in sample_texts(config, 1_000)) == [5, 6]

    def test_held_out_documents_are_not_in_it(self):
        config = Data(sources=(StdlibSource(),), held_out=0.3)
        held = {document.text for document in open_sources(config, "validation")[0].documents()}
        assert not held & set(sample_texts(config, 500_000))


def written(path: Path, rows: int, seed: int = 0) -> list[str]:
    """Texts of 10 to 99 characters, some of them twice, which a JSON-lines file then holds."""
    rng = np.random.default_rng(seed)
    texts = [f"{rng.integers(rows // 2)}é".ljust(rng.integers(10, 100), "x") for _ in range(rows)]
    texts += texts[: rows // 4]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def streamed(path: str, **filters: int) -> HubSource:
    return HubSource(name="json", data_files=path, **filters)


def shards(path: str, **filters: int) -> ShardsSource:
    out = Path(path).with_suffix("")
    prepare(Job(JsonlSource(path=path), out), BYTES, processes=1)
    return ShardsSource(path=str(out), **filters)


class TestDocuments:
    @pytest.mark.parametrize("split", ["train", "validation"])
    @pytest.mark.parametrize("kind", [JsonlSource, streamed, shards])
    def test_all_that_pass_the_filters_are_taken_once(self, tmp_path, kind, split):
        texts = written(tmp_path / "a.jsonl", 300)
        source = kind(path=str(tmp_path / "a.jsonl"), min_tokens=40, max_tokens=60)
        samples = list(sample_documents(Data(sources=(source,), held_out=0.3), BYTES, split))
        expected = {t for t in texts if 40 <= len(t.encode()) <= 60 and split_of(t.encode(), 0.3) == split}
        assert len(expected) > 10
        assert sorted(sample.document.text for sample in samples) == sorted(expected)
        assert all(sample.tokens == len(sample.document.text.encode()) for sample in samples)

    def test_sources_are_mixed_by_weight_in_tokens(self, tmp_path):
        sources = []
        for letter, weight, size in (("a", 70, 40), ("b", 20, 400), ("c", 10, 150)):
            texts = [f"{letter}{i:04}".ljust(size, "x") for i in range(500)]
            path = tmp_path / f"{letter}.jsonl"
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
            sources.append(JsonlSource(path=str(path), weight=weight))
        tokens: Counter = Counter()
        for sample in sample_documents(Data(sources=tuple(sources), held_out=0.0), BYTES, "train"):
            tokens[sample.document.text[0]] += sample.tokens
            if tokens.total() > 20_000:
                break
        for letter, weight in {"a": 0.7, "b": 0.2, "c": 0.1}.items():
            assert tokens[letter] / tokens.total() == pytest.approx(weight, abs=0.03)

    def test_the_seed_decides_the_order(self, tmp_path):
        written(tmp_path / "a.jsonl", 100)

        def keys(seed):
            data = Data(sources=(JsonlSource(path=str(tmp_path / "a.jsonl")),), held_out=0.0, seed=seed)
            return [sample.document.key for sample in sample_documents(data, BYTES, "train")]

        assert keys(0) == keys(0) != keys(1)

    def test_a_written_line_says_where_its_text_came_from(self, tmp_path):
        texts = written(tmp_path / "a.jsonl", 40)
        path = str(tmp_path / "a.jsonl")
        samples = list(sample_documents(Data(sources=(JsonlSource(path=path),), held_out=0.0), BYTES, "train"))
        write_samples(tmp_path / "out.jsonl", samples)
        lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert read_texts(tmp_path / "out.jsonl") == [line["text"] for line in lines]
        for line in lines:
            file, number = line["document"].rsplit(":", 1)
            assert (file, line["source"]) == (path, f"jsonl source '{path}'")
            assert texts[int(number) - 1] == line["text"]
            assert line["tokens"] == len(line["text"].encode())
