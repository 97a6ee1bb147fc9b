"""Fewer documents than rows of a batch: the rows share them, and together they make up the files."""

import json
import logging
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from farsight.configs.schema import Data, HubSource, JsonlSource, ParquetSource, TextSource
from farsight.data.loader import Loader
from farsight.data.mixture import MixedSource, Mixture
from farsight.data.sources.build import open_sources
from farsight.data.sources.documents import split_of
from farsight.data.sources.shared import SharedDocuments
from farsight.data.tokenizers.tokenizer import BytesTokenizer, Tokenizer, train_sentencepiece
from farsight.errors import DataError
from tests.data.test_loader import global_batches, loader, loaders, merged_state, same

BYTES = BytesTokenizer()


def text_of(number: int, words: int) -> str:
    """Lines of words, no two of which are equal."""
    drawn = random.Random(number)
    lines = (f"{number}.{i} {' '.join(str(drawn.random())[2:9] for _ in range(6))}\n" for i in range(words // 7))
    return "".join(lines)


def write(folder: Path, kind: str, texts: list[str]) -> Data:
    """The same documents in each kind of source."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if kind == "text":
        for i, text in enumerate(texts):
            (folder / f"{i:02d}.txt").write_text(text)
        return Data(sources=(TextSource(path=str(folder)),), held_out=0.0)
    if kind == "parquet":
        pq.write_table(pa.table({"text": texts}), folder / "a.parquet", row_group_size=2)
        return Data(sources=(ParquetSource(path=str(folder / "a.parquet")),), held_out=0.0)
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = HubSource(name="json", data_files=str(path)) if kind == "hub" else JsonlSource(path=str(path))
    return Data(sources=(source,), held_out=0.0)


def pieces_of_a_pass(config: Data, lanes: int, tokenizer: Tokenizer = BYTES, epoch: int = 0) -> list[list[np.ndarray]]:
    """The documents that each lane draws in a pass."""
    found = []
    for lane in range(lanes):
        sources = open_sources(config, "train")
        mixed = [MixedSource(s, o, tokenizer, 5000) for s, o in zip(config.sources, sources, strict=True)]
        run, drawn = Mixture(mixed, config.seed, lane, lanes), []
        while True:
            tokens = run.draw().tokens
            if run.epochs[0] > epoch:
                break
            if run.epochs[0] == epoch:
                drawn.append(tokens)
        found.append(drawn)
    return found


def put_together(pieces: list[np.ndarray], texts: list[str]) -> None:
    """Checks that every character of the documents is in exactly one piece; pieces are located by their text."""
    left = Counter()
    for piece in pieces:
        body = bytes(piece[piece < 256].tolist()).decode()
        (document,) = [i for i, text in enumerate(texts) if body in text]
        place = texts[document].index(body)
        assert (piece[0] == 256) == (place == 0)
        assert (piece[-1] == 257) == (place + len(body) == len(texts[document]))
        left[document] += len(body)
    assert left == Counter({i: len(text) for i, text in enumerate(texts)})


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "hub"])
@pytest.mark.parametrize(("sizes", "lanes"), [((4000,), 8), ((3000, 40, 900), 7), ((70, 70, 5000, 500, 70), 6)])
def test_a_pass_holds_every_character_once(tmp_path, kind, sizes, lanes):
    texts = [text_of(i, size) for i, size in enumerate(sizes)]
    config = write(tmp_path, kind, texts)
    first = pieces_of_a_pass(config, lanes)
    put_together([piece for lane in first for piece in lane], texts)
    second = pieces_of_a_pass(config, lanes, epoch=1)
    put_together([piece for lane in second for piece in lane], texts)
    as_text = [["".join(map(chr, piece)) for piece in lane] for lane in first]
    assert as_text != [["".join(map(chr, piece)) for piece in lane] for lane in second]
    assert len({str(lane) for lane in as_text}) == lanes
    # Lanes have about equal amounts of text, and lines stay whole.
    read = [sum(map(len, lane)) for lane in first]
    assert max(read) - min(read) < 200
    assert all(piece[-1] in (257, ord("\n")) for lane in first for piece in lane)


def test_tokens_are_those_of_the_whole_text(tmp_path):
    """A text cut at line ends has the same tokens as the whole."""
    text = Path(random.__file__).read_text()
    tokenizer = train_sentencepiece([text], 600, tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text(text)
    config = Data(sources=(TextSource(path=str(tmp_path / "a.txt")),), held_out=0.0)
    lanes = pieces_of_a_pass(config, 8, tokenizer)
    (pieces,) = zip(*lanes, strict=True)
    found = {tokenizer.decode(piece.tolist()): piece for piece in pieces}
    in_order = sorted(found, key=text.index)
    assert "".join(in_order) == text
    whole = np.concatenate([found[part] for part in in_order]).tolist()
    assert whole == [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]


def test_rows_of_a_batch_differ_and_positions_begin_with_the_pieces(tmp_path):
    text = text_of(0, 7000)
    config = write(tmp_path, "text", [text])
    batches = global_batches([loader(config)], 6)
    for batch in batches:
        assert len({tuple(row.tolist()) for row in batch["input"]}) == 8
        assert all(row.tolist() == list(range(64)) for row in batch["positions"])
        assert torch.equal(batch["labels"][:, :-1], batch["input"][:, 1:])
    runs = [bytes(t for t in torch.cat([b["input"][lane] for b in batches]).tolist() if t < 256) for lane in range(8)]
    assert all(run in text.encode() for run in runs)
    first = sorted(text.encode().index(run) for run in runs)
    assert first[0] == 0
    assert np.allclose(np.diff(first), len(text) / 8, atol=200)


@pytest.mark.parametrize("kind", ["text", "hub"])
@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2), (8, 1)])
def test_batches_and_resume_on_any_number_of_ranks(tmp_path, kind, before, after):
    config = write(tmp_path, kind, [text_of(i, size) for i, size in enumerate((300, 30, 400))])
    undisturbed = global_batches(loaders(config, 1), 30)  # several passes
    saving = loaders(config, before)
    same(global_batches(saving, 17), undisturbed[:17])
    state = merged_state(saving)
    resumed = loaders(config, after)
    for rank in resumed:
        rank.load_state_dict({key: state[key] for key in rank.state_dict()})
    same(global_batches(resumed, 13), undisturbed[17:])


def test_held_out_and_filtered_documents_take_no_part(tmp_path):
    """Splits and filters go by whole documents; the lanes share the rest evenly."""
    texts = [text_of(i, 1000 if i < 6 else 100) for i in range(12)]
    config = replace(write(tmp_path, "jsonl", texts), held_out=0.5)
    config = replace(config, sources=(replace(config.sources[0], min_tokens=4000),))
    kept = [text for text in texts[:6] if split_of(text.encode(), 0.5) == "train"]
    assert 0 < len(kept) < 6
    lanes = pieces_of_a_pass(config, 16)
    put_together([piece for lane in lanes for piece in lane], kept)
    assert all(lane for lane in lanes)


def test_documents_are_tokenised_once_and_in_pieces(tmp_path):
    class Counting(BytesTokenizer):
        longest, total = 0, 0

        def encode_array(self, text):
            self.longest, self.total = max(self.longest, len(text)), self.total + len(text)
            return super().encode_array(text)

    config = write(tmp_path, "text", [text_of(0, 7000)])
    tokenizer = Counting()
    sizes = {"seq_len": 64, "vocab_size": 258, "global_batch_size": 8, "micro_batch_size": 8}
    running = Loader(config, tokenizer, dp_rank=0, dp_world_size=1, **sizes)
    next(iter(running))
    running.close()
    size = len(text_of(0, 7000))
    assert tokenizer.longest < size / 8 + 100
    assert tokenizer.total <= size


def test_less_text_than_lanes_still_trains(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    config = Data(sources=(TextSource(path=str(tmp_path)),), held_out=0.0)
    (batch,) = global_batches([loader(config)], 1)
    assert set(batch["input"].flatten().tolist()) <= {*b"abc", 256, 257}


def test_texts_without_line_ends_are_cut_before_words_or_anywhere():
    class One:
        name = "one"

        def __init__(self, text):
            self.text = text

        def read_row(self, row):
            from farsight.data.sources.documents import Document

            return Document("one", self.text, len(self.text))

        def read_rows(self):
            return iter([self.read_row(0)])

    for text, ends in [("word " * 500, r"(word )*word|( word)*|( word)* "), ("x" * 2500, "x*")]:
        shared = SharedDocuments(One(text), 1, 7, 0, lambda document: True)
        pieces = [shared.read(piece) for lane in range(7) for piece in shared.pieces(lane, 0)]
        assert sum(len(piece.text) for piece in pieces) == len(text)
        assert all(re.fullmatch(ends, piece.text) for piece in pieces)


def test_it_is_said_and_short_parts_are_warned_of(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        loader(write(tmp_path, "text", [text_of(0, 7000)]))
    (line,) = [r.getMessage() for r in caplog.records]
    assert "data.sources[0], text source" in line
    assert "1 document for the 8 rows of a batch: documents are cut" in line
    caplog.clear()
    (tmp_path / "00.txt").write_text("few words")
    with caplog.at_level(logging.INFO):
        loader(Data(sources=(TextSource(path=str(tmp_path)),), held_out=0.0))
        loader(Data(sources=(TextSource(path=str(tmp_path)),), held_out=0.0), rank=1, ranks=2)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "rows of a batch have 64 tokens, and these parts about 1." in warning
    assert "Add text, or lower training.global_batch_size or training.seq_len" in warning


def test_an_order_from_before_is_refused(tmp_path):
    """Lanes read whole documents then: resuming in the middle of them would repeat and omit text."""
    running = loader(write(tmp_path, "text", [text_of(0, 7000)]))
    state = running.state_dict()
    order = json.loads(state["order"])
    del order["the way rows of a batch share data.sources[0]"]
    with pytest.raises(DataError, match=r"the way rows of a batch share data.sources\[0\] was None"):
        running.load_state_dict(state | {"order": json.dumps(order)})
