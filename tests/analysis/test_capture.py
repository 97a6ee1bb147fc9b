"""farsight capture against `transformers` and the written-out equations; what it draws, writes and refuses."""

import dataclasses
import json
import math

import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from farsight.analysis.capture import sampling
from farsight.analysis.capture.__main__ import main
from farsight.analysis.capture.heads import draw_heads, key_rows
from farsight.analysis.capture.recorder import recording
from farsight.analysis.capture.samples import Samples, read_capture
from farsight.analysis.capture.sampling import CaptureSettings, capture, captured_parts, draw_tokens, joined_parts
from farsight.analysis.geometry import __main__ as geometry
from farsight.analysis.sequences import read_sequences
from farsight.checkpoints.load import load_model
from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.configs.schema import (
    Alibi,
    Garfa,
    GarfaLayer,
    LayerRule,
    NoRotary,
    Position,
    Rope,
    Scope,
    Tokenizer,
    YarnRope,
)
from farsight.data.tokenizers.tokenizer import BytesTokenizer, load_tokenizer
from farsight.inference.decoder import Decoder
from farsight.inference.loading import LoadedModel
from farsight.model.build import ModelConfig
from tests.checkpoints.test_convert import write_with_transformers
from tests.model.test_model import SMALL, fresh_model

SCALED = Position(
    rotary=YarnRope(factor=4.0, original_length=12),
    heads=Scope(),
    bias=Alibi(),
    rules=(LayerRule(layers="1", rotary=NoRotary()),),
    garfa=Garfa(layers=(GarfaLayer(layer=2, raw=(-1.0, 0.5)),)),
)


def loaded(model, config, path="m", chunk=7):
    return LoadedModel(path, Decoder(model, config, chunk=chunk), BytesTokenizer(), config.trained_length)


