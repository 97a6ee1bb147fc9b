"""Training from token shards: the same batches as from the source that they were made from."""

import json
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farsight.configs.schema import Data, JsonlSource, ParquetSource, ShardsSource, Source, TextSource
from farsight.data.loader import Loader
from farsight.data.order import EpochOrder, shuffled, shuffled_all
from farsight.data.packing import IGNORE
from farsight.data.prepare.write import Job, prepare
from farsight.data.sample import sample_texts
from farsight.data.shards.reader import Shards
from farsight.data.sources.build import open_source
from farsight.data.sources.shared import SharedDocuments
from farsight.data.tokenizers.tokenizer import BytesTokenizer, train_sentencepiece
from farsight.errors import DataError

BYTES = BytesTokenizer()
L, G = 64, 8


def texts(name: str, number: int = 60) -> list[str]:
    drawn = random.Random(name)
    return [f"{name} {i} " + "word " * drawn.randrange(60) for i in range(number)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> list[tuple[Source, Source]]:
    """Sources, each beside its shards: JSON lines with bad, blank and empty ones; Parquet in row groups; text files."""
    folder = tmp_path_factory.mktemp("shards")
    lines = [json.dumps({"text": text}) for text in texts("lines")]
    lines[5:7], lines[30], lines[40] = ["{", "[]"], "", '{"text": ""}'
    for i in range(2):
        (folder / f"{i}.jsonl").write_text("".join(line + "\n" for line in lines[i::2]))
    pq.write_table(pa.table({"text": texts("rows")}), folder / "a.parquet", row_group_size=7)
    for i, text in enumerate(texts("files")):
        (folder / f"{i:02}.txt").write_text(text)
    found: list[tuple[Source, Source]] = []
    for source in (
        JsonlSource(path=str(folder / "*.jsonl"), weight=2.0, min_tokens=20, max_tokens=250),
        ParquetSource(path=str(folder / "a.parquet")),
        TextSource(path=str(folder / "*.txt"), min_tokens=100),
    ):
        out = folder / f"out-{source.kind}"
        prepare(Job(source, out, "skip", shard_bytes=1000), BYTES, 1)
        own = {name: getattr(source, name) for name in ("weight", "min_tokens", "max_tokens")}
        found.append((source, ShardsSource(path=str(out), **own)))
    return found


def data(sources) -> Data:
    return Data(sources=tuple(sources), held_out=0.2, seed=3, on_bad_row="skip")


def loaders(config: Data, ranks: int, tokenizer=BYTES, **changes) -> list[Loader]:
    sizes = {"seq_len": L, "vocab_size": tokenizer.vocab_size, "global_batch_size": G, "micro_batch_size": 1} | changes
    return [Loader(config, tokenizer, dp_rank=rank, dp_world_size=ranks, **sizes) for rank in range(ranks)]


def batches(ranks: list[Loader], steps: int) -> list[dict[str, torch.Tensor]]:
    """The next global batches, put together from all ranks."""
    of_ranks = [list(islice(rank, steps * rank.micro_batches_per_step)) for rank in ranks]
    found = []
    for step in range(steps):
        size = ranks[0].micro_batches_per_step
        micros = [batch for of_rank in of_ranks for batch in of_rank[step * size : (step + 1) * size]]
        inputs = {name: torch.cat([inputs[name] for inputs, _ in micros]) for name in micros[0][0]}
        found.append(inputs | {"labels": torch.cat([labels for _, labels in micros])})
    for rank in ranks:
        rank.close()
    return found


def assert_equal(found: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("chosen", [[0], [1], [2], [0, 1, 2]])
def test_batches_are_those_of_the_source(sources, chosen, split, ranks):
    changes = {"split": split} | ({"global_batch_size": 4} if split == "validation" else {})
    raw = batches(loaders(data(sources[i][0] for i in chosen), 1, **changes), 120)
    assert_equal(batches(loaders(data(sources[i][1] for i in chosen), ranks, **changes), 120), raw)


@pytest.mark.parametrize("packing", ["cut", "best_fit"])
def test_resumed_on_another_number_of_ranks(sources, packing):
    raw = batches(loaders(data(replace(pair[0], packing=packing) for pair in sources), 1), 60)
    config = data(replace(pair[1], packing=packing) for pair in sources)
    before = loaders(config, 4)
    found, state = batches(before, 25), {}
    for rank in before:
        state |= rank.state_dict()
    after = loaders(config, 2)
    for rank in after:
        rank.load_state_dict(state)
    assert_equal(found + batches(after, 35), raw)


def test_a_change_of_the_shards_is_noticed_at_a_resume(sources, tmp_path):
    folder = tmp_path / "own"
    source = TextSource(path=str(Path(sources[2][0].path).parent / "*.txt"))
    prepare(Job(source, folder, shard_bytes=1000), BYTES, 1)
    config = data([ShardsSource(path=str(folder))])
    (rank,) = loaders(config, 1)
    batches([rank], 2)
    state = rank.state_dict()
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"skipped": {"bad JSON": 1}}))
    (other,) = loaders(config, 1)
    with pytest.raises(DataError, match=r"manifest\.json changed"):
        other.load_state_dict(state)


