"""Compares grafts with their two models: weights bit for bit, positions layer by layer, logits composed by hand."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from farsight.checkpoints.convert.from_hf import model_dir_to_checkpoint
from farsight.checkpoints.graft.__main__ import main
from farsight.checkpoints.graft.build import graft
from farsight.checkpoints.graft.tokenizer import common_tokenizer
from farsight.checkpoints.load import load_model, read_model_config
from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.checkpoints.model_dir.modeling_farsight import FarsightForCausalLM
from farsight.configs.schema import (
    Alibi,
    Architecture,
    Garfa,
    GarfaLayer,
    Lasp,
    LayerRule,
    NoRotary,
    Position,
    Rope,
    Scope,
    SlidingWindow,
    YarnRope,
)
from farsight.data.tokenizers.base import EOS
from farsight.data.tokenizers.tokenizer import BytesTokenizer, HuggingFaceTokenizer
from farsight.errors import ConfigError, UserError
from farsight.inference.extend import parse_extension
from farsight.model.build import ModelConfig
from farsight.model.graft import grafted_config, with_rope
from farsight.model.position.garfa import HeadRope
from farsight.model.position.rope import rope_frequencies, rope_tables
from tests.checkpoints.test_convert import all_tensors, write_with_transformers
from tests.finetuned import write_base

N = 4
SHAPE = Architecture(vocab_size=258, dim=32, n_layers=N, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=48)
TIED = replace(SHAPE, tie_embeddings=True)
TOKENS = torch.randint(258, (2, 80), generator=torch.Generator().manual_seed(0))

GARFA = Garfa(layers=tuple(GarfaLayer(i, (0.5 * i, -2.0)) for i in range(N)))
PLAIN = Position()
POSITIONS = {
    "theta": (PLAIN, Position(rotary=Rope(theta=1e5))),
    "scope": (PLAIN, Position(rotary=NoRotary(), heads=Scope(layout="sorted"))),
    "scopes": (Position(heads=Scope()), Position(heads=Scope())),
    "lasp": (Position(lasp=Lasp(anchor_layers=3, s_max=5.0)), PLAIN),
    "lasps": (Position(lasp=Lasp(anchor_layers=2)), Position(rotary=YarnRope(original_length=16), lasp=Lasp(anchor_layers=3))),
    "same lasp": (Position(lasp=Lasp(anchor_layers=2)), Position(lasp=Lasp(anchor_layers=2), heads=SlidingWindow(window=9))),
    "yarn": (PLAIN, Position(rotary=YarnRope(factor=4.0, original_length=16))),
    "garfa": (replace(PLAIN, garfa=GARFA), Position(rotary=Rope(theta=500.0))),
    "garfas": (replace(PLAIN, garfa=GARFA), replace(PLAIN, garfa=Garfa(layers=(GarfaLayer(3, (1.0, 2.0)),)))),
    "nope": (Position(rules=(LayerRule("1::2", rotary=NoRotary()),)), Position(rotary=NoRotary(), bias=Alibi())),
}  # fmt: skip


def write(
    folder: Path, position: Position = PLAIN, shape: Architecture = SHAPE, length: int = 64, seed: int = 0
) -> Path:
    write_base(folder, position, shape, length, scale=12.0, seed=seed)
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return write(folder / "a", seed=1), write(folder / "b", Position(rotary=Rope(theta=1e5)), length=96, seed=2)


@torch.no_grad()
def composed(a: Path, b: Path, layers: int, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the front's embedding and blocks followed by the back's, each block with its own model's tables."""
    (front, front_config), (back, back_config) = load_model(a), load_model(b)
    length = tokens.shape[1]
    positions = torch.arange(length)[None]
    h_BLD = front.tok_embeddings(tokens)
    for layer in range(N):
        model, config = (front, front_config) if layer < layers else (back, back_config)
        own = config.layers()[layer]
        attention = model.layers[str(layer)].attention
        tables = head_rope = None
        if not isinstance(own.rotary, NoRotary):
            f = rope_frequencies(own.rotary, 8, config.trained_length)
            tables = rope_tables(positions, f)
            if attention.garfa is not None:
                head_rope = HeadRope(positions, attention.garfa(f.inv_freq), torch.tensor(f.attention_factor), False)
        h_BLD = model.layers[str(layer)](h_BLD, tables, None, head_rope)
    head = back.tok_embeddings.weight if back.output.weight is None else back.output.weight
    return back.norm(h_BLD) @ head.T


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    return load_model(folder)[0](TOKENS)


