"""Tokenizer directories: exported ones put bos first as training does, and errors name bad files."""

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sentencepiece
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from farsight.configs.schema import Data, TextSource
from farsight.data.mixture import MixedSource, Mixture
from farsight.data.sources.build import open_sources
from farsight.data.tokenizer import main
from farsight.data.tokenizers.tokenizer import BytesTokenizer, Tokenizer, load_tokenizer_dir, train_sentencepiece
from farsight.errors import ConfigError, DataError

TEXT = Path(random.__file__).read_text()[:5000] + "  日本 é\t\r\n 🙂\n"


def byte_level(folder: Path, post_processor=None, **config) -> Path:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Fast(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<s>", "</s>"])
    if post_processor is not None:
        fast.post_processor = post_processor
    folder.mkdir()
    fast.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def foreign_sentencepiece(folder: Path) -> Path:
    """A tokenizer that prepends a space to a text, like Llama 2's."""
    folder.mkdir()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()), model_prefix=str(folder / "tokenizer"), vocab_size=400,
        byte_fallback=True, model_type="bpe", minloglevel=2, normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )  # fmt: skip
    return folder


def template(text: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(text, f"{text} $B", [("<s>", 256), ("</s>", 257)])


BYTE_LEVEL = processors.ByteLevel(trim_offsets=True)
KINDS = {
    "bytes": lambda folder: BytesTokenizer(),
    "sentencepiece": lambda folder: train_sentencepiece([TEXT], 350, folder),
    "foreign sentencepiece": lambda folder: load_tokenizer_dir(foreign_sentencepiece(folder)),
    "without post-processor": lambda folder: load_tokenizer_dir(byte_level(folder)),
    "like Llama 3's": lambda folder: load_tokenizer_dir(byte_level(folder, template("<s> $A"))),
    "like GPT-2's": lambda folder: load_tokenizer_dir(byte_level(folder, BYTE_LEVEL, tokenizer_class="GPT2Tokenizer")),
    "steps": lambda folder: load_tokenizer_dir(
        byte_level(folder, processors.Sequence([BYTE_LEVEL, template("<s> $A")]))
    ),
    "without bos": lambda folder: load_tokenizer_dir(byte_level(folder, BYTE_LEVEL, bos_token=None)),
}


@pytest.fixture(params=KINDS)
def tokenizer(request, tmp_path) -> Tokenizer:
    return KINDS[request.param](tmp_path / "own")


def test_transformers_begins_a_text_as_training_does(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_bytes(TEXT.encode())
    config = Data(sources=(TextSource(path=str(tmp_path / "a.txt")),), held_out=0.0)
    mixed = MixedSource(config.sources[0], open_sources(config, "train")[0], tokenizer, tokenizer.vocab_size)
    trained = Mixture([mixed], 0, 0, 1).draw().tokens.tolist()
    assert trained.pop() == tokenizer.eos_id
    tokenizer.save(tmp_path / "saved")
    exported = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert exported(TEXT)["input_ids"] == trained
    assert (trained[0] == tokenizer.bos_id) == (tokenizer.bos_id is not None)
    assert (exported("a", "b")["input_ids"][0] == tokenizer.bos_id) == (tokenizer.bos_id is not None)


def test_an_exported_tokenizer_is_the_same_to_a_resume(tokenizer, tmp_path):
    """Even exported twice, it has the fingerprint of the tokenizer that training began with."""
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer_dir(tmp_path / "saved")
    again.save(tmp_path / "twice")
    for one in (again, load_tokenizer_dir(tmp_path / "twice")):
        assert one.fingerprint == tokenizer.fingerprint
        assert one.encode(TEXT) == tokenizer.encode(TEXT)
        assert one.begins_with_bos == (tokenizer.bos_id is not None)


def test_a_tokenizer_that_transformers_saved_again_encodes_as_before(tokenizer, tmp_path):
    """It keeps `farsight_kind`, but of sentencepiece's two files tokenizer.json alone."""
    tokenizer.save(tmp_path / "tokenizer")
    AutoTokenizer.from_pretrained(tmp_path / "tokenizer").save_pretrained(tmp_path / "again")
    again = load_tokenizer_dir(tmp_path / "again")
    assert (again.bos_id, again.eos_id) == (tokenizer.bos_id, tokenizer.eos_id)
    ids = tokenizer.encode(TEXT)
    assert again.encode(TEXT) == ids
    assert again.decode(ids) == tokenizer.decode(ids)


def test_an_exported_file_that_was_edited_is_another_tokenizer(tmp_path):
    tokenizer = KINDS["like GPT-2's"](tmp_path / "own")
    tokenizer.save(tmp_path / "saved")
    path = tmp_path / "saved" / "tokenizer.json"
    path.write_text(path.read_text().replace('"</s>"', '"<e>"'))
    (tmp_path / "saved" / "tokenizer_config.json").write_text(
        (tmp_path / "saved" / "tokenizer_config.json").read_text().replace("</s>", "<e>")
    )
    assert load_tokenizer_dir(tmp_path / "saved").fingerprint != tokenizer.fingerprint


def test_an_end_that_a_file_adds_stays(tmp_path):
    tokenizer = load_tokenizer_dir(byte_level(tmp_path / "own", template("$A </s>")))
    tokenizer.save(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("a")["input_ids"] == [256, *tokenizer.encode("a"), 257]


FAST = '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}'


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer.model": b""}, "tokenizer.model is empty"),
        ({"tokenizer.model": b"\0" * 1000}, "tokenizer.model: not a sentencepiece model"),
        *(
            ({"tokenizer.json": content}, "tokenizer.json: not a tokenizer.json that")
            for content in (b"", b"[]", b"{}", b"null", b"nope", b"\xff\xfe[\0", b'{"model": null}', b"[" * 100_000)
        ),
        ({"tokenizer.json": FAST.replace('"a": 0, "b": 1', "").encode()}, "its vocabulary is empty"),
        (
            {"tokenizer.json": FAST.replace('"b": 1', '"b": 999999999').encode()},
            "tokenizer.json: the token 'b' has id 999,999,999, in a vocabulary of 2",
        ),
        *(
            ({"tokenizer.json": FAST.encode(), "tokenizer_config.json": config}, f"tokenizer_config.json {why}")
            for config, why in (
                (b"[]", r"holds \[\], not a JSON object"),
                (b"\xff", "is not valid JSON"),
                (b"[" * 100_000, "is not valid JSON"),
            )
        ),
        *(
            ({"tokenizer.json": FAST.encode(), "tokenizer_config.json": config}, f"tokenizer_config.json: {why}")
            for config, why in (
                (b'{"bos_token": ["a"]}', r"bos_token is '\['a'\]'"),
                (b'{"eos_token": {}}', "eos_token is '{}'"),
                (b'{"chat_template": 5}', "chat_template is int, not a text"),
                (b'{"chat_template": [{"name": "default"}]}', "chat_template is a list, but not of"),
                (b'{"chat_template": {"default": []}}', "chat_template is list, not a text"),
            )
        ),
        *(
            (
                {"tokenizer.json": FAST.encode(), "generation_config.json": b'{"bos_token_id": %s}' % wrong},
                r"generation_config.json: bos_token_id is .*which tokenizer.json does not have",
            )
            for wrong in (b"2", b"-4", b"true")
        ),
        ({"tokenizer.json": FAST.encode(), "chat_template.jinja": b"\xff"}, "chat_template.jinja: not UTF-8"),
    ],
)
def test_broken_files_are_named(tmp_path, files, words):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError if "JSON" in words else DataError, match=words) as error:
        load_tokenizer_dir(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_training_takes_parquet_and_spares_what_is_there(tmp_path, capsys):
    pq.write_table(pa.table({"body": [f"line {i} of the text\n" for i in range(300)]}), tmp_path / "a.parquet")
    out = tmp_path / "out"
    options = ["train", "--vocab-size", "300", "--out", str(out), "--parquet", str(tmp_path / "*.parquet")]
    main([*options, "--field", "body"])
    model = (out / "tokenizer.model").read_bytes()
    for arguments, words in [
        ([*options, "--field", "body"], f"{out} exists and is not empty; name a new folder"),
        ([*options[:4], str(tmp_path / "a.parquet")], "a.parquet is a file; name a new folder"),
        ([*options[:4], str(tmp_path / "b"), *options[5:]], "no column 'text'"),
    ]:
        with pytest.raises(SystemExit, match=words) as stop:
            main(arguments)
        assert stop.value.code == 2
    assert (out / "tokenizer.model").read_bytes() == model
    for arguments, words in [
        (["--text", "x", "--field", "body"], "--field goes with --jsonl or --parquet"),
        (["--vocab-size", "nan"], "'nan' is not a whole number"),
        (["--max-bytes", "-1"], "-1 must be at least 1"),
        (["--parquet", "x", "--jsonl", "y"], "not allowed with"),
    ]:
        with pytest.raises(SystemExit):
            main(["train", "--out", str(tmp_path / "c"), *arguments])
        assert words in capsys.readouterr().err