def tokens(sequences, length, vocab):
    return torch.randint(vocab, (sequences, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_equal_to_transformers(tmp_path, kind):
    """Against transformers' own projections, rotated by its own function; query heads 2 and 3 share key head 1."""
    theirs = write_with_transformers(tmp_path, kind, tied=False)
    tokens_SL = tokens(2, 40, 320)
    projected = {}
    for layer, block in enumerate(theirs.model.layers):
        for name in ("q_proj", "k_proj"):
            getattr(block.self_attn, name).register_forward_hook(
                lambda module, inputs, output, key=(layer, name): projected.__setitem__(key, output)
            )
    with torch.no_grad():
        theirs(tokens_SL)
    cos, sin = theirs.model.rotary_emb(torch.zeros(1), torch.arange(40)[None])
    model, config = load_model(tmp_path)
    samples = capture(loaded(model, config), tokens_SL, CaptureSettings(40, 4, 10, heads=100))  # every token
    assert [(head.layer, head.head, head.kv_head) for head in samples.heads] == [
        (layer, head, head // 2) for layer in range(2) for head in range(4)
    ]
    assert samples.positions_T.tolist() == 2 * list(range(40))
    assert samples.sequences_T.tolist() == 40 * [0] + 40 * [1]
    for number, head in enumerate(samples.heads):
        q, k = (projected[head.layer, name].unflatten(-1, (-1, 8)).transpose(1, 2) for name in ("q_proj", "k_proj"))
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        assert_close(samples.queries(number), q[:, head.head].flatten(0, 1).double(), atol=1e-5, rtol=0)
        assert_close(samples.keys(number), k[:, head.head // 2].flatten(0, 1).double(), atol=1e-5, rtol=0)


def test_equal_to_the_equations():
    """QK-norm, then YaRN with its attention factor; layer 2 has GARFA's factors on the keys (equation 14), layer 1 no RoPE."""
    config = ModelConfig(dataclasses.replace(SMALL, qk_norm=True), SCALED, trained_length=48)
    model = fresh_model(config)
    tokens_SL, given = tokens(1, 48, 96), {}
    samples = capture(loaded(model, config), tokens_SL, CaptureSettings(48, 4, 12, heads=100))
    attentions = dict(model.attentions())
    for name, attention in attentions.items():
        attention.register_forward_pre_hook(lambda module, inputs, name=name: given.__setitem__(name, inputs[0][0]))
    with torch.no_grad():
        model(tokens_SL)
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 12}
    inv_freq, factor = ROPE_INIT_FUNCTIONS["yarn"](
        LlamaConfig(
            hidden_size=32, num_attention_heads=4, head_dim=8, rope_parameters=rope, max_position_embeddings=48
        ),
        torch.device("cpu"),
    )
    alpha = [0.1 + 9.9 / (1 + math.exp(-w)) for w in (-1.0, 0.5)]

    def made(layer, weight, norm, head, scales=None):
        x = given[str(layer)].double() @ weight.double()[8 * head : 8 * head + 8].T
        x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
        if layer == 1:
            return x
        angle = torch.arange(48)[:, None] * inv_freq.double() * (1.0 if scales is None else scales)
        cos, sin = factor * angle.cos(), factor * angle.sin()
        return torch.cat([x[:, :4] * cos - x[:, 4:] * sin, x[:, 4:] * cos + x[:, :4] * sin], 1)

    with torch.no_grad():
        for number, head in enumerate(samples.heads):
            a = attentions[str(head.layer)]
            scales = math.sqrt(alpha[head.kv_head]) ** (-2 * torch.arange(4) / 8) if head.layer == 2 else None
            expected_q = made(head.layer, a.wq.weight, a.q_norm, head.head)
            expected_k = made(head.layer, a.wk.weight, a.k_norm, head.head // 2, scales)
            assert_close(samples.queries(number), expected_q, atol=1e-5, rtol=0)
            assert_close(samples.keys(number), expected_k, atol=1e-5, rtol=0)
    for layer in range(3):
        heads = [head for head in samples.heads if head.layer == layer]
        # ceil(48^(h/4)) and 2^(-8h/4), in the order of the layout.
        assert sorted(head.scope for head in heads) == [3, 7, 19, 48]
        assert sorted(head.slope for head in heads) == [2**-8, 2**-6, 2**-4, 2**-2]
        assert {head.rotates for head in heads} == {layer != 1}


def test_nothing_changes():
    """Logits are the same while recording and afterwards, with GARFA, scopes and ALiBi in use."""
    config = ModelConfig(SMALL, SCALED, trained_length=48)
    model, tokens_BL = fresh_model(config), tokens(2, 48, 96)
    attentions = {int(name): attention for name, attention in model.attentions()}
    rows, columns = torch.tensor([0, 1]), torch.tensor([5, 7])
    with torch.no_grad():
        before = model(tokens_BL)
        with recording(attentions, rows, columns) as recorders:
            assert torch.equal(model(tokens_BL), before)
        assert recorders[1].queries_TNH.shape == (2, 4, 8)
        assert recorders[1].keys_TKH.shape == (2, 2, 8)
        capture(loaded(model, config), tokens_BL, CaptureSettings(48, 4))
        assert all(attention.context is None for attention in attentions.values())
        assert torch.equal(model(tokens_BL), before)


def test_a_token_of_each_bucket_in_expectation():
    drawn = [draw_tokens(100, 5, 1.0, sequence) for sequence in range(2000)]
    counts = torch.cat([columns // 20 for columns in drawn]).bincount()
    assert len(counts) == 5
    # Binomial of 40,000 tokens at 1/20: a standard deviation of 44.
    assert (counts - 2000).abs().max() < 5 * 44
    assert torch.equal(draw_tokens(100, 5, 1.0, 7), drawn[7])
    assert not torch.equal(draw_tokens(100, 5, 1.0, 7, seed=1), drawn[7])
    assert len({str(columns.tolist()) for columns in drawn}) > 1900
    assert draw_tokens(100, 5, 20.0, 0).tolist() == list(range(100))


def test_heads_are_drawn_uniformly():
    config = ModelConfig(dataclasses.replace(SMALL, n_layers=100), Position(), trained_length=32)
    drawn = [(head.layer, head.head) for head in draw_heads(config, 32)]
    assert len({*drawn}) == 300
    assert drawn == sorted(drawn)
    assert len(draw_heads(config, 32, most=1000)) == 400
    assert draw_heads(config, 32, 9) == draw_heads(config, 32, 9) != draw_heads(config, 32, 9, seed=1)
    of_layer = torch.tensor(
        [layer for seed in range(30) for layer, _ in [(h.layer, h) for h in draw_heads(config, 32, 40, seed)]]
    )
    assert of_layer.bincount(minlength=100).max() < 12 + 5 * 3.5  # 12 in expectation


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two model directories and a text."""
    folder = tmp_path_factory.mktemp("capture")
    load_tokenizer(Tokenizer(kind="bytes")).save(folder / "tokenizer")
    architecture = dataclasses.replace(SMALL, vocab_size=320)
    for name, position in (("m", SCALED), ("rope", Position(rotary=Rope()))):
        config = ModelConfig(architecture, position, trained_length=48)
        write_model_dir(folder / name, config, fresh_model(config).state_dict(), tokenizer_dir=folder / "tokenizer")
    (folder / "text.txt").write_text("The score grows with the position of the key, so the late keys win. " * 20)
    return folder


def test_what_is_written_is_what_was_in_memory(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "PART_BYTES", 20_000)
    main([str(folder / "m"), "--data", str(folder / "text.txt"), "--heads", "7", "--out", str(tmp_path / "c")])
    written = read_capture(tmp_path / "c")
    files = sorted((tmp_path / "c").glob("*.safetensors"))
    assert 1 < len(files) < 15  # of 28 sequences
    model, config = load_model(folder / "m")
    text = torch.tensor(BytesTokenizer().encode((folder / "text.txt").read_text()))
    tokens_SL = text[: 28 * 48].view(28, 48)
    held = capture(loaded(model, config, chunk=1024), tokens_SL, CaptureSettings(48, heads=7))
    assert written.heads == held.heads
    assert torch.equal(written.positions_T, held.positions_T)
    assert torch.equal(written.sequences_T, held.sequences_T)
    assert torch.equal(written.buckets_T, held.positions_T // 3)
    for number in range(7):
        assert torch.equal(written.queries(number), held.queries(number))
        assert torch.equal(written.keys(number), held.keys(number))
    manifest = json.loads((tmp_path / "c" / "capture.json").read_text())
    assert manifest["sequences"] == 28
    assert manifest["files"] == [file.name for file in files]
    files[0].unlink()
    with pytest.raises(ValueError, match="is missing: capture again"):
        read_capture(tmp_path / "c")


def test_parts_are_joined_in_order():
    config = ModelConfig(SMALL, Position(), trained_length=32)
    heads = draw_heads(config, 32)
    parts = list(captured_parts(Decoder(fresh_model(config), config), heads, tokens(5, 32, 96), 4, 2.0, 0))
    one, few = (list(joined_parts(parts, least)) for least in (10**9, 1 + sum(x.nbytes for x in parts[0].values())))
    assert len(one) == 1
    assert 1 < len(few) < 5
    samples = [Samples(heads, 32, 4, some, key_rows(heads)) for some in (parts, one, few)]
    for number in range(len(heads)):
        assert all(torch.equal(s.queries(number), samples[0].queries(number)) for s in samples)
        assert all(torch.equal(s.keys(number), samples[0].keys(number)) for s in samples)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("nowhere", [], "nowhere"),
        ("m", ["--length", "2000"], "its longest document has 1,360 tokens"),
        ("rope", ["--extend", "ripra"], "rotates the keys again for every query"),
        ("m", ["--buckets", "49"], "set no more than the 48 tokens"),
        ("m", ["--per-bucket", "4"], "a bucket has 3 tokens"),
    ],
)
def test_refused(folder, tmp_path, model, options, words):
    data = ["--data", str(folder / "text.txt"), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit, match=words):
        main([str(folder / model), *data, *options])
    assert not (tmp_path / "out").exists()


DOCUMENTS = ("alpha " * 30, "beta", "gamma " * 12)
"""Texts of 180, 4 and 72 tokens as bytes."""


@pytest.mark.parametrize(
    ("options", "length", "expected"),
    [
        # Documents take turns.
        ({}, 60, [(0, 0), (2, 0), (0, 60), (0, 120)]),
        ({"document_starts": True}, 60, [(0, 0), (2, 0)]),
        ({"bos": True}, 60, [(0, 0), (2, 0), (0, 59), (0, 118)]),
        ({"bos": True, "document_starts": True}, 5, [(0, 0), (1, 0), (2, 0)]),
    ],
)
def test_sequences_begin_as_asked(tmp_path, options, length, expected):
    """Each sequence is cut from its document's bytes; the start token (256) counts in its length."""
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    start, own = ([256], length - 1) if options.get("bos") else ([], length)
    want = [start + list(DOCUMENTS[number].encode()[at : at + own]) for number, at in expected]
    assert read_sequences(file, BytesTokenizer(), length, 100, **options).tolist() == want
    assert read_sequences(file, BytesTokenizer(), length, 2, **options).tolist() == want[:2]


def test_sequences_without_room_for_a_start_token(tmp_path):
    (tmp_path / "data.txt").write_text("alpha")
    tokenizer = BytesTokenizer()
    with pytest.raises(ValueError, match="--length 1 leaves no token after the start token"):
        read_sequences(tmp_path / "data.txt", tokenizer, 1, 1, bos=True)
    with pytest.raises(ValueError, match="set --length 6 or less"):
        read_sequences(tmp_path / "data.txt", tokenizer, 7, 1, bos=True)
    tokenizer.bos_id = None
    with pytest.raises(ValueError, match="tokenizer has no start token; leave --bos out"):
        read_sequences(tmp_path / "data.txt", tokenizer, 3, 1, bos=True)


def test_the_start_token_is_captured(folder, tmp_path):
    """Every position of every sequence, with bos first: the first key is that of a lone bos, whatever the document."""
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    options = ["--data", str(file), "--length", "32", "--per-bucket", "2", "--document-starts"]
    main([str(folder / "rope"), *options, "--bos", "auto", "--out", str(tmp_path / "c")])
    manifest = json.loads((tmp_path / "c" / "capture.json").read_text())
    assert (manifest["bos"], manifest["document_starts"], manifest["sequences"]) == (True, True, 2)
    written = read_capture(tmp_path / "c")
    model, config = load_model(folder / "rope")
    alone = capture(loaded(model, config), torch.tensor([[256, 0]]), CaptureSettings(2, 2, 1.0))
    for number in range(len(written)):
        first = written.keys(number)[written.positions_T == 0]
        assert len(first) == 2
        assert_close(first, alone.keys(number)[:1].expand(2, -1), atol=1e-5, rtol=0)
    # Told apart by the tool that reads it, which can't change them.
    with pytest.raises(SystemExit, match="which fixes --bos"):
        geometry.main([str(tmp_path / "c"), "--bos", "yes"])
    main([str(folder / "rope"), *options[:-1], "--out", str(tmp_path / "d")])
    manifest = json.loads((tmp_path / "d" / "capture.json").read_text())
    assert (manifest["bos"], manifest["document_starts"], manifest["sequences"]) == (False, False, 7)


def test_options_that_are_needed(folder, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(folder / "m"), "--out", str(tmp_path / "out")])
    assert "--data" in capsys.readouterr().err
    (tmp_path / "capture.json").write_text("{}")
    with pytest.raises(SystemExit):
        main([str(folder / "m"), "--data", str(folder / "text.txt"), "--out", str(tmp_path)])
    assert "holds a capture already" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"holds no capture\.json"):
        read_capture(folder)