# ── Weights ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layers", [0, 1, N])
def test_every_tensor_is_its_models_bit_for_bit(pair, tmp_path, layers):
    a, b = pair
    main(["--front", str(a), "--back", str(b), "--layers", str(layers), "--out", str(tmp_path / "g")])
    front, back, found = (load_file(folder / "model.safetensors") for folder in (a, b, tmp_path / "g"))
    assert found.keys() == front.keys()
    of_front = {"model.embed_tokens.weight"} | {
        name for name in found if any(name.startswith(f"model.layers.{i}.") for i in range(layers))
    }
    assert len(of_front) == 1 + 9 * layers
    for name, tensor in found.items():
        ours, other = (front, back) if name in of_front else (back, front)
        assert torch.equal(tensor, ours[name])
        if "norm" not in name:
            assert not torch.equal(tensor, other[name])


@pytest.mark.parametrize("shape", [SHAPE, TIED], ids=["untied", "tied"])
def test_a_model_grafted_with_itself_is_itself(tmp_path, shape):
    position = Position(
        lasp=Lasp(anchor_layers=2), heads=Scope(scope_max="length"), rules=(LayerRule("-1", NoRotary()),)
    )
    a = write(tmp_path / "a", position, shape)
    graft(a, a, 2, tmp_path / "g")
    assert read_model_config(tmp_path / "g") == read_model_config(a)
    assert (tmp_path / "g/config.json").read_bytes() == (a / "config.json").read_bytes()
    before, after = (load_file(folder / "model.safetensors") for folder in (a, tmp_path / "g"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_tied_embeddings(tmp_path):
    a, b = write(tmp_path / "a", shape=TIED, seed=1), write(tmp_path / "b", shape=TIED, seed=2)
    with pytest.raises(ConfigError, match=r"the two embeddings differ.*--untie stores them as two matrices"):
        graft(a, b, 2, tmp_path / "g")
    assert not (tmp_path / "g").exists()
    graft(a, b, 2, tmp_path / "g", untie=True)
    assert not read_model_config(tmp_path / "g").architecture.tie_embeddings
    torch.testing.assert_close(logits(tmp_path / "g"), composed(a, b, 2, TOKENS), atol=1e-5, rtol=1e-5)
    # If one model is tied, the head is the back's own, or its embedding.
    c = write(tmp_path / "c", seed=3)
    for number, (front, back) in enumerate([(a, c), (c, a)]):
        graft(front, back, 1, tmp_path / str(number))
        torch.testing.assert_close(
            logits(tmp_path / str(number)), composed(front, back, 1, TOKENS), atol=1e-5, rtol=1e-5
        )
    # Equal embeddings stay one matrix.
    tensors = load_file(b / "model.safetensors")
    tensors["model.embed_tokens.weight"] = load_file(a / "model.safetensors")["model.embed_tokens.weight"]
    save_file(tensors, b / "model.safetensors")
    graft(a, b, 2, tmp_path / "equal")
    assert read_model_config(tmp_path / "equal").architecture.tie_embeddings
    assert "lm_head.weight" not in load_file(tmp_path / "equal/model.safetensors")


def test_dtypes(tmp_path, pair):
    a, out = write(tmp_path / "a"), tmp_path / "g"
    model, config = load_model(a)
    half = {name: parameter.bfloat16() for name, parameter in model.named_parameters()}
    write_model_dir(tmp_path / "half", config, half)
    with pytest.raises(ConfigError, match=r"is kept in bfloat16 in .*half and in float32 in .*--dtype"):
        graft(tmp_path / "half", pair[1], 2, out)
    graft(tmp_path / "half", tmp_path / "half", 2, out)
    found, before = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "half"))
    assert all(torch.equal(found[name], before[name]) and found[name].dtype == torch.bfloat16 for name in before)
    graft(tmp_path / "half", pair[1], 2, tmp_path / "single", torch.float32)
    kept = load_file(tmp_path / "single/model.safetensors")["model.layers.0.mlp.gate_proj.weight"]
    assert torch.equal(kept, half["layers.0.feed_forward.w1.weight"].float())


