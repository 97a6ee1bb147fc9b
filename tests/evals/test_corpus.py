"""`farsight corpus`: which documents it gathers, and perplexity over them against a loop over `transformers`."""

import dataclasses
import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.configs.load import load_config
from farsight.configs.schema import HubSource, Position, Rope
from farsight.configs.shipped import shipped_configs
from farsight.data.sources.documents import split_of
from farsight.data.tokenizers.tokenizer import BytesTokenizer
from farsight.evals.corpus import main
from farsight.evals.perplexity.__main__ import main as perplexity
from farsight.model.build import ModelConfig
from tests.model.test_model import SMALL, fresh_model

TEXTS = [f"document {i}: " + f"{i * i % 97} naïve, " * (i % 40) for i in range(300)]


@pytest.fixture
def config(tmp_path):
    """A config whose own filter keeps short documents alone; every fourth text is there twice."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS + TEXTS[::4]))
    path = tmp_path / "config.toml"
    path.write_text(
        f"""
        [tokenizer]
        kind = "bytes"
        [data]
        held_out = 0.5
        [[data.sources]]
        kind = "jsonl"
        path = "{data}"
        max_tokens = 100
        [[stages]]
        name = "first"
        [[stages]]
        name = "second"
        data = {{ held_out = 0.0 }}
        """
    )
    return path


def gathered(config, *options):
    out = config.with_name("out.jsonl")
    main([str(config), "--out", str(out), "--min-tokens", "200", "--max-tokens", "400", *options])
    return [json.loads(line) for line in out.read_text().splitlines()]


LONG = {text for text in TEXTS if 200 <= len(text.encode()) <= 400}
HELD_OUT = {text for text in LONG if split_of(text.encode(), 0.5) == "validation"}


@pytest.mark.parametrize(("options", "expected"), [(["--stage", "first"], HELD_OUT), ([], LONG)])
def test_takes_every_document_of_the_lengths_once(config, capsys, options, expected):
    lines = gathered(config, *options, "--count", "1000")
    assert 20 < len(HELD_OUT) < len(LONG)
    assert len(lines) == len(expected)
    assert {line["text"] for line in lines} == expected
    assert all(line["tokens"] == len(line["text"].encode()) for line in lines)
    printed = capsys.readouterr().out
    assert (
        f"{len(expected)} documents of 200 to 400 tokens, {sum(line['tokens'] for line in lines):,} in all" in printed
    )
    assert "1,000 were asked for, but the sources have no more" in printed


def test_seed_and_count(config, capsys):
    first, same, other = (gathered(config, "--count", "7", "--data.seed", seed) for seed in ("1", "1", "2"))
    assert first == same != other
    assert len(first) == 7
    assert "asked for" not in capsys.readouterr().out


def test_a_tokenizer_of_its_own(config, tmp_path):
    BytesTokenizer().save(tmp_path / "model" / "tokenizer")
    options = ["--tokenizer.kind", "auto", "--tokenizer", str(tmp_path / "model")]
    assert {line["text"] for line in gathered(config, *options, "--count", "1000")} == LONG


def test_no_document_is_that_long(config, capsys):
    with pytest.raises(SystemExit) as stop:
        main([str(config), "--stage", "first", "--out", str(config.with_name("none.jsonl"))])
    assert stop.value.code == 2
    assert "no source has a document of 65,536 to 131,072 tokens that is held out (data.held_out = 0.5)" in str(
        stop.value
    )
    assert not config.with_name("none.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--out", "x.txt"], "x.txt must end with .jsonl"),
        (
            ["--out", "x.jsonl", "--min-tokens", "500", "--max-tokens", "100"],
            "--min-tokens 500 is more than --max-tokens 100",
        ),
    ],
)
def test_options_that_make_no_sense(config, capsys, monkeypatch, options, words):
    monkeypatch.chdir(config.parent)
    with pytest.raises(SystemExit, match="2"):
        main([str(config), *options])
    assert words in capsys.readouterr().err
    assert not list(config.parent.glob("x.*"))


def test_no_longest_document(config):
    longest = {text for text in TEXTS if len(text.encode()) >= 300}
    assert longest
    assert {line["text"] for line in gathered(config, "--min-tokens", "300", "--max-tokens", "0")} == longest


def test_long100_reads_proof_pile_and_govreport_whole():
    data = load_config(["--job.config_file", str(shipped_configs()["long100"])]).data
    proof_pile, reports = data.sources
    assert isinstance(proof_pile, HubSource)
    assert "hoskinson-center/proof-pile/test" in proof_pile.data_files
    assert isinstance(reports, HubSource)
    assert (reports.name, reports.field) == ("ccdv/govreport-summarization", "report")
    assert (data.held_out, proof_pile.weight) == (0.0, reports.weight)


def test_perplexity_over_its_documents_equals_a_loop_over_transformers(config, tmp_path):
    lines = gathered(config, "--count", "6")
    own = ModelConfig(dataclasses.replace(SMALL, vocab_size=320), Position(rotary=Rope()), trained_length=256)
    BytesTokenizer().save(tmp_path / "tokenizer")
    write_model_dir(tmp_path / "m", own, fresh_model(own).state_dict(), tokenizer_dir=tmp_path / "tokenizer")
    arguments = ["--data", str(config.with_name("out.jsonl")), "--documents", "--lengths", "64", "200"]
    perplexity([str(tmp_path / "m"), *arguments, "--json", str(tmp_path / "f.json")])
    figures = json.loads((tmp_path / "f.json").read_text())

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    assert figures["documents"] == 6
    for length in (64, 200):
        losses = []
        for line in lines:
            window = torch.tensor([list(line["text"].encode())[-length:]])
            with torch.no_grad():
                logprobs = theirs(window).logits[0, :-1].log_softmax(-1)
            losses += (-logprobs[torch.arange(length - 1), window[0, 1:]]).tolist()
        assert figures["lengths"][str(length)] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-3)
