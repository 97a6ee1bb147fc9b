"""Reading in processes: the same batches and places as in a thread, and no process that outlives its loader."""

import json
import multiprocessing
import os
import random
import signal
from dataclasses import replace
from itertools import islice

import pytest
import torch

from farsight.configs.schema import Data, JsonlSource
from farsight.data.loader import Loader
from farsight.data.tokenizers.tokenizer import BytesTokenizer
from farsight.errors import DataError
from tests.data.small_tokenizers import KINDS, small_tokenizer

pytestmark = pytest.mark.processes


def texts() -> list[str]:
    drawn = random.Random(0)
    return [f"text {i} " + "word " * drawn.randrange(40) for i in range(50)]


@pytest.fixture
def config(tmp_path) -> Data:
    lines = [json.dumps({"text": text}) for text in texts()]
    lines[7] = "{ text"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    return Data(sources=(JsonlSource(path=str(tmp_path / "a.jsonl"), min_tokens=5),), on_bad_row="skip")


def loader(config: Data, processes: int, rank: int = 0, ranks: int = 1, tokenizer=None) -> Loader:
    tokenizer = tokenizer or BytesTokenizer()
    return Loader(
        replace(config, reader_processes=processes), tokenizer, seq_len=64, vocab_size=tokenizer.vocab_size,
        global_batch_size=8, micro_batch_size=2, dp_rank=rank, dp_world_size=ranks,
    )  # fmt: skip


def drawn(source: Loader, count: int) -> list[torch.Tensor]:
    return [torch.stack([inputs["input"], inputs["positions"], labels]) for inputs, labels in islice(source, count)]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("processes", "ranks", "packing"), [(1, 1, "cut"), (3, 1, "best_fit"), (2, 2, "cut")])
def test_batches_and_places_are_those_of_a_thread(config, processes, ranks, packing):
    config = replace(config, sources=(replace(config.sources[0], packing=packing),))
    for rank in range(ranks):
        ours, theirs = (loader(config, n, rank, ranks) for n in (processes, 0))
        assert same(drawn(ours, 40), drawn(theirs, 40))
        assert ours.state_dict() == theirs.state_dict()
        assert ours.epochs == theirs.epochs
        assert ours.packed == theirs.packed
        # Best fit reads on, so that two processes meet the bad row, each in a pass of its own.
        assert [*ours.skipped.values()] == [{"bad JSON": 1}] or ranks > 1 or packing == "best_fit"
        after, expected = loader(config, processes, rank, ranks), drawn(theirs, 16)
        after.load_state_dict(ours.state_dict())
        assert same(drawn(after, 16), expected)
        for one in (ours, theirs, after):
            one.close()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tokenizer_reaches_them(config, tmp_path, kind):
    tokenizer = small_tokenizer(kind, texts(), tmp_path)
    ours, theirs = (loader(config, n, tokenizer=tokenizer) for n in (1, 0))
    assert same(drawn(ours, 8), drawn(theirs, 8))
    for one in (ours, theirs):
        one.close()


def test_errors_name_the_row(config):
    ours = loader(replace(config, on_bad_row="error"), 2)
    with pytest.raises(DataError, match=r"a\.jsonl:8: bad JSON"):
        drawn(ours, 100)


def test_no_process_outlives_the_loader(config):
    ours = loader(config, 2)
    batches = iter(ours)
    next(batches)
    children = multiprocessing.active_children()
    assert len(children) == 2
    ours.close()
    for child in children:
        child.join(10)
        assert not child.is_alive()


def test_a_killed_process_is_an_error(config):
    ours = loader(config, 2)
    batches = iter(ours)
    next(batches)
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    with pytest.raises(DataError, match=r"was killed, .* lower data\.reader_processes"):
        list(islice(batches, 1000))
