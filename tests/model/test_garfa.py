"""GARFA against its equations, in the model, and through `transformers`."""

import dataclasses
import json
import math

import pytest
import torch
from torch.testing import assert_close

from farsight.analysis.positions.figures import figures
from farsight.checkpoints.load import load_model
from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.checkpoints.model_dir.hf_config import from_hf_config
from farsight.checkpoints.model_dir.modeling_farsight import FarsightForCausalLM
from farsight.configs.load import read_toml
from farsight.configs.schema import (
    Architecture,
    Garfa,
    GarfaLayer,
    Lasp,
    LayerRule,
    Llama3Rope,
    NoRotary,
    Position,
    Rope,
    Scope,
    YarnRope,
)
from farsight.errors import ConfigError
from farsight.model.adapt.garfa import garfa_of, train_garfa
from farsight.model.build import ModelConfig, build_model
from farsight.model.position.garfa import alphas, garfa_of_tensors, head_scales
from farsight.model.position.layers import describe
from farsight.model.position.rope import rope_frequencies, rope_tables
from farsight.training.finetune.garfa_picture import draw_alphas
from tests.kernels.test_head_rotation import written_out
from tests.running import ROOT

SMALL = Architecture(vocab_size=96, dim=32, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=48)
IDENTITY = -math.log(10)
RAW = {0: (-2.5, -1.0), 2: (0.5, -4.0)}
GARFA = Garfa(layers=tuple(GarfaLayer(layer, raw) for layer, raw in RAW.items()))
POSITIONS = {
    "llama3": Position(rotary=Llama3Rope(factor=8.0, original_length=16)),
    "yarn": Position(rotary=YarnRope(factor=4.0, original_length=16)),
    "scope_lasp": Position(heads=Scope(), lasp=Lasp(anchor_layers=2, s_max=4.0)),
}


def fresh_model(position: Position, length: int = 64, **shape):
    model = build_model(ModelConfig(dataclasses.replace(SMALL, **shape), position, trained_length=length))
    model.init_weights()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for (
            parameter
        ) in model.parameters():  # at initial values attention is almost uniform and positions hardly matter
            if parameter.dim() > 1:
                parameter.normal_(std=0.25, generator=generator)
    return model.eval()


def tokens_of(*shape):
    return torch.randint(96, shape, generator=torch.Generator().manual_seed(0))


# ── The equations ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("equation", [14, 12])
def test_scales_are_those_of_another_base(equation):
    """Pair i of plain RoPE rotates by (θ·√alpha)^(−2i/H), or (θ·alpha)^(−2i/H), with alpha = 0.1 + 9.9 / (1 + e^−w)."""
    raw = torch.tensor([-5.0, IDENTITY, 0.3, 2.2])
    scales = head_scales(raw, 16, equation)
    for k, w in enumerate(raw.tolist()):
        alpha = 0.1 + 9.9 / (1 + math.exp(-w))
        base = 1e4 * (math.sqrt(alpha) if equation == 14 else alpha)
        expected = [base ** (-2 * i / 16) / 1e4 ** (-2 * i / 16) for i in range(8)]
        assert scales[k].tolist() == pytest.approx(expected, rel=1e-7)
    assert torch.equal(scales[1], torch.ones(8))
    assert scales.dtype == torch.float32


