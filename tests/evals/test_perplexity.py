"""`farsight perplexity`: against a loop over `transformers`, and its windows against their definition."""

import bz2
import dataclasses
import gzip
import itertools
import json
import lzma
import math
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard
from transformers import AutoModelForCausalLM

from farsight.checkpoints.load import load_model
from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.configs.schema import Lasp, LayerRule, LinearRope, NoRotary, Position, Rope, Scope, YarnRope
from farsight.data.texts import encode_file, read_texts
from farsight.data.tokenizers.tokenizer import load_tokenizer_dir
from farsight.errors import ConfigError
from farsight.evals.perplexity.__main__ import main
from farsight.evals.perplexity.measure import perplexity_by_length, window_nll
from farsight.evals.windows import Windows
from farsight.inference.extend import parse_extension
from farsight.model.build import ModelConfig, build_model, set_length
from tests.model.test_model import SMALL, fresh_model
from tests.running import forked

BYTES = dataclasses.replace(SMALL, vocab_size=320)


@pytest.fixture
def tokenizer_dir(tmp_path):
    from farsight.configs.schema import Tokenizer
    from farsight.data.tokenizers.tokenizer import load_tokenizer

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
    model, (tokens,) = fresh_model(config), encode_file(text, load_tokenizer_dir(tokenizer_dir))
    rows = Windows().of([tokens[: 3 * 300 + 299]], 300)
    assert torch.equal(torch.cat(rows), tokens[:900])  # the incomplete fourth window is dropped
    _, counts = window_nll(model, rows)
    assert counts.tolist() == [3 * 256]
    _, counts = window_nll(model, Windows(limit=2).of([tokens], 100))
    assert counts.tolist() == [2 * 99]
    with pytest.raises(ConfigError, match=r"length 600.*has 599"):
        perplexity_by_length(model, config, [tokens[:599]], [64, 600])
    with pytest.raises(ConfigError, match=r"buckets 64.*63 targets"):
        perplexity_by_length(model, config, [tokens], [64], Windows(buckets=64))


def test_the_same_targets_of_each_long_document_and_buckets(tmp_path, tokenizer_dir, text):
    """A loop over all logits: the last 256 tokens of every document of at least 512, then the tokens of each part."""
    config = ModelConfig(BYTES, Position(), trained_length=256)
    write_model_dir(tmp_path / "m", config, fresh_model(config).state_dict(), tokenizer_dir=tokenizer_dir)
    lines = text.read_text().splitlines()
    documents = ["\n".join(lines[:40]), "short", "\n".join(lines[40:])]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    command = [str(tmp_path / "m"), "--data", str(tmp_path / "d.jsonl"), "--lengths", "300", "512", "--documents"]
    main([*command, "--buckets", "4", "--json", str(tmp_path / "f.json"), "--picture", str(tmp_path / "p.png")])
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["documents"] == 2

    model, tokenizer = load_model(tmp_path / "m")[0], load_tokenizer_dir(tokenizer_dir)
    for length in (300, 512):
        losses = []
        for document in (documents[0], documents[2]):
            ids = torch.tensor(tokenizer.encode(document))[-length:]
            with torch.no_grad():
                logprobs = model(ids[None])[0, :-1].log_softmax(-1)
            losses.append(-logprobs.gather(1, ids[1:, None])[:, 0])
        each = torch.stack(losses)
        assert figures["lengths"][str(length)] == pytest.approx(each[:, -256:].mean().exp().item(), rel=1e-4)
        edges = [round(i * (length - 1) / 4) for i in range(5)]
        expected = [each[:, a:b].mean().exp().item() for a, b in itertools.pairwise(edges)]
        assert figures["buckets"][str(length)] == pytest.approx(expected, rel=1e-4)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("stride", [1, 12, 31])
