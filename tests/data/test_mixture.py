"""Mixing sources by tokens, and the length filters."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from farsight.configs.schema import Data, HubSource, JsonlSource, TextSource
from farsight.data.mixture import MixedSource, Mixture
from farsight.data.sources.build import open_sources
from farsight.data.tokenizers.tokenizer import BytesTokenizer
from farsight.errors import DataError

BYTES = BytesTokenizer()


def corpus(path: Path, letter: str, lengths: list[int]) -> str:
    """A JSONL file of documents "aaa…" of the given lengths, which have two more tokens under the bytes tokenizer."""
    path.write_text("".join(json.dumps({"text": letter * length}) + "\n" for length in lengths))
    return str(path)


def mixture(config: Data, lane: int = 0, lanes: int = 1, split="train", vocab_size=258, tokenizer=BYTES) -> Mixture:
    sources = [
        MixedSource(share, source, tokenizer, vocab_size)
        for share, source in zip(config.sources, open_sources(config, split), strict=True)
    ]
    return Mixture(sources, config.seed, lane, lanes)


@pytest.fixture
def three(tmp_path) -> Data:
    """Sources whose documents differ tenfold in length, mixed 70/20/10."""
    rng = np.random.default_rng(0)
    paths = {
        letter: corpus(tmp_path / f"{letter}.jsonl", letter, rng.integers(low, 2 * low, 200).tolist())
        for letter, low in (("a", 30), ("b", 300), ("c", 100))
    }
    weights = {"a": 70, "b": 20, "c": 10}
    return Data(sources=tuple(JsonlSource(path=paths[k], weight=weights[k]) for k in paths), held_out=0.0)


def test_shares_of_tokens_converge_to_the_weights(three):
    lanes = [mixture(three, lane, 4) for lane in range(4)]
    tokens: Counter = Counter()
    for lane in lanes:
        for _ in range(1500):
            document = lane.draw().tokens
            tokens[chr(document[1])] += len(document)
    total = sum(tokens.values())
    for letter, weight in {"a": 0.7, "b": 0.2, "c": 0.1}.items():
        assert tokens[letter] / total == pytest.approx(weight, abs=0.01)


@pytest.mark.slow
def test_the_first_tokens_of_the_lanes_are_mixed_like_all(three):
    """Lanes start with different sources, and follow the weights from the start."""
    tokens: Counter = Counter()
    for lane in range(400):
        run = mixture(three, lane, 400)
        first = np.concatenate([run.draw().tokens for _ in range(40)])[:600]
        tokens += Counter(chr(token) for token in first.tolist() if token < 256)
    for letter, weight in {"a": 0.7, "b": 0.2, "c": 0.1}.items():
        assert tokens[letter] / tokens.total() == pytest.approx(weight, abs=0.03)


def test_drawing_depends_on_seed_lane_and_lanes_only(three):
    def draw(data, lane, lanes):
        run = mixture(data, lane, lanes)
        return [run.draw().tokens.tolist() for _ in range(30)]

    assert draw(three, 1, 4) == draw(three, 1, 4)
    reseeded = Data(sources=three.sources, held_out=0.0, seed=1)
    assert (
        len({str(draw(*arguments)) for arguments in [(three, 1, 4), (three, 2, 4), (three, 1, 8), (reseeded, 1, 4)]})
        == 4
    )


@pytest.mark.parametrize("count", [0, 1, 7, 100])
def test_resume_reads_some_documents_again_and_goes_on(three, count):
    run = mixture(three, 1, 4)
    former = [run.draw() for _ in range(count)]
    some = former[-1:] + former[-30::7]
    again = mixture(three, 1, 4)
    state, places = json.loads(json.dumps([run.state(), [one.place for one in some]]))
    for one, before in zip(again.load_state(state, places), some, strict=True):
        np.testing.assert_array_equal(one.tokens, before.tokens)
    for _ in range(50):
        np.testing.assert_array_equal(again.draw().tokens, run.draw().tokens)


def test_a_stream_is_read_again_in_one_pass(tmp_path):
    """Documents of one shard are found by reading forwards, not by opening the shard for each."""
    path = corpus(tmp_path / "a.jsonl", "a", [*range(5, 300)])
    config = Data(sources=(HubSource(name="json", data_files=path),), held_out=0.0)
    run = mixture(config)
    former = [run.draw() for _ in range(200)]
    again = mixture(config)
    (source,) = again._sources
    opened, rows = [], source.source.read_shard
    source.source.read_shard = lambda *place: opened.append(place) or rows(*place)
    some = [former[150], former[3], former[77]]
    for one, before in zip(again.load_state(run.state(), [x.place for x in some]), some, strict=True):
        np.testing.assert_array_equal(one.tokens, before.tokens)
    np.testing.assert_array_equal(again.draw().tokens, run.draw().tokens)
    assert len(opened) == 1


def test_resume_tokenises_no_more_than_the_waiting_documents(tmp_path):
    """If a filter rejects nearly everything, documents before them are not read again."""
    path = corpus(tmp_path / "a.jsonl", "a", [5] * 300 + [50])
    config = Data(sources=(JsonlSource(path=path, min_tokens=20),), held_out=0.0)
    run = mixture(config)
    document = run.draw()
    again = mixture(config)
    (reader,) = again._readers
    read, count = reader.read, []
    reader.read = lambda: count.append(1) or read()
    (same,) = again.load_state(run.state(), [document.place])
    np.testing.assert_array_equal(same.tokens, document.tokens)
    assert len(count) == 1


def test_a_waiting_document_that_is_gone(tmp_path):
    path = corpus(tmp_path / "a.jsonl", "a", [30])
    run = mixture(Data(sources=(JsonlSource(path=path),), held_out=0.0))
    document = run.draw()
    filtered = mixture(Data(sources=(JsonlSource(path=path, min_tokens=40),), held_out=0.0))
    with pytest.raises(DataError, match="a document that was being packed is gone: the data files were changed"):
        filtered.load_state(run.state(), [document.place])


class TestFilters:
    @pytest.mark.parametrize(("least", "most", "kept"), [(0, 0, {9, 10, 11}), (10, 0, {10, 11}), (0, 10, {9, 10})])
    def test_lengths_count_the_text_alone(self, tmp_path, least, most, kept):
        path = corpus(tmp_path / "a.jsonl", "a", [9, 10, 11])
        run = mixture(Data(sources=(JsonlSource(path=path, min_tokens=least, max_tokens=most),), held_out=0.0))
        assert {len(run.draw().tokens) - 2 for _ in range(20)} == kept

    def test_documents_that_are_too_short_in_bytes_are_not_tokenised(self, tmp_path):
        class Counting(BytesTokenizer):
            encoded = 0

            def encode_array(self, text):
                self.encoded += 1
                return super().encode_array(text)

        path = corpus(tmp_path / "a.jsonl", "a", [5] * 50 + [20])
        tokenizer = Counting()
        config = Data(sources=(JsonlSource(path=path, min_tokens=20),), held_out=0.0)
        run = mixture(config, tokenizer=tokenizer)
        for _ in range(3):
            run.draw()
        assert tokenizer.encoded == 3

    def test_one_document_in_many_is_found_by_every_lane(self, tmp_path):
        path = corpus(tmp_path / "a.jsonl", "a", [5] * 40 + [20])
        config = Data(sources=(JsonlSource(path=path, min_tokens=20),), held_out=0.0)
        assert {len(mixture(config, lane, 8).draw().tokens) for lane in range(8)} == {22}
        streamed = Data(sources=(HubSource(name="json", data_files=path, min_tokens=20),), held_out=0.0)
        assert {len(mixture(streamed, lane, 8).draw().tokens) for lane in range(8)} == {22}

    @pytest.mark.parametrize("lanes", [1, 3, 20])
    def test_filter_that_nothing_passes(self, tmp_path, lanes):
        path = corpus(tmp_path / "a.jsonl", "a", [5] * 10)
        for source in (
            JsonlSource(path=path, min_tokens=20, max_tokens=30),
            HubSource(name="json", data_files=path, min_tokens=20, max_tokens=30),
        ):
            run = mixture(Data(sources=(source,), held_out=0.0), lanes - 1, lanes)
            with pytest.raises(DataError, match=r"no document .* passes min_tokens = 20 and max_tokens = 30\. Widen"):
                run.draw()

    def test_nothing_held_out_of_a_small_source(self, tmp_path):
        path = corpus(tmp_path / "a.jsonl", "a", [5, 6, 7])
        config = Data(sources=(JsonlSource(path=path),), held_out=1e-9)
        with pytest.raises(DataError, match=r"no document is in the validation split; raise data.held_out"):
            mixture(config, split="validation").draw()

    def test_nothing_but_bad_rows(self, tmp_path):
        (tmp_path / "a.jsonl").write_text("nope\n" * 3)
        config = Data(sources=(JsonlSource(path=str(tmp_path / "a.jsonl")),), on_bad_row="skip", held_out=0.0)
        with pytest.raises(DataError, match=r"add documents.*Skipped: {'bad JSON': 3}"):
            mixture(config).draw()


class TestIds:
    def test_document_has_its_special_tokens(self, tmp_path):
        (tmp_path / "a.txt").write_text("ab")
        run = mixture(Data(sources=(TextSource(path=str(tmp_path)),), held_out=0.0))
        assert run.draw().tokens.tolist() == [256, 97, 98, 257]

    def test_tokenizer_without_special_tokens(self, tmp_path):
        class Plain(BytesTokenizer):
            bos_id = None  # a tokenizer without bos
            eos_id = None  # and without eos

        (tmp_path / "a.txt").write_text("ab")
        run = mixture(Data(sources=(TextSource(path=str(tmp_path)),), held_out=0.0), tokenizer=Plain())
        assert run.draw().tokens.tolist() == [97, 98]

    def test_id_beyond_the_vocabulary(self, tmp_path):
        path = tmp_path / "a.txt"
        path.write_text("ab")
        config = Data(sources=(TextSource(path=str(path)),), held_out=0.0)
        with pytest.raises(DataError, match=rf"{path}: token id 256 .* vocabulary of 256.*vocab_size to at least 258"):
            mixture(config, vocab_size=256).draw()

    def test_negative_id(self, tmp_path):
        class Negative(BytesTokenizer):
            def encode_array(self, text):
                return super().encode_array(text) - 98

        path = tmp_path / "a.txt"
        path.write_text("ab")
        config = Data(sources=(TextSource(path=str(path)),), held_out=0.0)
        with pytest.raises(DataError, match=rf"{path}: token id -1 is outside"):
            mixture(config, tokenizer=Negative()).draw()