# ── Positions ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("lengths", [(64, 64), (32, 96), (96, 32)], ids=str)
@pytest.mark.parametrize("kind", POSITIONS)
def test_layers_keep_their_positions_at_every_length(kind, lengths):
    a, b = (ModelConfig(SHAPE, position, length) for position, length in zip(POSITIONS[kind], lengths, strict=True))
    for front, back in ((a, b), (b, a)):
        for layers in range(N + 1):
            found = grafted_config(front, back, layers, lambda: True)
            assert found.trained_length == max(lengths)
            for length in (1, 31, 32, 33, 64, 65, 96, 97, 300):
                expected = front.layers(length)[:layers] + back.layers(length)[layers:]
                assert found.layers(length) == expected


def test_scopes_that_grow():
    """Beyond the trained length; a graft has only one."""
    growing = Position(heads=Scope(scope_max="length"))
    a, b = ModelConfig(SHAPE, growing, 32), ModelConfig(SHAPE, PLAIN, 96)
    found = grafted_config(a, b, 2, lambda: True)
    assert found.trained_length == 32  # the scopes would start to grow too late
    for length in (20, 32, 33, 50, 96, 97, 500):
        assert [max(layer.scopes) for layer in found.layers(length)[:2]] == [max(32, length)] * 2
        assert found.layers(length) == a.layers(length)[:2] + b.layers(length)[2:]
    both = grafted_config(a, replace(a, trained_length=96), 2, lambda: True)
    for length in (20, 50, 97):
        assert max(both.layers(length)[3].scopes) == max(96, length)
    short = ModelConfig(SHAPE, Position(heads=Scope(scope_max="length", s_max=16)), 96)
    with pytest.raises(ConfigError, match=r"past 32 and 96 tokens, each from its own s_max. Set scope_max = 'trained'"):
        grafted_config(a, short, 2, lambda: True)


@pytest.mark.parametrize("kind", [kind for kind in POSITIONS if kind != "lasp"])
def test_logits_are_those_of_a_composition_by_hand(tmp_path, kind):
    first, second = POSITIONS[kind]
    a, b = write(tmp_path / "a", first, length=80, seed=1), write(tmp_path / "b", second, length=48, seed=2)
    graft(a, b, 2, tmp_path / "g")
    expected, found = composed(a, b, 2, TOKENS), logits(tmp_path / "g")
    torch.testing.assert_close(found, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)
    assert (found - composed(b, a, 2, TOKENS)).norm() > 0.1 * expected.norm()
    if kind in ("lasps", "garfas", "scope", "nope"):
        theirs = FarsightForCausalLM.from_pretrained(tmp_path / "g").eval()
        with torch.no_grad():
            torch.testing.assert_close(theirs(TOKENS).logits, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)