def test_sliding_equals_each_token_on_its_own(stride, text, tokenizer_dir):
    """Each target is predicted from the tokens before it in the first window that contains it."""
    config = ModelConfig(BYTES, Position(), trained_length=32)
    model, (tokens,) = fresh_model(config), encode_file(text, load_tokenizer_dir(tokenizer_dir))
    documents = [tokens[:70], tokens[70:90], tokens[90:122], tokens[122:123]]
    figures = perplexity_by_length(model, config, documents, [32], Windows(stride=stride))
    losses, contexts = [], []
    for document in documents:
        read: dict[int, torch.Tensor] = {}
        for target in range(1, len(document)):
            start = max(0, math.ceil((target - 31) / stride)) * stride
            if start not in read:
                with torch.no_grad():
                    read[start] = model(document[None, start : start + 32])[0].log_softmax(-1)
            losses.append(-read[start][target - start - 1, document[target]])
            contexts.append((target, target - start))
    assert figures["lengths"]["32"] == pytest.approx(torch.stack(losses).mean().exp().item(), rel=1e-5)
    assert all(context >= min(target, 32 - stride) for target, context in contexts)
    first_two = torch.cat(Windows(stride=stride, limit=2).of(documents, 32))
    assert torch.equal(first_two, torch.cat([tokens[:32], tokens[stride : stride + 32]]))
    with pytest.raises(ConfigError, match="stride of 31 or less"):
        perplexity_by_length(model, config, documents, [32], Windows(stride=32))


def test_reading_in_chunks_changes_nothing(text, tokenizer_dir, monkeypatch):
    """Very long windows are read in chunks, and with an extension all windows are."""

    class Unchanged:
        def caches(self, model, config, batch):
            read.append(batch.most_tokens)

    read: list[int] = []
    config = ModelConfig(BYTES, Position(heads=Scope()), trained_length=64)
    model, (tokens,) = fresh_model(config), encode_file(text, load_tokenizer_dir(tokenizer_dir))
    documents = [tokens[:320], tokens[320:400]]
    for windows in (Windows(buckets=5), Windows(stride=60)):
        whole = perplexity_by_length(model, config, documents, [64, 300], windows)
        assert not read
        extended = perplexity_by_length(model, config, documents, [64, 300], windows, Unchanged(), chunk=100)
        assert set(read) == {64, 300}
        monkeypatch.setattr("farsight.evals.perplexity.measure.WHOLE", 100)
        long = perplexity_by_length(model, config, documents, [64, 300], windows, chunk=128)
        monkeypatch.undo()
        read.clear()
        for key in ("lengths", "lengths_scope_length"):
            assert extended[key] == pytest.approx(whole[key], rel=1e-5)
            assert long[key] == pytest.approx(whole[key], rel=1e-5)
        for key in ("log_buckets", "log_buckets_scope_length") if windows.buckets else ():
            assert long[key]["300"]["perplexity"] == pytest.approx(whole[key]["300"]["perplexity"], rel=1e-5)


def test_by_position_in_parts_of_equal_ratio(text, tokenizer_dir):
    config = ModelConfig(BYTES, Position(heads=Scope()), trained_length=64)
    model, (tokens,) = fresh_model(config), encode_file(text, load_tokenizer_dir(tokenizer_dir))
    figures = perplexity_by_length(model, config, [tokens[:600]], [256], Windows(buckets=8))
    # Nine powers of two from 1 to 256 tokens before the target.
    assert figures["log_buckets"]["256"]["edges"] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    for key, scope_max in (("log_buckets", "trained"), ("log_buckets_scope_length", "length")):
        set_length(model, dataclasses.replace(config, position=Position(heads=Scope(scope_max=scope_max))), 256)
        rows = tokens[:512].view(2, 256)
        with torch.no_grad():
            losses = -model(rows)[:, :-1].log_softmax(-1).gather(2, rows[:, 1:, None])[..., 0]
        expected = [losses[:, 2**i - 1 : 2 ** (i + 1) - 1].mean().exp().item() for i in range(8)]
        assert figures[key]["256"]["perplexity"] == pytest.approx(expected, rel=1e-4)