@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("queries", [False, True])
@pytest.mark.parametrize("equation", [14, 12])
def test_attention_against_the_equations(name, queries, equation):
    """A layer in fp64, head by head: keys (and queries) rotated at the scaled frequency times alpha^(−2i/H · e)."""
    garfa = dataclasses.replace(GARFA, queries=queries, equation=equation)
    position = dataclasses.replace(POSITIONS[name], garfa=garfa)
    model, n = fresh_model(position, length=20), torch.arange(20)
    settings = model.positions[2]
    frequencies = rope_frequencies(settings.rotary, 8, 20)
    attention, x = model.layers["2"].attention, torch.randn(1, 20, 32, generator=torch.Generator().manual_seed(0))
    seen: dict[str, torch.Tensor] = {}

    def attend(module, arguments, result):
        seen["o"] = arguments[0]  # the input of `wo`

    attention.wo.register_forward_hook(attend)
    head_rope = model._head_rope(attention, model.rotary_of_layer["2"], n[None])
    attention(x, rope=rope_tables(n[None], frequencies), head_rope=head_rope)

    q, k, v = (w(x)[0].double().view(20, -1, 8) for w in (attention.wq, attention.wk, attention.wv))
    pairs, exponent = torch.arange(0, 8, 2).double() / 8, 0.5 if equation == 14 else 1.0
    factor, plain = torch.tensor(frequencies.attention_factor), frequencies.inv_freq.double()
    out = torch.zeros(20, 4, 8, dtype=torch.float64)
    for head in range(4):
        alpha = 0.1 + 9.9 / (1 + math.exp(-RAW[2][head // 2]))
        own = plain * alpha ** (-pairs * exponent)
        k_turned = written_out(k[None, :, head // 2 : head // 2 + 1], n[None], own[None], factor)[0, :, 0]
        q_turned = written_out(q[None, :, head : head + 1], n[None], (own if queries else plain)[None], factor)[0, :, 0]
        scores = q_turned @ k_turned.T / 8**0.5
        hidden = (n[None] > n[:, None]) | (n[None] <= n[:, None] - settings.scopes[head])
        out[:, head] = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[:, head // 2]
    assert_close(seen["o"][0].double(), out.flatten(1), rtol=1e-4, atol=1e-4)


# ── In the model ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", POSITIONS)
def test_identity_changes_no_bit_and_papers_value_does(name):
    model, tokens = fresh_model(POSITIONS[name]), tokens_of(2, 64)
    with torch.no_grad():
        base = model(tokens)
        train_garfa(model, [0, 2])
        assert torch.equal(model(tokens), base)
        train_garfa(model, [0, 2], init="paper")
        assert (model(tokens) - base).abs().max() > 0.01 * base.std()
    assert alphas(garfa_of(model)) == {0: [pytest.approx(9.012, abs=5e-4)] * 2, 2: [pytest.approx(9.012, abs=5e-4)] * 2}
    assert 0.1 + 9.9 / (1 + math.exp(-2.2)) == pytest.approx(9.012, abs=5e-4)


def test_gradient_by_w_against_differences():
    model, tokens = fresh_model(POSITIONS["llama3"]), tokens_of(2, 64)
    train_garfa(model, [1], init="paper")
    model.double()
    raw = model.layers["1"].attention.garfa.raw
    with torch.no_grad():
        raw.copy_(torch.tensor([-1.0, 0.5]))
    model(tokens, labels=tokens.roll(-1, 1)).backward()
    for head in range(2):
        values = []
        for step in (1e-2, -1e-2):
            with torch.no_grad():
                raw[head] += step
                values.append(float(model(tokens, labels=tokens.roll(-1, 1))))
                raw[head] -= step
        # Frequencies are fp32: finite differences of the loss are accurate to about 1e-3.
        assert float(raw.grad[head]) == pytest.approx((values[0] - values[1]) / 2e-2, rel=2e-2)


def test_compiled_blocks_equal_eager():
    """Layers with GARFA on keys, without it, and with other temperatures: one program per kind."""
    position = dataclasses.replace(
        POSITIONS["yarn"], lasp=Lasp(anchor_layers=2, s_max=8.0), garfa=Garfa(layers=(GarfaLayer(1, (-1.0, -3.0)),))
    )
    model, tokens = fresh_model(position), tokens_of(2, 40)
    train_garfa(model, [0, 2], init="paper")
    eager = model(tokens)
    exact = torch.autograd.grad(eager.square().mean(), model.layers["0"].attention.garfa.raw)[0]
    for name, block in model.layers.items():
        model.layers[name] = torch.compile(block, fullgraph=True, backend="aot_eager")
    found = model(tokens)
    assert_close(found, eager, rtol=1e-5, atol=1e-5)
    grad = torch.autograd.grad(found.square().mean(), model.layers["0"].attention.garfa.raw)[0]
    assert_close(grad, exact, rtol=1e-3, atol=1e-9)


def test_fsdp_in_bf16_keeps_w_in_fp32():
    """FSDP casts a block's parameters; in bf16, w = −ln 10 would give an alpha of 1.005."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from farsight.configs.load import build_config
    from farsight.parallel.parallelize import apply_fsdp

    job = build_config({"architecture": dataclasses.asdict(SMALL), "training": {"seq_len": 64}})
    logits = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for layers in ((), (0, 2)):
            model = fresh_model(POSITIONS["llama3"])
            train_garfa(model, layers)
            apply_fsdp(model, init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",)), job)
            logits.append(model(tokens_of(1, 64)))
            logits[-1].sum().backward()
        assert garfa_of(model).layers[1].raw == (torch.tensor(IDENTITY).item(),) * 2
        assert model.layers["0"].attention.garfa.raw.grad.full_tensor().abs().min() > 0
    finally:
        dist.destroy_process_group()
    assert torch.equal(*logits)


def test_eighty_parameters_for_llama_8b():
    a = Architecture(**read_toml(ROOT / "configs/sizes/llama3.1-8b.toml")["architecture"])
    with torch.device("meta"):
        model = build_model(ModelConfig(a, Position(rotary=Llama3Rope()), trained_length=1024))
    train_garfa(model, [0, *range(23, 32)])
    found = {name: p for name, p in model.named_parameters() if name.endswith("garfa.raw")}
    assert sum(p.numel() for p in found.values()) == 80
    assert all(p.is_meta and p.dtype == torch.float32 for p in found.values())
    value = torch.empty(8)
    model.init_parameter("layers.23.attention.garfa.raw", value)
    assert torch.equal(value, torch.full((8,), IDENTITY))


def test_training_goes_on_from_the_config():
    model = fresh_model(dataclasses.replace(POSITIONS["llama3"], garfa=GARFA))
    assert not any(name.endswith("raw") for name, _ in model.named_parameters())
    tokens = tokens_of(1, 30)
    with torch.no_grad():
        before = model(tokens)
        train_garfa(model, [1, 2])
        assert torch.equal(model(tokens), before)
    now = garfa_of(model)
    assert [entry.layer for entry in now.layers] == [0, 1, 2]
    assert (now.layers[0], now.layers[2]) == GARFA.layers
    trained = {name: p for name, p in model.named_parameters() if p.dim() == 1}
    assert garfa_of_tensors(trained) == Garfa(layers=now.layers[1:])
    assert garfa_of_tensors({}) is None
    with pytest.raises(ValueError, match=r"layer 0 has factors of equation 14 .* set garfa\.equation = 14"):
        train_garfa(model, [1], equation=12)


@pytest.mark.parametrize(
    ("position", "message"),
    [
        (Position(garfa=Garfa(layers=(GarfaLayer(3, (0.0, 0.0)),))), "names layer 3; the model has 0 to 2"),
        (Position(garfa=Garfa(layers=(GarfaLayer(1, (0.0,)),))), "each of the 2 key/value heads"),
        (Position(garfa=Garfa(layers=(GarfaLayer(1, (0.0, math.nan)),))), "each of the 2 key/value heads"),
        (Position(garfa=Garfa(layers=(GarfaLayer(1, (0.0, 0.0)),) * 2)), "names layer 1 twice"),
        (
            Position(garfa=GARFA, rules=(LayerRule(layers="2", rotary=NoRotary()),)),
            "names layer 2, which does not rotate",
        ),
    ],
)
def test_factors_that_do_not_fit_are_refused(position, message):
    with pytest.raises(ConfigError, match=message):
        build_model(ModelConfig(SMALL, position, trained_length=16))


def test_layers_that_do_not_rotate_are_refused():
    model = fresh_model(Position(rules=(LayerRule(layers="1", rotary=NoRotary()),)))
    with pytest.raises(ValueError, match=r"layer 1 does not rotate .* leave it out of garfa\.layers"):
        train_garfa(model, [0, 1])
    with pytest.raises(ValueError, match="layer 3; the model has 0 to 2"):
        train_garfa(model, [3])


def test_what_people_are_shown(tmp_path):
    config = ModelConfig(SMALL, Position(rotary=Rope(theta=100.0), garfa=GARFA), trained_length=16)
    table = describe(config.layers()).splitlines()
    assert table[0].split()[-1] == "alpha"
    assert [line.split()[-1] for line in table[1:]] == ["0.851..2.763", "-", "0.2781..6.262"]
    shown = figures(config, 16)["layers"][2]["garfa"]
    alpha = 0.1 + 9.9 / (1 + math.exp(-0.5))
    assert shown["alpha"][0] == pytest.approx(alpha)
    turns = [2 * math.pi * (100 * math.sqrt(alpha)) ** (2 * i / 8) for i in range(4)]
    assert shown["wavelengths"][0] == pytest.approx(turns)
    for equation, factor in ((14, "√alpha"), (12, "alpha")):
        draw_alphas(tmp_path / "a.svg", dataclasses.replace(GARFA, equation=equation))
        assert f"<!-- alpha; factor on the RoPE base: {factor} -->" in (tmp_path / "a.svg").read_text(encoding="utf-8")


# ── Through transformers ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", POSITIONS)
def test_exported_models_equal_ours(tmp_path, name):
    """Logits after `from_pretrained`, with a cache, with left padding; and the factors read back."""
    queries, equation = name == "yarn", 12 if name == "yarn" else 14
    exact = tuple(dataclasses.replace(e, raw=tuple(torch.tensor(e.raw).tolist())) for e in GARFA.layers)
    position = dataclasses.replace(POSITIONS[name], garfa=Garfa(equation, queries, exact))
    model = fresh_model(position)
    config = ModelConfig(SMALL, position, trained_length=64)
    write_model_dir(tmp_path / "m", config, model.state_dict())
    values = json.loads((tmp_path / "m" / "config.json").read_text())
    assert values["model_type"] == "farsight"
    assert from_hf_config(values).position == position
    card = (tmp_path / "m" / "README.md").read_text()
    assert "of layers 0,2: the RoPE base is multiplied by" in card
    assert "- garfa\n" in card

    theirs, tokens = FarsightForCausalLM.from_pretrained(tmp_path / "m").eval(), tokens_of(2, 50)
    reloaded = load_model(tmp_path / "m", dtype=torch.bfloat16)[0]
    assert garfa_of(reloaded) == position.garfa  # also where weights are bf16
    with torch.no_grad():
        ours = model(tokens)
        assert_close(theirs(tokens).logits, ours, atol=1e-4, rtol=0)
        first = theirs(tokens[:, :30], use_cache=True)
        rest = theirs(tokens[:, 30:], past_key_values=first.past_key_values)
        assert_close(rest.logits, ours[:, 30:], atol=1e-4, rtol=0)
        padded = torch.cat([torch.full((2, 7), 95), tokens[:, :20]], dim=1)
        mask = torch.ones_like(padded).index_fill_(1, torch.arange(7), 0)
        found = theirs.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=6, pad_token_id=0)[:, 27:]
        greedy = tokens[:, :20]
        for _ in range(6):
            greedy = torch.cat([greedy, model(greedy)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(found, greedy[:, 20:])
    with torch.no_grad():
        plain = build_model(dataclasses.replace(config, position=POSITIONS[name]))
        plain.load_state_dict(model.state_dict())
        assert (plain(tokens) - ours).abs().max() > 0.01 * ours.std()