# ── Refusals ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_heads": 2}, "architecture.n_heads is 4 in the front model and 2 in the back"),
        ({"n_kv_heads": 4}, "architecture.n_kv_heads is 2 in the front model and 4"),
        ({"vocab_size": 300}, "architecture.vocab_size is 258 in the front model and 300"),
        ({"dim": 48, "ffn_dim": 64}, "architecture.dim is 32 .*; architecture.ffn_dim is 48"),
        ({"norm_eps": 1e-6}, "architecture.norm_eps is 1e-05 in the front model and 1e-06"),
        ({"qk_norm": True}, "architecture.qk_norm is False in the front model and True"),
        ({"n_layers": 5}, "architecture.n_layers is 4 in the front model and 5"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_models_that_do_not_fit(change, message):
    a, b = ModelConfig(SHAPE, PLAIN, 64), ModelConfig(dataclasses.replace(SHAPE, **change), PLAIN, 64)
    with pytest.raises(ConfigError, match=message):
        grafted_config(a, b, 2, lambda: True)


def test_other_refusals(pair, tmp_path):
    a, b = pair
    out = tmp_path / "g"
    one, other = ModelConfig(SHAPE, PLAIN, 64), ModelConfig(SHAPE, Position(embedding="sinusoidal"), 64)
    with pytest.raises(ConfigError, match=r"position\.embedding is 'none' in the front model and 'sinusoidal'"):
        grafted_config(one, other, 2, lambda: True)
    turned = ModelConfig(SHAPE, replace(PLAIN, garfa=replace(GARFA, equation=12)), 64)
    with pytest.raises(ConfigError, match="GARFA of equation 14 with queries = false, the back model's of equation 12"):
        grafted_config(replace(one, position=replace(PLAIN, garfa=GARFA)), turned, 2, lambda: True)
    for layers in (-1, N + 1):
        with pytest.raises(ConfigError, match=f"--layers {layers}: the models have 4 layers; set 0 to 4"):
            graft(a, b, layers, out)
    with pytest.raises(UserError, match="exists and is not empty; name a new folder"):
        graft(a, b, 2, a)
    with pytest.raises(SystemExit, match="is not a model directory"):
        main(["--front", str(a), "--back", str(tmp_path / "none"), "--layers", "1", "--out", str(out)])
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is an adapter.*farsight merge"):
        graft(a, adapter, 2, out)
    four = write(tmp_path / "four")
    values = json.loads((four / "config.json").read_text())
    (four / "config.json").write_text(json.dumps(values | {"quantization_config": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(ConfigError, match=r"holds quantised weights \(bitsandbytes\)"):
        graft(four, b, 2, out)
    assert not out.exists()


def test_a_graft_that_fails_leaves_nothing_that_looks_whole(pair, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise OSError("disk")

    monkeypatch.setattr("farsight.checkpoints.graft.build.TensorReader.__call__", broken)
    with pytest.raises(OSError, match="disk"):
        graft(*pair, 2, tmp_path / "g")
    assert not (tmp_path / "g").exists()


def test_tokenizers(tmp_path):
    """Reserved special tokens may have been named; other tokens must not differ."""
    folders = [tmp_path / name for name in ("a", "b", "c", "none")]
    for folder in folders[:3]:
        BytesTokenizer().save(folder)
        (folder / "tokenizer_config.json").unlink()
    text = (folders[0] / "tokenizer.json").read_text()
    (folders[1] / "tokenizer.json").write_text(text.replace(EOS, "<turn>"))
    (folders[2] / "tokenizer.json").write_text(text.replace('"a": 97', '"@": 97').replace('"a":97', '"@":97'))
    assert text != (folders[2] / "tokenizer.json").read_text()
    found, remarks = common_tokenizer(folders[0], folders[1])
    assert remarks == [f"Special tokens differ (257 is {EOS!r} and '<turn>'); the front model's are written."]
    assert found.fingerprint == HuggingFaceTokenizer(folders[0] / "tokenizer.json").fingerprint
    with pytest.raises(
        ConfigError, match=r"vocabularies differ in \d+ tokens?: token \d+ is '.+' in .*a and .* in .*c"
    ):
        common_tokenizer(folders[0], folders[2])
    assert common_tokenizer(folders[3], folders[1])[0].vocabulary[257] == "<turn>"
    assert common_tokenizer(folders[3], folders[3]) == (None, [])


# ── Foreign models ────────────────────────────────────────────────────────────────────────────────────


def test_models_of_transformers_graft_to_one_of_theirs(tmp_path):
    a, b, out = tmp_path / "a", tmp_path / "b", tmp_path / "g"
    write_with_transformers(a, "default", tied=False)
    other = write_with_transformers(b, "default", tied=False)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    other.save_pretrained(b, max_shard_size="20KB")
    main(["--front", str(a), "--back", str(b), "--layers", "1", "--out", str(out), "--json", str(tmp_path / "f.json")])
    theirs = AutoModelForCausalLM.from_pretrained(out)
    assert type(theirs).__name__ == "LlamaForCausalLM"
    before, after = (all_tensors(folder) for folder in (a, b))
    found = theirs.state_dict()
    for name, tensor in found.items():
        first = name.startswith(("model.embed_tokens", "model.layers.0."))
        assert torch.equal(tensor, (before if first else after)[name])
    written = json.loads((tmp_path / "f.json").read_text())
    assert (written["tool"], written["layers"], written["n_layers"]) == ("checkpoints.graft", 1, 2)
    card = (out / "README.md").read_text()
    assert f"the embedding and layers 0 of `{a}`; layers 1, the final norm and the output head of `{b}`" in card


def test_checkpoints_graft_too(pair, tmp_path):
    a, b = pair
    model_dir_to_checkpoint(b, tmp_path / "step-0")
    graft(a, tmp_path / "step-0", 1, tmp_path / "g")
    graft(a, b, 1, tmp_path / "same")
    found, same = (load_file(tmp_path / name / "model.safetensors") for name in ("g", "same"))
    assert all(torch.equal(found[name], same[name]) for name in same)


# ── One RoPE for all layers ───────────────────────────────────────────────────────────────────────────


LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip


def llamas(folder: Path) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """A short and a long Llama of transformers' own, as Llama 3 and 3.1 are, written to `base` and `long`."""
    models = []
    for seed, (name, length, rope) in enumerate(
        (("base", 16, {"rope_type": "default", "rope_theta": 500000.0}), ("long", 128, LLAMA3))
    ):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=258, hidden_size=32, intermediate_size=48, num_hidden_layers=N, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=length, initializer_range=0.3, rope_parameters=rope,
            tie_word_embeddings=False,
        )  # fmt: skip
        models.append(LlamaForCausalLM(config).eval())
        models[-1].save_pretrained(folder / name)
    return models[0], models[1]


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_table_1_is_what_transformers_makes_of_the_same_weights(tmp_path, layers):
    """Its model has one rotary embedding: the long model with the base's weights in the layers from `layers` on."""
    base, long = llamas(tmp_path)
    a, b, out = (str(tmp_path / name) for name in ("long", "base", "g"))
    main(["--front", a, "--back", b, "--layers", str(layers), "--rope", a, "--out", out])
    expected = LlamaForCausalLM(long.config).eval()
    front = ("model.embed_tokens.", *(f"model.layers.{layer}." for layer in range(layers)))
    theirs = {
        name: tensor if name.startswith(front) else base.state_dict()[name]
        for name, tensor in long.state_dict().items()
    }
    expected.load_state_dict(theirs)
    found = AutoModelForCausalLM.from_pretrained(out).eval()
    assert type(found) is LlamaForCausalLM
    assert found.config.max_position_embeddings == 128
    with torch.no_grad():
        wanted = expected(TOKENS).logits
        torch.testing.assert_close(found(TOKENS).logits, wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(tmp_path / "g"), wanted, rtol=0, atol=3e-5 * float(wanted.abs().max()))
    graft(tmp_path / "long", tmp_path / "base", layers, tmp_path / "own")
    assert (logits(tmp_path / "own") - wanted).abs().max() > 1e-2


def test_the_base_with_long_embedding(tmp_path, capsys):
    """Its row in Table 1, which `--extend llama3:8` reads as well: of 16 trained tokens, as the long model's scaling says."""
    base, long = llamas(tmp_path)
    a, out = str(tmp_path / "base"), tmp_path / "g"
    figures = tmp_path / "f.json"
    options = ["--layers", "0", "--rope", str(tmp_path / "long"), "--out", str(out), "--json", str(figures)]
    main(["--front", a, "--back", a, *options])
    assert json.loads(figures.read_text())["rope"] == str(tmp_path / "long")
    assert f"the RoPE of {tmp_path / 'long'} in all layers" in capsys.readouterr().out
    assert f"the RoPE of `{tmp_path / 'long'}` in all layers" in (out / "README.md").read_text()
    expected = LlamaForCausalLM(long.config).eval()
    expected.load_state_dict(base.state_dict())
    with torch.no_grad():
        wanted = expected(TOKENS).logits
    torch.testing.assert_close(logits(out), wanted, rtol=0, atol=3e-5 * float(wanted.abs().max()))
    extended = parse_extension("llama3:8").change(read_model_config(tmp_path / "base"))
    assert extended.layers() == read_model_config(out).layers()


def test_rope_is_taken_layer_by_layer_and_scopes_stay():
    """From a model with LASP and a NoPE layer; scopes that follow the lesser trained length get it as their s_max."""
    own = ModelConfig(SHAPE, Position(heads=Scope()), 32)
    rules = (LayerRule("-1", NoRotary()),)

    rope = ModelConfig(
        SHAPE, Position(rotary=YarnRope(original_length=16), lasp=Lasp(anchor_layers=2), rules=rules), 96
    )
    found = with_rope(own, rope)
    assert found.trained_length == 96
    for length in (20, 32, 50, 96, 200):
        assert [layer.rotary for layer in found.layers(length)] == [layer.rotary for layer in rope.layers(length)]
        assert [layer.scopes for layer in found.layers(length)] == [layer.scopes for layer in own.layers(length)]
    assert with_rope(rope, own).layers()[0].rotary == Rope()
    with pytest.raises(
        ConfigError, match="that model has 5 layers whose heads rotate 8 dimensions, and this one 4 with 8"
    ):
        with_rope(own, replace(rope, architecture=replace(SHAPE, n_layers=5)))
    growing = replace(own, position=Position(heads=Scope(scope_max="length")))
    with pytest.raises(ConfigError, match="do so past 32 tokens, and this RoPE is for 96"):
        with_rope(growing, rope)