def test_scaling_at_evaluation_equals_transformers_with_that_scaling(tmp_path, tokenizer_dir, text):
    config = ModelConfig(BYTES, Position(rotary=Rope(theta=500.0)), trained_length=128)
    model = fresh_model(config)
    write_model_dir(tmp_path / "m", config, model.state_dict(), tokenizer_dir=tokenizer_dir)
    ids = torch.tensor(load_tokenizer_dir(tokenizer_dir).encode(text.read_text()))
    main([str(tmp_path / "m"), "--data", str(text), "--lengths", "512", "--json", str(tmp_path / "f.json")])
    unscaled = json.loads((tmp_path / "f.json").read_text())["lengths"]["512"]
    for kind, more in (("yarn", {"original_max_position_embeddings": 128}), ("linear", {}), ("dynamic", {})):
        command = [str(tmp_path / "m"), "--data", str(text), "--lengths", "128", "512", "--extend", f"{kind}:4"]
        main([*command, "--json", str(tmp_path / "f.json")])
        figures = json.loads((tmp_path / "f.json").read_text())
        rope = {"rope_type": kind, "rope_theta": 500.0, "factor": 4.0, **more}
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", rope_parameters=rope).eval()
        for length in (128, 512):
            rows = ids[: len(ids) // length * length].view(-1, length)
            with torch.no_grad():
                logprobs = torch.cat([theirs(row[None]).logits[:, :-1].log_softmax(-1) for row in rows])
            losses = -logprobs.gather(2, rows[:, 1:, None])[..., 0]
            expected = losses[:, -256:].mean().exp().item()
            assert figures["lengths"][str(length)] == pytest.approx(expected, rel=1e-5), (kind, length)
        assert figures["lengths"]["512"] != pytest.approx(unscaled, rel=1e-4), kind


def test_scalings_that_make_no_sense_are_refused():
    plain = ModelConfig(BYTES, Position(), trained_length=64)
    mixed = dataclasses.replace(plain, position=Position(rules=(LayerRule(layers="1", rotary=NoRotary()),)))
    assert parse_extension("ntk:2").change(mixed).layers()[1].rotary == NoRotary()
    for config, scaling, says in [
        (plain, "yarn", "set factor"),
        (plain, "yarn:0.5", "at least 1"),
        (plain, "llama4:2", "no method 'llama4'"),
        (dataclasses.replace(plain, position=Position(rotary=NoRotary())), "yarn:4", "no layer"),
        (dataclasses.replace(plain, position=Position(lasp=Lasp(anchor_layers=1))), "yarn:4", "LASP"),
        (dataclasses.replace(plain, position=Position(rotary=LinearRope(factor=2.0))), "yarn:4", "scaled already"),
    ]:
        with pytest.raises(ConfigError, match=says):
            parse_extension(scaling).change(config)


def test_processes_share_the_windows(text, tokenizer_dir, monkeypatch):
    config = ModelConfig(BYTES, Position(), trained_length=64)
    model = fresh_model(config)
    rows = Windows().of(encode_file(text, load_tokenizer_dir(tokenizer_dir)), 64)
    whole = window_nll(model, rows, Windows(buckets=2))
    monkeypatch.setattr("farsight.evals.perplexity.measure.dist.all_reduce", lambda sums: None)
    parts = [window_nll(model, rows, Windows(buckets=2, rank=rank, world=3)) for rank in range(3)]
    for all_of_it, shares in zip(whole, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(sum(shares), all_of_it)


def test_several_processes_and_models(tmp_path, tokenizer_dir, text):
    config = ModelConfig(BYTES, Position(heads=Scope()), trained_length=64)
    for name in ("a", "b"):
        write_model_dir(tmp_path / name, config, fresh_model(config).state_dict(), tokenizer_dir=tokenizer_dir)
    arguments = [
        str(tmp_path / "a"),
        str(tmp_path / "b"),
        "--data",
        str(text),
        "--lengths",
        "64",
        "256",
        "--buckets",
        "2",
    ]
    main([*arguments, "--json", str(tmp_path / "one.json"), "--picture", str(tmp_path / "p.png")])
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    arguments += ["--device", "cpu", "--json", str(tmp_path / "two.json")]
    done = forked(arguments, tmp_path / "printed", ranks=2, script="perplexity")
    assert done.returncode == 0, done.stderr
    one, two = (json.loads((tmp_path / f"{n}.json").read_text())["models"] for n in ("one", "two"))
    assert list(one) == [str(tmp_path / "a"), str(tmp_path / "b")]
    for folder, figures in one.items():
        for key in ("lengths", "lengths_scope_length"):
            assert two[folder][key] == pytest.approx(figures[key], rel=1e-6)
        for length, values in figures["buckets"].items():
            assert two[folder]["buckets"][length] == pytest.approx(values, rel=1e-6)


def test_scopes_past_the_trained_length_are_reported_both_ways(text, tokenizer_dir):
    config = ModelConfig(BYTES, Position(heads=Scope()), trained_length=64)
    model, (tokens,) = fresh_model(config), encode_file(text, load_tokenizer_dir(tokenizer_dir))
    figures = perplexity_by_length(model, config, [tokens], [64, 256])
    assert figures["lengths"]["64"] == figures["lengths_scope_length"]["64"]
    assert figures["lengths"]["256"] != figures["lengths_scope_length"]["256"]
    # The second column is that of a model whose scopes were built for the length.
    grown = dataclasses.replace(config, position=Position(heads=Scope(s_max=256)))
    other = build_model(grown)
    other.load_state_dict(model.state_dict())
    set_length(other, grown, 256)
    total, count = window_nll(other.eval(), Windows().of([tokens], 256))
    assert figures["lengths_scope_length"]["256"] == pytest.approx((total / count).exp().item(), rel=1e-5)
    assert "lengths_scope_length" not in perplexity_by_length(model, config, [tokens], [32])


def test_missing_and_broken_files(tmp_path, tokenizer_dir):
    tokenizer = load_tokenizer_dir(tokenizer_dir)
    with pytest.raises(ConfigError, match=r"no file .*none\.txt"):
        encode_file(tmp_path / "none.txt", tokenizer)
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"not UTF-8 \(byte 2\)"):
        encode_file(tmp_path / "latin.txt", tokenizer)
    (tmp_path / "d.jsonl").write_text('{"text": "a\u2028b"}\n\n{"text": "c"}\n')
    assert [tokenizer.decode(d.tolist()) for d in encode_file(tmp_path / "d.jsonl", tokenizer)] == ["a\u2028b", "c"]
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n')
    with pytest.raises(ConfigError, match="line 2"):
        encode_file(tmp_path / "d.jsonl", tokenizer)
    (tmp_path / "d.jsonl").write_text('[{"text": "a"},\n{"text": "b"}]')
    with pytest.raises(ConfigError, match=r"JSON array: .*jq -c"):
        encode_file(tmp_path / "d.jsonl", tokenizer)
    (tmp_path / "d.txt").write_text("words", encoding="utf-16")
    with pytest.raises(ConfigError, match=r"d\.txt is UTF-16, not UTF-8: .*iconv -f UTF-16 -t UTF-8"):
        encode_file(tmp_path / "d.txt", tokenizer)
    for name in ("d.jsonl.gz", "d.txt.zst", "d.txt.xz", "d.txt.bz2", "d.parquet", "d.parquet.gz"):
        (tmp_path / name).write_bytes(b"not that")
        with pytest.raises(ConfigError, match=rf"{name}.*(damaged|decompress the file)"):
            encode_file(tmp_path / name, tokenizer)
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ConfigError, match="not a regular file"):
            encode_file(Path(place), tokenizer)
    for both in ("--documents", "--buckets=2"):
        with pytest.raises(SystemExit):
            main([str(tmp_path), "--data", "x", "--lengths", "8", "--sliding", "4", both])
    with pytest.raises(SystemExit, match="not a model directory"):
        main([str(tmp_path), "--data", "x", "--lengths", "8"])


