"""Tokenizers: they lose nothing, load again after saving, and agree with transformers."""

import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Fast

from farsight.configs import schema
from farsight.data.sample import sample_texts
from farsight.data.tokenizer import main
from farsight.data.tokenizers.sentencepiece import to_fast_tokenizer
from farsight.data.tokenizers.tokenizer import (
    BytesTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    load_tokenizer,
    load_tokenizer_dir,
    train_sentencepiece,
)
from farsight.errors import DataError

CODE = 'def f(x):\r\n\tif x  ==  "é\u2581🙂":   # naïve — 日本\n\n        return x \n'


@pytest.fixture(scope="session")
def stdlib_texts():
    return list(sample_texts(schema.Data(), 1_000_000))


@pytest.fixture(scope="session")
def trained(stdlib_texts, tmp_path_factory):
    return train_sentencepiece(stdlib_texts, 1024, tmp_path_factory.mktemp("sentencepiece"))


@pytest.fixture(scope="session")
def byte_level_json(tmp_path_factory):
    """A tokenizer.json like Llama 3's or GPT-2's: byte-level BPE, here with few merges."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {letter: i for i, letter in enumerate(sorted(letters))}
    merges = [("d", "e"), ("de", "f"), ("Ġ", "Ġ")]
    vocabulary |= {left + right: 256 + i for i, (left, right) in enumerate(merges)}
    fast = Fast(models.BPE(vocabulary, merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    directory = tmp_path_factory.mktemp("huggingface")
    fast.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="session", params=["bytes", "sentencepiece", "huggingface"])
def tokenizer(request) -> Tokenizer:
    if request.param == "bytes":
        return BytesTokenizer()
    if request.param == "sentencepiece":
        return request.getfixturevalue("trained")
    return load_tokenizer_dir(request.getfixturevalue("byte_level_json"))


@settings(deadline=None)
@given(text=st.text())
@example(text=CODE)
@example(text="\u2581\u2581 a \u2581")
@example(text=" \x00\ufeff\u2028\t\t\r")
@example(text="<|bos|></s><s><|begin_of_text|>")
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_array(text).tolist() == ids
    assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)
    assert tokenizer.one_token_a_byte
    assert len(ids) <= len(text.encode())


def test_source_code_round_trips(tokenizer, stdlib_texts):
    for text in stdlib_texts[:40]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_saved_tokenizer_loads_as_the_same(tokenizer, tmp_path, stdlib_texts):
    tokenizer.save(tmp_path)
    again = load_tokenizer_dir(tmp_path)
    assert type(again) is type(tokenizer)
    assert again.fingerprint == tokenizer.fingerprint
    assert (again.vocab_size, again.bos_id, again.eos_id) == (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id)
    for text in [CODE, *stdlib_texts[:5]]:
        assert again.encode(text) == tokenizer.encode(text)


def test_end_tokens_go_with_a_sentencepiece_model(trained, tmp_path):
    """generation_config.json may list several, and is saved with the tokenizer, as beside a tokenizer.json."""
    trained.save(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    load_tokenizer_dir(tmp_path / "model").save(tmp_path / "saved")
    assert (tmp_path / "saved" / "generation_config.json").read_text() == '{"eos_token_id": [2, 5]}'


def test_transformers_loads_a_saved_tokenizer(tokenizer, tmp_path, stdlib_texts):
    from transformers import AutoTokenizer

    tokenizer.save(tmp_path)
    auto = AutoTokenizer.from_pretrained(tmp_path)
    for text in [CODE.replace("\u2581", "_"), *stdlib_texts[:40]]:
        ids = tokenizer.encode(text)
        assert auto.encode(text, add_special_tokens=False) == ids
        assert auto.decode(ids) == text
    assert (auto.bos_token_id, auto.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert HuggingFaceTokenizer(tmp_path / "tokenizer.json").begins_with_bos


def test_bytes_keep_lone_surrogates_and_decode_cut_characters():
    tokenizer = BytesTokenizer()
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ud800b"
    assert tokenizer.decode([256, *tokenizer.encode("é")[:1], 257]) == "\ufffd"
    with pytest.raises(ValueError, match="token id 258 is outside the vocabulary of 258"):
        tokenizer.decode([258])


@pytest.mark.parametrize("text", ["a\ud800b"])
def test_lone_surrogates_are_refused_where_they_cannot_be_kept(trained, byte_level_json, text):
    for tokenizer in (trained, load_tokenizer_dir(byte_level_json)):
        with pytest.raises(ValueError, match="lone surrogate"):
            tokenizer.encode(text)


def test_training_is_deterministic_and_learns_whitespace(stdlib_texts, trained, tmp_path):
    again = train_sentencepiece(stdlib_texts, 1024, tmp_path)
    assert again.fingerprint == trained.fingerprint
    assert (trained.vocab_size, trained.bos_id, trained.eos_id) == (1024, 1, 2)
    assert len(trained.encode(" " * 8)) == 1
    size = sum(len(text.encode()) for text in stdlib_texts)
    assert size / sum(len(trained.encode(text)) for text in stdlib_texts) > 2.2


def test_training_errors(tmp_path):
    with pytest.raises(ValueError, match=r"vocab_size = 200: .* set 300 or more"):
        train_sentencepiece(["text"], 200, tmp_path)
    with pytest.raises(ValueError, match=r"^vocab_size = 5000 is too large .* which fills \d+: give more text\.$"):
        train_sentencepiece(["a few words"], 5000, tmp_path)
    with pytest.raises(ValueError, match="no text"):
        train_sentencepiece([], 500, tmp_path)


@pytest.mark.parametrize(
    ("text", "asked", "refused"),
    [
        ("".join(map(chr, range(0x4E00, 0x4E00 + 80))), 320, "too small"),
        ("the quick brown fox jumps over the lazy dog, twice", 2000, "too large"),
    ],
)
def test_a_refused_vocabulary_names_the_nearest_size_that_works(tmp_path, text, asked, refused):
    with pytest.raises(DataError, match=rf"^vocab_size = {asked} is {refused} [^\n]*\.$") as error:
        train_sentencepiece([text], asked, tmp_path / "refused")
    edge = int(re.search(r"to (\d+) or", str(error.value))[1])
    assert train_sentencepiece([text], edge, tmp_path / "edge").vocab_size == edge
    with pytest.raises(DataError, match=refused):
        train_sentencepiece([text], edge + (1 if asked > edge else -1), tmp_path / "beyond")


def test_text_of_a_foreign_sentencepiece_model_is_left_to_it(tmp_path, stdlib_texts):
    """A model that changes the text (Llama 2's adds a space) encodes as sentencepiece does, and isn't converted."""
    import sentencepiece

    prefix = str(tmp_path / "tokenizer")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(stdlib_texts[0].splitlines()), model_prefix=prefix, vocab_size=400, byte_fallback=True,
        model_type="bpe", minloglevel=2,
    )  # fmt: skip
    tokenizer = load_tokenizer_dir(tmp_path)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    model = (tmp_path / "tokenizer.model").read_bytes()
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert tokenizer.encode("a  b") == processor.encode("a  b")
    assert not tokenizer.one_token_a_byte
    # It normalises with NFKC.
    assert tokenizer.growth is None
    assert to_fast_tokenizer(model) is None
    tokenizer.save(tmp_path / "saved")
    assert not (tmp_path / "saved" / "tokenizer.json").exists()
    assert load_tokenizer_dir(tmp_path / "saved").fingerprint == tokenizer.fingerprint


class TestSpecialTokens:
    def load(self, source, directory, **files):
        (directory / "tokenizer.json").write_text((source / "tokenizer.json").read_text())
        for name, value in files.items():
            (directory / f"{name}.json").write_text(json.dumps(value))
        return load_tokenizer_dir(directory)

    def test_usual_names(self, byte_level_json):
        tokenizer = load_tokenizer_dir(byte_level_json)
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (259, 260, 261)

    def test_config_wins_over_names(self, byte_level_json, tmp_path):
        config = {"bos_token": None, "eos_token": {"content": "<|begin_of_text|>"}}
        tokenizer = self.load(byte_level_json, tmp_path, tokenizer_config=config)
        assert (tokenizer.bos_id, tokenizer.eos_id) == (None, 259)

    def test_special_tokens_map_and_generation_config(self, byte_level_json, tmp_path):
        tokenizer = self.load(
            byte_level_json,
            tmp_path,
            special_tokens_map={"eos_token": "def"},
            generation_config={"bos_token_id": 260, "eos_token_id": [1, 2]},
        )
        assert (tokenizer.bos_id, tokenizer.eos_id) == (260, 257)

    def test_ambiguous_names_are_an_error(self, byte_level_json, tmp_path):
        fast = Fast.from_file(str(byte_level_json / "tokenizer.json"))
        fast.add_special_tokens(["<|endoftext|>"])
        fast.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(ValueError, match=r"which token is eos\? .*<\|endoftext\|>.*tokenizer_config.json"):
            load_tokenizer_dir(tmp_path)

    def test_token_that_is_not_there(self, byte_level_json, tmp_path):
        with pytest.raises(ValueError, match=r"bos_token is '<x>', which tokenizer.json does not have"):
            self.load(byte_level_json, tmp_path, tokenizer_config={"bos_token": "<x>"})

    def test_truncation_and_padding_of_the_file_are_off(self, byte_level_json, tmp_path):
        fast = Fast.from_file(str(byte_level_json / "tokenizer.json"))
        fast.enable_truncation(4)
        fast.enable_padding(length=8)
        fast.save(str(tmp_path / "tokenizer.json"))
        assert len(load_tokenizer_dir(tmp_path).encode("abcdefgh" * 5)) == 30  # "def" is one token


class TestLoading:
    def test_kinds(self, trained, byte_level_json, tmp_path):
        trained.save(tmp_path)
        assert isinstance(load_tokenizer(schema.Tokenizer(kind="bytes")), BytesTokenizer)
        for path in (tmp_path, tmp_path / "tokenizer.model"):
            for kind in ("auto", "sentencepiece"):
                assert load_tokenizer(schema.Tokenizer(kind=kind, path=str(path))).fingerprint == trained.fingerprint
        for path in (byte_level_json, byte_level_json / "tokenizer.json"):
            for kind in ("auto", "huggingface"):
                assert load_tokenizer(schema.Tokenizer(kind=kind, path=str(path))).vocab_size == 261

    def test_errors(self, byte_level_json, tmp_path):
        with pytest.raises(ValueError, match=r"tokenizer.path is empty\. .*farsight tokenizer train"):
            load_tokenizer(schema.Tokenizer())
        with pytest.raises(ValueError, match=r"tokenizer.path = /nowhere: no such file"):
            load_tokenizer(schema.Tokenizer(path="/nowhere"))
        with pytest.raises(ValueError, match=r"has no tokenizer.model, which kind = \"sentencepiece\" needs"):
            load_tokenizer(schema.Tokenizer(kind="sentencepiece", path=str(byte_level_json)))
        with pytest.raises(ValueError, match=r"tokenizer.json or tokenizer.model was looked for"):
            load_tokenizer_dir(tmp_path)
        (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
        with pytest.raises(ValueError, match=r"not a sentencepiece model.*tiktoken.*tokenizer.json"):
            load_tokenizer_dir(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(ValueError, match=r"tokenizer.json: not a tokenizer.json"):
            load_tokenizer_dir(tmp_path)


def test_command(tmp_path, capsys):
    text = tmp_path / "some.jsonl"
    text.write_text("".join(json.dumps({"body": f"line {i} of the text\n"}) + "\n" for i in range(300)))
    out, measured = str(tmp_path / "out"), tmp_path / "train.json"
    options = ["--jsonl", str(text), "--field", "body", "--json", str(measured)]
    main(["train", "--vocab-size", "300", "--out", out, *options])
    assert "bytes a token" in capsys.readouterr().out
    assert json.loads(measured.read_text())["vocab_size"] == 300

    command = [sys.executable, "-m", "farsight", "tokenizer", "show", out, "--text", "line 7"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "300 ids, bos 1, eos 2" in shown.stdout

    with pytest.raises(SystemExit, match="text source"):
        main(["train", "--out", f"{out}2", "--text", str(tmp_path / "nothing*.txt")])


class TestLongTexts:
    """Encoding slice by slice gives the tokens of the whole text."""

    def test_tokens_are_the_same(self, tokenizer, stdlib_texts, monkeypatch):
        monkeypatch.setattr("farsight.data.tokenizers.base._SLICE", 3000)
        text = "".join(stdlib_texts)[:400_000]
        slices = list(tokenizer._slices(text))
        assert "".join(slices) == text
        assert len(slices) > 50
        assert tokenizer.encode_array(text).tolist() == tokenizer.encode(text)

    @settings(deadline=None, max_examples=40)
    @given(words=st.lists(st.sampled_from(["a", " ", "\n", "\n\n", "\t", ")", "def", "é", "\u2581", "🙂", "'s", "12"])))
    def test_tokens_of_odd_texts_are_the_same(self, tokenizer, words):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("farsight.data.tokenizers.base._SLICE", 5)
            text = "".join(words) * 3
            assert np.array_equal(Tokenizer.encode_array(tokenizer, text), tokenizer.encode(text))

    def test_a_text_is_not_cut_where_a_token_would_be(self, monkeypatch):
        """A token with a line end between letters, and a tokenizer that prepends a space to each text."""
        monkeypatch.setattr("farsight.data.tokenizers.base._SLICE", 10)
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {letter: i for i, letter in enumerate(letters)} | {"aĊ": 256, "aĊb": 257}
        fast = Fast(models.BPE(vocabulary, [("a", "Ċ"), ("aĊ", "b")]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        text = "a\nb" * 30 + "c\nd" * 30
        tokenizer = HuggingFaceTokenizer.__new__(HuggingFaceTokenizer)
        tokenizer._fast, tokenizer.one_token_a_byte = fast, True
        assert tokenizer.encode_array(text).tolist() == fast.encode(text).ids
        assert all(part.endswith("c\n") for part in list(tokenizer._slices(text))[:-1])
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
        tokenizer.one_token_a_byte = False
        assert list(tokenizer._slices(text)) == [text]

    def test_progress_is_shown_after_two_seconds(self, trained, monkeypatch, capsys):
        monkeypatch.setattr("farsight.data.tokenizers.base._SLICE", 20_000)
        monkeypatch.setattr("farsight.progress.DELAY", 0.0)
        monkeypatch.setattr("farsight.progress.INTERVAL", 0.01)
        encode = type(trained).encode
        monkeypatch.setattr(trained, "encode", lambda text: time.sleep(1.5e-3) or encode(trained, text))
        text = "some words\n" * 200_000
        trained.encode_array(text)
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) > 3
        assert all(line.startswith("Tokenising: ") and "tokens/s" in line and "\r" not in line for line in lines[1:])
        assert any("M of 2.20M " in line for line in lines)
        monkeypatch.setenv("RANK", "1")
        trained.encode_array(text)
        assert not capsys.readouterr().err

    @pytest.mark.parametrize(
        ("least", "most"), [(0, 0), (0, 900), (900, 0), (901, 0), (0, 899), (900, 900), (5000, 0), (0, 9)]
    )
    def test_a_text_out_of_bounds_is_encoded_until_that_is_certain(self, tokenizer, least, most, monkeypatch):
        monkeypatch.setattr("farsight.data.tokenizers.base._SLICE", 40)
        text = "".join(f"word {i}\n" for i in range(150))
        ids = tokenizer.encode(text)
        least, most = (bound and max(1, bound + len(ids) - 900) for bound in (least, most))
        found = tokenizer.encode_between(text, least, most)
        if least <= len(ids) <= (most or len(ids)):
            assert found.tolist() == ids
        else:
            assert found is None

    @pytest.mark.parametrize(("least", "most", "share"), [(0, 10, 0.1), (3000, 0, 0.1), (1800, 0, 0.8)])
    def test_little_of_it_is_encoded(self, trained, least, most, share, monkeypatch):
        """Of 2,403 characters and 1,602 tokens."""
        monkeypatch.setattr("farsight.data.tokenizers.base._SLICE", 80)
        monkeypatch.setattr("farsight.data.tokenizers.base._AROUND_CUT", 8)
        text, encoded = "word one\n" * 267, []
        encode = type(trained).encode
        monkeypatch.setattr(trained, "encode", lambda part: encoded.append(part) or encode(trained, part))
        assert trained.encode_between(text, least, most) is None
        slices = [part for part in encoded if len(part) > 16 and part in text]
        assert sum(map(len, slices)) <= share * len(text)


def llama2(directory: Path, added: str = "") -> Path:
    """A tokenizer.json of characters, with the steps of Llama 2's: a space is put before the text, and bytes spell the rest."""
    pieces = ["\u2581", *"abcdé", *(f"<0x{byte:02X}>" for byte in range(256))]
    fast = Fast(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return written(fast, directory, added)


def qwen(directory: Path) -> Path:
    """A tokenizer.json of bytes that composes characters first, as Qwen's."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Fast(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    fast.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(r"\s+"), behavior="isolated")
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return written(fast, directory)


def written(fast: Fast, directory: Path, added: str = "") -> Path:
    if added:
        fast.add_tokens([AddedToken(added, normalized=False)])
    directory.mkdir()
    fast.save(str(directory / "tokenizer.json"))
    return directory


class TestGrowth:
    """A text of n bytes never has more than a·n + b tokens, and no smaller a and b would do."""

    @pytest.mark.parametrize(
        ("make", "growth", "longest"),
        [(llama2, (1, 1), "日本"), (qwen, (3, 0), "\U0001d1c0"), (lambda d: llama2(d, added="<t>"), (1, 1), "日本")],
    )
    def test_of_a_tokenizer_json(self, tmp_path, make, growth, longest):
        tokenizer = load_tokenizer_dir(make(tmp_path / "t"))
        assert not tokenizer.one_token_a_byte
        assert tokenizer.growth == growth
        a_byte, more = growth
        assert len(tokenizer.encode(longest)) == a_byte * len(longest.encode()) + more
        draw = random.Random(0)
        letters = ["a", " ", "é", "e\u0301", "\u0ddd", "\U0001d1c0", "\ufdfa", "\n", "日", "<t>", "\u2581"]
        for _ in range(300):
            text = "".join(draw.choices(letters, k=draw.randrange(12)))
            tokens, size = len(tokenizer.encode(text)), len(text.encode())
            assert tokens <= a_byte * size + more
            assert size >= tokenizer.least_bytes(tokens)
            assert tokenizer.encode_between(text, tokens, tokens).tolist() == tokenizer.encode(text)

    def test_of_tokenizers_without_a_bound(self, tmp_path):
        """An added token of one byte is followed by another space; Unigram may rewrite its text in any way."""
        tokenizer = load_tokenizer_dir(llama2(tmp_path / "short", added="<"))
        assert len(tokenizer.encode("<a" * 10)) > 21
        assert tokenizer.growth is None
        assert tokenizer.least_bytes(1000) == 0
        unigram = Fast(models.Unigram([("a", 0.0), ("b", -1.0)], unk_id=0))
        assert load_tokenizer_dir(written(unigram, tmp_path / "unigram")).growth is None

    def test_of_a_sentencepiece_model_that_adds_a_space(self, tmp_path, stdlib_texts):
        import sentencepiece

        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(stdlib_texts[0].splitlines()), model_prefix=str(tmp_path / "tokenizer"), vocab_size=400,
            byte_fallback=True, model_type="bpe", minloglevel=2, normalization_rule_name="identity",
        )  # fmt: skip
        tokenizer = load_tokenizer_dir(tmp_path)
        assert tokenizer.growth == (1, 1)
        assert len(tokenizer.encode("日本")) == 7

    def test_of_ours(self, tokenizer):
        assert tokenizer.growth == (1, 0)
        assert [tokenizer.least_bytes(tokens) for tokens in (-3, 0, 7)] == [0, 0, 7]