def test_filters_and_splits_read_no_tokens(sources, monkeypatch):
    read, of_shard = [], Shards.tokens
    monkeypatch.setattr(Shards, "tokens", lambda self, *record: read.append(record) or of_shard(self, *record))
    config = data([replace(sources[1][1], min_tokens=200)])
    (rank,) = loaders(config, 1, global_batch_size=1)
    batches([rank], 20)
    lengths = {length for _, _, length in read}
    assert read
    assert min(lengths) >= 200


def test_no_document_that_passes_is_an_error(sources):
    (rank,) = loaders(data([replace(sources[1][1], min_tokens=10**6)]), 1)
    with pytest.raises(DataError, match="no document of the train split passes min_tokens = 1000000"):
        next(iter(rank))


def test_fewer_documents_than_rows_of_a_batch(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [f"{i} " * 200 for i in range(3)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    prepare(Job(JsonlSource(path=str(path)), tmp_path / "out"), BYTES, 1)
    config = Data(sources=(ShardsSource(path=str(tmp_path / "out")),), held_out=0)
    source = open_source(config.sources[0], 0, "train", 0)
    shared = SharedDocuments(source, 3, G, 0, lambda document: True)
    pieces = sorted((piece, lane) for lane in range(G) for piece in shared.pieces(lane, epoch=0))
    assert len({lane for _, lane in pieces}) == G
    for row, text in enumerate(rows):
        read = [shared.read(piece) for piece, _ in pieces if piece[0] == row]
        assert np.concatenate([document.ids for document in read]).tolist() == list(text.encode())
        assert [document.begins for document in read] == [True] + [False] * (len(read) - 1)
        assert [document.ends for document in read] == [False] * (len(read) - 1) + [True]


def test_another_tokenizer_is_refused(sources, tmp_path):
    other = train_sentencepiece(texts("lines"), 300, tmp_path)
    with pytest.raises(DataError, match=r"made by another tokenizer \(bytes\) .* Set tokenizer.path = "):
        loaders(data([sources[1][1]]), 1, other)
    with pytest.raises(DataError, match="path is empty"):
        loaders(data([ShardsSource()]), 1)


def test_texts_are_decoded_for_those_who_need_them(sources):
    config = replace(data([sources[1][1]]), held_out=0.0)
    assert sorted(sample_texts(config, 10**6)) == sorted(texts("rows"))


def test_labels_end_with_documents(sources):
    """Against the packing written out: the labels of a row are its next tokens, and none at a document's end."""
    (rank,) = loaders(data([sources[1][1]]), 1)
    (step,) = batches([rank], 1)
    for row in range(G):
        ids, labels, starts = (step[name][row].tolist() for name in ("input", "labels", "document_starts"))
        for t in range(L - 1):
            assert labels[t] == (ids[t + 1] if starts[t + 1] == starts[t] else IGNORE)


@given(st.integers(1, 2**45), st.integers(0, 2**64 - 1), st.data())
def test_many_indices_are_shuffled_as_one_by_one(size, seed, drawn):
    indices = drawn.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20))
    assert shuffled_all(np.array(indices), size, seed).tolist() == [shuffled(i, size, seed) for i in indices]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(0, 3))
def test_rows_of_an_epoch(blocks, epoch):
    order = EpochOrder(blocks, 7)
    one_by_one = [order.row(epoch * order.rows + place)[1] for place in range(order.rows)]
    assert order.rows_of_epoch(epoch, np.arange(order.rows)).tolist() == one_by_one
    assert sorted(one_by_one) == list(range(order.rows))