def test_texts_of_every_kind_of_file(tmp_path):
    texts = ["a\u2028b", "naïve\n", "🙂"]
    lines = "\ufeff" + "\n\n".join(json.dumps({"body": text, "id": 1}) for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    pq.write_table(pa.table({"id": [1, 2, 3], "body": texts}), tmp_path / "a.parquet", row_group_size=2)
    compress = {
        "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstandard.ZstdCompressor().compress
    }  # fmt: skip
    for suffix, packed in compress.items():
        (tmp_path / f"a.jsonl.{suffix}").write_bytes(packed(lines.encode()))
        (tmp_path / f"a.txt.{suffix}").write_bytes(packed(texts[1].encode()))
        assert read_texts(tmp_path / f"a.txt.{suffix}") == texts[1:2]
        twice, cut = packed(b"word ") * 2, packed(bytes(200_000))[:-9]
        (tmp_path / f"b.txt.{suffix}").write_bytes(twice)
        assert read_texts(tmp_path / f"b.txt.{suffix}") == ["word word "]
        (tmp_path / f"b.txt.{suffix}").write_bytes(cut)
        with pytest.raises(ConfigError, match="damaged"):
            read_texts(tmp_path / f"b.txt.{suffix}")
    for name in ("a.jsonl", "a.parquet", *(f"a.jsonl.{suffix}" for suffix in compress)):
        assert read_texts(tmp_path / name, "body") == texts
        with pytest.raises(ConfigError, match=rf"{name}.*body"):
            read_texts(tmp_path / name)
    with pytest.raises(ConfigError, match=r'a\.parquet, row 0: "id" is int, not a text'):
        read_texts(tmp_path / "a.parquet", "id")
    for value, name in ((None, "null"), (7, "int")):
        (tmp_path / "b.jsonl").write_text(f"{lines}\n{json.dumps({'body': value})}\n")
        with pytest.raises(ConfigError, match=rf'b\.jsonl, line 6: "body" is {name}, not a text'):
            read_texts(tmp_path / "b.jsonl", "body")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfword")
    assert read_texts(tmp_path / "a.txt") == ["word"]


def test_the_tool_takes_a_field(tmp_path, tokenizer_dir, text):
    """The same documents as JSON lines and as Parquet rows have the same perplexity."""
    config = ModelConfig(BYTES, Position(rotary=NoRotary()), trained_length=64)
    write_model_dir(tmp_path / "model", config, fresh_model(config).state_dict(), tokenizer_dir=tokenizer_dir)
    documents = [text.read_text()[i * 900 : (i + 1) * 900] for i in range(3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": d}) + "\n" for d in documents))
    pq.write_table(pa.table({"body": documents}), tmp_path / "a.parquet")
    found = []
    for name in ("a.jsonl", "a.parquet"):
        options = ["--lengths", "64", "--windows", "3", "--json", str(tmp_path / "f.json")]
        main([str(tmp_path / "model"), "--data", str(tmp_path / name), "--field", "body", *options])
        found.append(json.loads((tmp_path / "f.json").read_text()))
    assert found[0]["lengths"] == found[1]["lengths"]
    assert found[0]["documents"] == 3
    for options in (
        ["--lengths", "1"],
        ["--lengths", "nan"],
        ["--lengths", "8", "--windows", "-1"],
        ["--lengths", "8", "--field", "body"],  # of a plain text
    ):
        with pytest.raises(SystemExit) as stop:
            main([str(tmp_path / "model"), "--data", "x", *options])
        assert stop.value.code == 2
