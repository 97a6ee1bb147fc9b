"""Perplexity against a loop over `transformers`, and the windows against their definition."""

import dataclasses
import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoints.model_dir import write_model_dir
from configs.load import ConfigError
from configs.schema import Position, Rope, Scope, YarnRope
from data.tokenizer import load_tokenizer_dir
from evals.perplexity import encode_file, main, perplexity_by_length, window_nll
from model.build import ModelConfig, build_model, set_length
from tests.test_model import SMALL, fresh_model

BYTES = dataclasses.replace(SMALL, vocab_size=320)


@pytest.fixture
def tokenizer_dir(tmp_path):
    from configs.schema import Tokenizer
    from data.tokenizer import load_tokenizer

    load_tokenizer(Tokenizer(kind="bytes")).save(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i}: {i * i % 97} — naïve\n" for i in range(150)))
    return path


@pytest.mark.parametrize("rotary", [Rope(), YarnRope(factor=4.0, original_length=256)], ids=["rope", "yarn"])
def test_equals_a_loop_over_transformers(rotary, tmp_path, tokenizer_dir, text):
    config = ModelConfig(BYTES, Position(rotary=rotary), trained_length=256)
    write_model_dir(tmp_path / "m", config, fresh_model(config).state_dict(), tokenizer_dir=tokenizer_dir)
    main([str(tmp_path / "m"), "--data", str(text), "--lengths", "128", "512", "--json", str(tmp_path / "f.json")])
    figures = json.loads((tmp_path / "f.json").read_text())

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    ids = load_tokenizer_dir(tokenizer_dir).encode(text.read_text())
    assert figures["tokens"] == len(ids)
    for length in (128, 512):
        losses = []
        for start in range(0, len(ids) - length + 1, length):
            window = torch.tensor([ids[start : start + length]])
            with torch.no_grad():
                logprobs = theirs(window).logits[0, :-1].log_softmax(-1)
            each = -logprobs[torch.arange(length - 1), window[0, 1:]]
            losses += each[-256:].tolist()
        assert figures["lengths"][str(length)] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-3)


def test_windows_and_targets(text, tokenizer_dir):
    config = ModelConfig(BYTES, Position(), trained_length=64)
    model, tokens = fresh_model(config), encode_file(text, load_tokenizer_dir(tokenizer_dir))
    _, count = window_nll(model, tokens[: 3 * 300 + 299], 300)
    assert count == 3 * 256  # the incomplete fourth window is dropped
    _, count = window_nll(model, tokens, 100, windows=2)
    assert count == 2 * 99
    with pytest.raises(ConfigError, match=r"length 600.*has 599"):
        perplexity_by_length(model, config, tokens[:599], [64, 600])


def test_scopes_past_the_trained_length_are_reported_both_ways(text, tokenizer_dir):
    config = ModelConfig(BYTES, Position(heads=Scope()), trained_length=64)
    model, tokens = fresh_model(config), encode_file(text, load_tokenizer_dir(tokenizer_dir))
    figures = perplexity_by_length(model, config, tokens, [64, 256])
    assert figures["lengths"]["64"] == figures["lengths_scope_length"]["64"]
    assert figures["lengths"]["256"] != figures["lengths_scope_length"]["256"]
    # The second column is that of a model whose scopes were built for the length.
    grown = dataclasses.replace(config, position=Position(heads=Scope(s_max=256)))
    other = build_model(grown)
    other.load_state_dict(model.state_dict())
    set_length(other, grown, 256)
    total, count = window_nll(other.eval(), tokens, 256)
    assert figures["lengths_scope_length"]["256"] == pytest.approx(math.exp(total / count), rel=1e-5)
    assert "lengths_scope_length" not in perplexity_by_length(model, config, tokens, [32])


def test_missing_and_broken_files(tmp_path, tokenizer_dir):
    tokenizer = load_tokenizer_dir(tokenizer_dir)
    with pytest.raises(ConfigError, match=r"no file .*none\.txt"):
        encode_file(tmp_path / "none.txt", tokenizer)
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"not UTF-8 \(byte 2\)"):
        encode_file(tmp_path / "latin.txt", tokenizer)
    with pytest.raises(SystemExit, match="not a model directory"):
        main([str(tmp_path), "--data", "x", "--lengths", "8"])
