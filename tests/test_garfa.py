"""GARFA against its equations, in the model, in Triton, and through `transformers`."""

import dataclasses
import json
import math
import subprocess
import sys

import pytest
import torch
from torch.testing import assert_close

from analysis.garfa import draw_alphas
from analysis.positions import figures
from checkpoints.hf_config import from_hf_config
from checkpoints.model_dir import load_model, write_model_dir
from checkpoints.modeling_farsight import FarsightForCausalLM
from configs.load import ConfigError, read_toml
from configs.schema import (
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
from kernels import head_rotation
from kernels.head_rotation import rotate_heads
from model.build import ModelConfig, build_model
from model.garfa import alphas, garfa_of, garfa_of_tensors, head_scales, train_garfa
from model.layers import describe
from model.rope import rope_frequencies, rope_tables, rotate
from tests.running import ROOT, environment

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
        for parameter in model.parameters():  # at their initial values, heads hardly attend and positions hardly count
            if parameter.dim() > 1:
                parameter.normal_(std=0.25, generator=generator)
    return model.eval()


def tokens_of(*shape):
    return torch.randint(96, shape, generator=torch.Generator().manual_seed(0))


# ── The rotation ──────────────────────────────────────────────────────────────────────────────────────


def draw(B=2, L=9, K=3, H=8, dtype=torch.float64, shared=False):
    generator = torch.Generator().manual_seed(B + L + H)
    x, dy = (torch.randn(B, L, K, H, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    positions = torch.arange(L)[None] if shared else torch.randint(0, 500, (B, L), generator=generator)
    wide = torch.promote_types(dtype, torch.float32)
    frequencies = torch.rand(K, H // 2, generator=generator, dtype=torch.float64).to(wide)
    return x, dy, positions, frequencies, torch.tensor(1.3, dtype=wide)


def written_out(x, positions, frequencies, factor):
    """Complex numbers: dimension i and i + H/2 are one, multiplied by factor · exp(i · position · frequency)."""
    half = x.shape[-1] // 2
    angle = positions[..., None, None].double() * frequencies.double()
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(factor.double(), angle)
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize("shared", [False, True])
def test_rotation_and_gradients_against_complex_numbers(shared):
    x, dy, positions, frequencies, factor = draw(shared=shared)
    leaves = x.requires_grad_(), frequencies.requires_grad_()
    y = rotate_heads(leaves[0], positions, leaves[1], factor)
    exact = written_out(*leaves[:1], positions, leaves[1], factor)
    found, expected = (torch.autograd.grad(z, leaves, dy) for z in (y, exact))
    for a, b in zip((y, *found), (exact, *expected), strict=True):
        assert_close(a, b, rtol=1e-12, atol=1e-10)
    assert torch.autograd.gradcheck(lambda x, f: rotate_heads(x, positions, f, factor), leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_frequencies_are_ropes_tables_to_the_last_bit(dtype):
    for rotary in (Rope(), YarnRope(factor=4.0, original_length=16), Llama3Rope(original_length=16)):
        frequencies = rope_frequencies(rotary, 16, 300)
        x = torch.randn(2, 300, 3, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
        positions = torch.arange(600).view(2, 300)
        scales = head_scales(torch.full((3,), IDENTITY), 16, 14)
        y = rotate_heads(x, positions, frequencies.inv_freq * scales, torch.tensor(frequencies.attention_factor))
        assert torch.equal(y, rotate(x, *rope_tables(positions, frequencies)))


def test_only_what_is_needed_is_kept():
    x, _, positions, frequencies, factor = draw(dtype=torch.bfloat16, L=40)
    for trained, kept in ((False, 0), (True, x.numel())):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):  # noqa: B023
            rotate_heads(x.requires_grad_(), positions, frequencies.clone().requires_grad_(trained), factor)
        assert sum(sizes) == kept + positions.numel() + frequencies.numel() + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("H", "L", "shared"), [(8, 37, True), (24, 300, False), (128, 70, True)])
def test_triton_against_torch(dtype, H, L, shared):
    """On a GPU where there is one; elsewhere interpreted, where bf16 is cut off and not rounded: an ulp is left for that."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, dy, positions, frequencies, factor = draw(H=H, L=L, dtype=dtype, shared=shared)
    x = x.transpose(1, 2).contiguous().transpose(1, 2)  # heads before tokens in memory
    found, expected = [], []
    for backend, results in (("triton", found), ("torch", expected)):
        on = device if backend == "triton" else "cpu"
        leaves = [z.detach().to(on).requires_grad_() for z in (x, frequencies)]
        y = rotate_heads(leaves[0], positions.to(on), leaves[1], factor.to(on), backend)
        results += [z.detach().cpu() for z in (y, *torch.autograd.grad(y, leaves, dy.to(on)))]
        # Without the gradient by frequencies that by x is the same.
        y = rotate_heads(leaves[0], positions.to(on), leaves[1].detach(), factor.to(on), backend)
        assert torch.equal(torch.autograd.grad(y, leaves[0], dy.to(on))[0].cpu(), results[1])
    ulp = torch.finfo(dtype).eps
    for a, b in zip(found[:2], expected[:2], strict=True):
        assert_close(a, b, rtol=ulp if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    assert_close(found[2], expected[2], rtol=1e-4, atol=1e-5 * float(expected[2].abs().max()))


def test_heads_that_lie_far_apart(tmp_path):
    """The third 2^31 numbers behind the first: in a file with holes, of which a few pages are read."""
    from kernels import triton_head_rotation as kernels

    if torch.cuda.is_available():
        pytest.skip("the interpreter's tensors are the CPU's")
    x, dy, positions, frequencies, factor = draw(B=1, dtype=torch.bfloat16)
    large = torch.from_file(str(tmp_path / "holes"), shared=True, size=2**32 + 2**20, dtype=torch.bfloat16)
    (tmp_path / "holes").unlink()
    # They start in the storage's middle, so that an offset that wraps around is in it, and wrong.
    far, far_dy = (large.as_strided(x.shape, (0, 8, 2**30, 1), 2**31 + begin) for begin in (0, 2**19))
    far.copy_(x)
    far_dy.copy_(dy)
    found, expected = (
        (
            kernels.triton_rotate_heads(x, positions, frequencies, factor),
            *kernels.triton_rotate_heads_backward(dy, x, positions, frequencies, factor),
        )
        for x, dy in ((far, far_dy), (x, dy))
    )
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_compiled_checkpointed_and_under_autocast():
    x, dy, positions, frequencies, factor = draw(dtype=torch.bfloat16)

    def loss(x, frequencies):
        return (rotate_heads(x * 1.0, positions, frequencies, factor).float() * dy).sum()

    leaves = x.requires_grad_(), frequencies.requires_grad_()
    expected = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    again = torch.utils.checkpoint.checkpoint
    with torch.autocast("cpu", torch.bfloat16):
        autocast = torch.autograd.grad(loss(*leaves), leaves)
    for found in (
        torch.autograd.grad(compiled(*leaves), leaves),
        torch.autograd.grad(again(loss, *leaves, use_reentrant=False), leaves),
        autocast,
    ):
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b, rtol=1e-5, atol=1e-4)
    with torch.compiler.set_stance("fail_on_recompile"):  # layers of another temperature share what was compiled
        factor.fill_(1.1)
        compiled(*leaves)


def test_a_gpu_that_computes_wrongly_is_refused(monkeypatch):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert head_rotation.try_triton(device, "torch.float32", 16)

    monkeypatch.setattr(head_rotation, "_rotated", lambda x, cos, sin: x.to(cos.dtype) * cos)
    with pytest.raises(RuntimeError, match=r"are off by .* for torch\.float32, head dim 18"):
        head_rotation.try_triton(device, "torch.float32", 18)


def test_triton_under_compile_and_opcheck():
    from kernels import triton_head_rotation as kernels

    x, dy, positions, frequencies, factor = draw(dtype=torch.float32)
    torch.library.opcheck(kernels.triton_rotate_heads, (x, positions, frequencies, factor))
    for saved in (x, None):
        torch.library.opcheck(kernels.triton_rotate_heads_backward, (dy, saved, positions, frequencies, factor))
    leaves = x.requires_grad_(), frequencies.requires_grad_()

    def turned(x, frequencies):
        return rotate_heads(x * 1.0, positions, frequencies, factor, "triton")

    compiled = torch.compile(turned, fullgraph=True, backend="aot_eager")
    for a, b in zip(*(torch.autograd.grad(f(*leaves), leaves, dy) for f in (compiled, turned)), strict=True):
        assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frequencies": torch.rand(2, 4)}, r"inv_freq_KF \[2, 4\]"),
        ({"positions": torch.zeros(3, 9)}, r"pass \[2, 9\] or \[1, 9\]"),
        ({"backend": "triton"}, r"does not take torch.float64"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    x, _, positions, frequencies, factor = draw()
    given = {"positions": positions, "frequencies": frequencies, "backend": "auto", **change}
    with pytest.raises(ValueError, match=message):
        rotate_heads(x, given["positions"], given["frequencies"], factor, given["backend"])


def test_kernels_compile_for_gpus_without_spills():
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton_ahead_of_time", "head_rotation", "128"],
        cwd=ROOT, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(row["kernel"], row["dtype"], row["sm"]) for row in rows} == {
        (k, d, s) for k in ("rotate", "rotate_backward") for d in ("bfloat16", "float32") for s in (80, 90, 100)
    }
    for row in rows:
        assert row["spills"] == 0, row
        assert row["shared"] <= 163 * 1024, row


# ── The equations ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("equation", [14, 12])
def test_scales_are_those_of_another_base(equation):
    """Pair i of plain RoPE turns by (θ·√alpha)^(−2i/H), or (θ·alpha)^(−2i/H), with alpha = 0.1 + 9.9 / (1 + e^−w)."""
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
    """A layer in fp64, head by head: keys (and queries) turned at the scaled frequency times alpha^(−2i/H · e)."""
    garfa = dataclasses.replace(GARFA, queries=queries, equation=equation)
    position = dataclasses.replace(POSITIONS[name], garfa=garfa)
    model, n = fresh_model(position, length=20), torch.arange(20)
    settings = model.positions[2]
    frequencies = rope_frequencies(settings.rotary, 8, 20)
    attention, x = model.layers["2"].attention, torch.randn(1, 20, 32, generator=torch.Generator().manual_seed(0))
    seen: dict[str, torch.Tensor] = {}

    def attend(module, arguments, result):
        seen["o"] = arguments[0]  # what `wo` is given

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
        # Frequencies are fp32: differences of the loss are good to about 1e-3 of it.
        assert float(raw.grad[head]) == pytest.approx((values[0] - values[1]) / 2e-2, rel=2e-2)


def test_compiled_blocks_equal_eager():
    """Layers with GARFA on keys, without, and of other temperatures, one program a kind."""
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
    """FSDP casts a block's parameters; in bf16, w = −ln 10 would be an alpha of 1.005."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from configs.load import build_config
    from parallel.parallelize import apply_fsdp

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
    draw_alphas(tmp_path / "a.png", alphas(GARFA))
    assert (tmp_path / "a.png").stat().st_size > 1000


# ── Through transformers ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", POSITIONS)
def test_exported_models_equal_ours(tmp_path, name):
    """Logits after `from_pretrained`, with a cache, with padding on the left; and what is read back."""
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
    assert "in layers 0,2: the RoPE base times" in card
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
