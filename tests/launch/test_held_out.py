"""The held-out documents that a recipe measures its stages on: each stage's own, whole, and long enough."""

import json
from pathlib import Path

import pytest
import torch

from farsight.data.sources.documents import split_of
from farsight.errors import ConfigError
from farsight.evals.windows import Windows
from farsight.launch.recipe.held_out import held_out_file, texts_of
from farsight.launch.recipe.summary import _first, summary_table
from farsight.training.stages import load_recipe

TEXTS = [f"{i} ".ljust(10 + 7 * i % 600, "x") for i in range(1500)]
HELD_OUT = [text for text in TEXTS if split_of(text.encode(), 0.3) == "validation"]


@pytest.fixture
def recipe(tmp_path):
    """Reads a recipe whose stages keep documents of other lengths; options change it."""
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "r.toml").write_text(
        f"""
        [recipe]
        name = "r"
        folder = "{tmp_path}"
        perplexity_tokens = 1000
        [model]
        flavor = "tiny"
        [tokenizer]
        kind = "bytes"
        [data]
        held_out = 0.3
        sources = [{{ kind = "jsonl", path = "{tmp_path}/data.jsonl", max_tokens = 300 }}]
        [[stages]]
        name = "short"
        training = {{ seq_len = 50, global_batch_size = 1, local_batch_size = 1 }}
        [[stages]]
        name = "long"
        training = {{ seq_len = 100, global_batch_size = 1, local_batch_size = 1 }}
        data.sources = [{{ kind = "jsonl", path = "{tmp_path}/data.jsonl", min_tokens = 350 }}]
        """
    )
    return lambda **own: load_recipe(tmp_path / "r.toml", {"recipe": own})


def documents(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def test_each_stage_has_documents_that_pass_its_own_filters(recipe):
    short, long = map(documents, texts_of(*recipe()))
    # 1,000 tokens at 4 times 50 and 100.
    assert (len(short), len(long)) == (5, 2)
    assert set(short) <= {text for text in HELD_OUT if 200 <= len(text) <= 300}
    assert set(long) <= {text for text in HELD_OUT if len(text) >= 400}


def test_documents_are_all_that_there_are_if_more_are_asked_for(recipe, caplog):
    short, long = map(documents, texts_of(*recipe(perplexity_tokens=100_000)))
    assert sorted(short) == sorted(text for text in HELD_OUT if 200 <= len(text) <= 300)
    assert sorted(long) == sorted(text for text in HELD_OUT if len(text) >= 400)
    assert f"stage short: {len(short)} of 500 held-out documents with 200 tokens or more" in caplog.text


def test_shorter_documents_if_none_is_long_enough(recipe, caplog):
    """At 8 times 50 tokens: the filter ends at 300."""
    short, _ = map(documents, texts_of(*recipe(perplexity_lengths=[1, 5, 8], perplexity_tokens=2000)))
    assert len(short) == 5
    assert all(250 <= len(text) <= 300 for text in short)
    assert caplog.text == ""
    assert texts_of(*recipe(perplexity_lengths=[], perplexity_tokens=2000)) == []


def test_reading_ends_where_documents_are_too_rare(recipe, caplog, monkeypatch):
    monkeypatch.setattr("farsight.launch.recipe.held_out._MOST_READ", 3)
    short, _ = map(documents, texts_of(*recipe(perplexity_tokens=2000, perplexity_lengths=[6])))
    assert short == [] or {len(text) for text in short} == {300}
    assert "of 6 held-out documents with 300 tokens or more, among 6," in caplog.text


def test_they_are_gathered_once_for_the_same_settings(recipe):
    stages = recipe()[1]
    first = texts_of(*recipe())
    times = [path.stat().st_mtime_ns for path in first]
    assert texts_of(*recipe()) == first
    assert [path.stat().st_mtime_ns for path in first] == times
    assert held_out_file(stages[0].folder) == first[0]
    other = texts_of(*recipe(perplexity_tokens=600))
    assert not set(other) & set(first)
    assert held_out_file(stages[1].folder) == other[1]


def test_a_file_of_ones_own_is_for_all_stages(recipe, tmp_path):
    assert texts_of(*recipe(perplexity_data="book.txt")) == [Path("book.txt")] * 2
    with pytest.raises(ConfigError, match=r"perplexity_tokens = 0 needs recipe.perplexity_data"):
        texts_of(*recipe(perplexity_tokens=0))


def test_tokens_read_of_a_file_of_ones_own():
    """Of plain texts the first tokens; of documents the first ones that are long enough."""
    found = [torch.arange(n) for n in (30, 5, 40, 50)]
    assert [len(d) for d in _first(found, 50, 20, Windows())] == [30, 5, 15, 0]
    assert [len(d) for d in _first(found, 50, 20, Windows(final=True))] == [30, 40]
    assert [len(d) for d in _first(found, 5, 20, Windows(final=True))] == [30]


def test_the_table_compares_stages_on_the_last_ones_documents():
    shared = {"steps": 4, "train_loss": [6.0, 5.0], "val_loss": [], "tokens_per_second": 1.0}
    first = {**shared, "name": "a", "perplexity": {"64": 10.0}, "perplexity_last": {"64": 20.0}}
    last = {**shared, "name": "b", "perplexity": {"128": 30.0}}
    assert summary_table([first, last]).splitlines()[-3:] == [
        "perplexity on the last stage's documents:",
        f"{'a':<16}64: 20.0",
        f"{'b':<16}128: 30.0",
    ]
    assert len(summary_table([last]).splitlines()) == 3
    assert summary_table([first, {**last, "evaluations": {"needle.mean": 0.25, "ppl.64": 31.5}}]).splitlines()[-2:] == [
        "last evaluations on the way:",
        f"{'b':<16}needle.mean: 0.25   ppl.64: 31.5",
    ]
