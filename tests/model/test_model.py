"""The model against `transformers`, its size against the papers, and its FLOPs against counting."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3Config

from farsight.checkpoints.load import load_model, read_model_config
from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.checkpoints.model_dir.hf_config import from_hf_config, to_hf_config
from farsight.configs.load import build_config
from farsight.configs.schema import (
    Alibi,
    Architecture,
    DynamicNtkRope,
    Lasp,
    LayerRule,
    LinearRope,
    Llama3Rope,
    LongRope,
    NoRotary,
    NtkRope,
    Position,
    Rope,
    Scope,
    SlidingWindow,
    YarnRope,
)
from farsight.errors import ConfigError
from farsight.model import llama
from farsight.model.build import ModelConfig, build_model, count_parameters, freeze_all_but, set_length
from farsight.model.flops import batch_flops, matmul_flops_per_token
from farsight.model.llama import FeedForward

SMALL = Architecture(vocab_size=96, dim=32, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=48, norm_eps=1e-5)
SIZES = Path(__file__).parents[2] / "configs" / "sizes"


def fresh_model(config: ModelConfig, length: int | None = None):
    model = build_model(config, length)
    model.init_weights()
    # Norm weights other than one, and embeddings small enough that the input token does not dominate the logits.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
            if name.endswith(("wq.weight", "wk.weight")):
                parameter.mul_(20)  # attention that is far from uniform
    return model.eval()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("qk_norm", [False, True], ids=["llama", "qwen3"])
@pytest.mark.parametrize(
    "rotary",
    [
        Rope(theta=500.0),
        LinearRope(factor=4.0),
        NtkRope(factor=4.0),
        DynamicNtkRope(factor=4.0, original_length=64),
        YarnRope(factor=4.0, original_length=24),
        Llama3Rope(factor=8.0, original_length=32),
        LongRope(short_factor=(1.0, 1.1, 1.2, 1.3), long_factor=(1.0, 2.0, 3.0, 4.0), factor=4.0, original_length=64),
    ],
    ids=lambda r: r.kind,
)
def test_logits_equal_transformers(rotary, qk_norm, tied, tmp_path):
    architecture = dataclasses.replace(SMALL, qk_norm=qk_norm, tie_embeddings=tied)
    config = ModelConfig(architecture, Position(rotary=rotary), trained_length=64)
    model = fresh_model(config)
    write_model_dir(tmp_path / "m", config, model.state_dict())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m", attn_implementation="eager").eval()
    tokens = torch.randint(96, (2, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, expected = model(tokens), theirs(tokens).logits
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
    assert expected.std() > 0.1

    # And back: our reader, with and without farsight.json.
    again, read = load_model(tmp_path / "m")
    assert read == config
    with torch.no_grad():
        assert torch.equal(again(tokens), ours)
    (tmp_path / "m" / "farsight.json").unlink()
    again, _ = load_model(tmp_path / "m")
    with torch.no_grad():
        torch.testing.assert_close(again(tokens), ours, atol=1e-5, rtol=1e-5)


def test_attention_of_a_mixed_stack_against_the_equations():
    """One layer of each kind of attention, written out head by head and token by token."""
    position = Position(
        rotary=NoRotary(),
        heads=Scope(layout="interleaved"),
        rules=(
            LayerRule(layers="1", bias=Alibi(), heads=SlidingWindow(window=5)),
            LayerRule(layers="2", rotary=LinearRope(theta=100.0, factor=2.0)),
        ),
    )
    config = ModelConfig(SMALL, position, trained_length=20)
    model = fresh_model(config).double()
    starts = torch.tensor([0] * 7 + [7] * 9 + [16] * 4)[None]
    positions = torch.arange(20)[None] - starts
    x = torch.randn(1, 20, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for layer, block in model.layers.items():
        at, settings = block.attention, config.layers()[int(layer)]
        q, k, v = at.wq(x).view(20, 4, 8), at.wk(x).view(20, 2, 8), at.wv(x).view(20, 2, 8)
        out = torch.zeros(20, 4, 8, dtype=torch.float64)
        for n in range(4):
            for t in range(20):
                seen = range(max(int(starts[0, t]), t - settings.scopes[n] + 1), t + 1)
                qt = _rotated(q[t, n], positions[0, t], layer)
                scores = torch.stack([qt @ _rotated(k[i, n // 2], positions[0, i], layer) / 8**0.5 for i in seen])
                if settings.bias is not None:
                    scores = scores - settings.bias.coefficients[0][n] * torch.tensor([float(t - i) for i in seen])
                out[t, n] = (scores.softmax(0)[:, None] * v[list(seen), n // 2]).sum(0)
        rope = None
        if layer == "2":
            from farsight.model.position.rope import rope_frequencies, rope_tables

            rope = rope_tables(positions, rope_frequencies(settings.rotary, 8, 20))
        actual = at(x, rope, starts.int())
        torch.testing.assert_close(actual[0], at.wo(out.flatten(1)), atol=1e-6, rtol=1e-6)
    assert config.layers()[1].scopes == (5,) * 4
    assert sorted(config.layers()[0].scopes) == [3, 5, 10, 20]


def _rotated(x, position, layer):
    if layer != "2":
        return x
    angle = position * 0.5 * 100.0 ** (-torch.arange(0, 8, 2) / 8)
    cos, sin = angle.cos().double(), angle.sin().double()
    a, b = x[:4], x[4:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin])


def test_loss_equals_cross_entropy_of_the_logits():
    config = ModelConfig(SMALL, Position(heads=Scope()), trained_length=32)
    model = fresh_model(config)
    tokens = torch.randint(96, (2, 33), generator=torch.Generator().manual_seed(0))
    labels = tokens[:, 1:].clone()
    labels[0, :5] = -100
    loss = model(tokens[:, :-1], labels=labels)
    logits = model(tokens[:, :-1])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected)


def test_documents_do_not_see_each_other_and_padding_changes_nothing():
    config = ModelConfig(SMALL, Position(heads=Scope()), trained_length=24)
    model = fresh_model(config)
    tokens = torch.randint(96, (1, 24), generator=torch.Generator().manual_seed(0))
    starts = torch.tensor([[0] * 10 + [10] * 14])
    with torch.no_grad():
        packed = model(tokens, positions=torch.arange(24)[None] - starts, document_starts=starts)
        first, second = model(tokens[:, :10]), model(tokens[:, 10:])
    torch.testing.assert_close(packed, torch.cat([first, second], dim=1), atol=1e-5, rtol=1e-5)


def test_initial_weights_depend_on_seed_and_name_alone():
    deep = dataclasses.replace(SMALL, n_layers=5)
    one = build_model(ModelConfig(SMALL, Position(), 16))
    other = build_model(ModelConfig(deep, Position(rotary=NoRotary()), 16))
    torch.manual_seed(3)
    one.init_weights()
    torch.manual_seed(4)
    other.init_weights()
    theirs = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, theirs[name]), name
    assert one.layers["0"].attention.wq.weight.std().item() == pytest.approx(0.02 * 0.88, rel=0.1)  # truncated at 2σ
    w2 = [block.feed_forward.w2.weight.std().item() for block in other.layers.values()]
    assert w2[3] / w2[0] == pytest.approx(0.5, rel=0.1)  # depth: sqrt(2·1) / sqrt(2·4)


def test_meta_device_then_init_equals_plain_init():
    config = ModelConfig(SMALL, Position(heads=Scope(), bias=Alibi(), lasp=Lasp(anchor_layers=2)), 64)
    plain = build_model(config)
    with torch.device("meta"):
        meta = build_model(config)
    meta.to_empty(device="cpu")
    for model in (plain, meta):
        model.init_weights()
    for (name, a), (_, b) in zip(plain.named_buffers(), meta.named_buffers(), strict=True):
        assert torch.equal(a, b), name
    tokens = torch.arange(40)[None]
    assert torch.equal(plain(tokens), meta(tokens))


def test_scopes_past_the_trained_length():
    tokens = torch.randint(96, (1, 64), generator=torch.Generator().manual_seed(0))
    config = ModelConfig(SMALL, Position(heads=Scope(scope_max="trained")), trained_length=16)
    model = build_model(config)
    set_length(model, config, 64)
    assert max(model.layers["0"].attention.scopes_N.tolist()) == 16
    grows = dataclasses.replace(config, position=Position(heads=Scope(scope_max="length")))
    set_length(model, grows, 64)
    assert max(model.layers["0"].attention.scopes_N.tolist()) == 64
    set_length(model, grows, 8)
    assert max(model.layers["0"].attention.scopes_N.tolist()) == 16
    assert model(tokens).shape == (1, 64, 96)


@pytest.mark.parametrize(
    ("size", "millions"),
    [
        ("tiny", None),
        ("nano", 212),
        ("2b", 2010),
        ("8b", 8030),
        ("llama3.2-1b", 1236),
        ("llama3.1-8b", 8030),
        ("70b", 70554),
        ("smollm3-3b", 3075),
        ("mistral-7b", 7241.732),
        ("qwen2.5-7b", 7615.617),
        ("phi3-mini", 3821.080),
        ("olmo2-7b", 7298.617),
        ("gemma3-1b", 999.886),
        ("gemma3-4b", 3880.263),
    ],
)
def test_sizes_have_their_papers_parameters(size, millions):
    config = ModelConfig.from_job(build_config({"model": {"flavor": size}}))
    counted = count_parameters(config)
    a = config.architecture
    attention = 2 * a.dim * a.head_dim * (a.n_heads + a.n_kv_heads)
    spans = {"head": 2, "projection": a.n_heads + a.n_kv_heads}
    attention += spans[a.qk_norm_span] * a.head_dim * a.qk_norm
    attention += (a.n_heads + 2 * a.n_kv_heads) * a.head_dim * (a.attention_bias == "qkv")
    norms = 4 if a.norm_placement == "sandwich" else 2
    by_hand = (
        a.n_layers * (attention + 3 * a.dim * a.ffn_dim + norms * a.dim)
        + a.dim
        + (2 - a.tie_embeddings) * a.vocab_size * a.dim
    )
    assert counted == by_hand
    if millions:
        assert counted / 1e6 == pytest.approx(millions, abs=max(1, millions * 5e-4))


def test_every_size_is_tested():
    sizes = {"tiny", "nano", "2b", "8b", "llama3.2-1b", "llama3.1-8b", "70b", "smollm3-3b"}
    sizes |= {"mistral-7b", "qwen2.5-7b", "phi3-mini", "olmo2-7b", "gemma3-1b", "gemma3-4b"}
    assert {p.stem for p in SIZES.glob("*.toml")} == sizes


def test_flops_by_counting():
    position = Position(heads=Scope(), rules=(LayerRule(layers="1", heads=SlidingWindow(window=3)),))
    config = ModelConfig(SMALL, position, trained_length=12)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4], [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
    expected = sum(
        min(scope, depth + 1)
        for layer in config.layers()
        for scope in layer.scopes
        for depth in positions.flatten().tolist()
    )
    linear = sum(m.weight.numel() for m in build_model(config).modules() if isinstance(m, torch.nn.Linear))
    assert matmul_flops_per_token(SMALL) == 6 * (linear + 96 * 32)
    assert batch_flops(SMALL, config.layers(), positions) == 24 * 6 * (linear + 96 * 32) + 3 * 2 * 2 * 8 * expected


@pytest.mark.parametrize("trained", [None, (0,), (2,), (0, 1)])
def test_flops_are_what_pytorch_counts(trained):
    model = fresh_model(ModelConfig(SMALL, Position(), trained_length=12))
    freeze_all_but(model, trained)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 12, dtype=torch.long)).sum().backward()
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert matmul_flops_per_token(SMALL, trained) * 24 == products
    # Each of a row's 78 causal pairs costs 4·H forward, and 8·H backward from the lowest trained layer on.
    back = 3 - min(trained or (0,))
    flops = batch_flops(SMALL, model.positions, torch.arange(12).expand(2, 12), trained)
    assert flops - products == 2 * 78 * 4 * 8 * (3 * 4 + back * 8)


def test_hf_config_round_trip_and_refusals(tmp_path):
    config = ModelConfig(SMALL, Position(rotary=YarnRope(factor=4.0, original_length=16)), trained_length=64)
    values = to_hf_config(config, "float32", 1, 2)
    assert from_hf_config(values).position == config.position
    scoped = to_hf_config(ModelConfig(SMALL, Position(heads=Scope()), 64), "float32", 1, 2)
    assert scoped["model_type"] == "farsight"
    old = {**values, "rope_parameters": None, "rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert from_hf_config(old).position.rotary == LinearRope(theta=5.0, factor=2.0)
    for change, says in [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "su"}}, "su"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window = 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale": 1.0}}, "mscale"),
    ]:
        with pytest.raises(ConfigError, match=says):
            from_hf_config({**values, **change})
    with pytest.raises(ConfigError, match=r"lacks hidden_size, max_position_embeddings"):
        from_hf_config({k: v for k, v in values.items() if k not in ("max_position_embeddings", "hidden_size")})
    silent = {k: v for k, v in {**values, "model_type": "qwen3"}.items() if k != "head_dim"}
    assert from_hf_config(silent).architecture.head_dim == Qwen3Config().head_dim
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_model_config(tmp_path)


def test_weights_that_do_not_fit_are_named(tmp_path):
    from safetensors.torch import load_file, save_file

    config = ModelConfig(SMALL, Position(), trained_length=64)
    write_model_dir(tmp_path / "m", config, fresh_model(config).state_dict(), shard_bytes=20_000)
    files = sorted((tmp_path / "m").glob("*.safetensors"))
    assert len(files) > 2
    load_model(tmp_path / "m")
    tensors = load_file(files[0])
    name = next(iter(tensors))
    save_file({**tensors, name: torch.zeros(3, 3)}, files[0])
    with pytest.raises(ConfigError, match=rf"{name} has shape \(3, 3\)"):
        load_model(tmp_path / "m")
    save_file({k: v for k, v in tensors.items() if k != name}, files[0])
    with pytest.raises(ConfigError, match=f"lacks 1 tensors.*{name}"):
        load_model(tmp_path / "m")
    save_file({**tensors, "model.extra": torch.zeros(1)}, files[0])
    with pytest.raises(ConfigError, match=r"model\.extra"):
        load_model(tmp_path / "m")
    files[1].unlink()
    with pytest.raises(ConfigError, match=f"{files[1].name}, which is missing"):
        load_model(tmp_path / "m")


def test_rope_tables_stay_fp32_under_fsdp_in_bf16():
    """FSDP casts a block's inputs unless told not to; bf16 tables would be wrong beyond a few hundred tokens."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from farsight.model import attention
    from farsight.parallel.parallelize import apply_fsdp

    job = build_config({"architecture": dataclasses.asdict(SMALL), "training": {"seq_len": 16}})
    model = fresh_model(ModelConfig.from_job(job))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    seen, rotate = [], attention.rotate
    try:
        apply_fsdp(model, init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",)), job)
        attention.rotate = lambda x, cos, sin: (seen.append((x.dtype, cos.dtype, sin.dtype)), rotate(x, cos, sin))[1]
        model(torch.arange(16)[None], labels=torch.arange(16)[None]).backward()
    finally:
        attention.rotate = rotate
        dist.destroy_process_group()
    assert set(seen) == {(torch.bfloat16, torch.float32, torch.float32)}


def test_swiglu_equals_the_formula_and_keeps_two_tensors_of_the_hidden_width():
    dim, ffn = 8, 20
    module = FeedForward(dataclasses.replace(SMALL, dim=dim, ffn_dim=ffn))
    x = torch.randn(2, 5, dim, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        out = module(x)
    grad = torch.randn_like(out)
    ours = torch.autograd.grad(out, [x, *module.parameters()], grad)
    hidden = F.silu(x @ module.w1.weight.T) * (x @ module.w3.weight.T)
    expected = hidden @ module.w2.weight.T
    assert_close(out, expected, rtol=1e-5, atol=1e-6)
    theirs = torch.autograd.grad(expected, [x, module.w1.weight, module.w2.weight, module.w3.weight], grad)
    compiled = torch.autograd.grad(torch.compile(module, backend="eager")(x), [x, *module.parameters()], grad)
    for found in (ours, compiled):
        for mine, other in zip(found, theirs, strict=True):
            assert_close(mine, other, rtol=1e-5, atol=1e-6)
    # silu's input, its factor, and w2's input.
    assert sum(t.numel() == 2 * 5 * ffn for t in kept) == 3


def test_on_gpus_training_keeps_no_tables(monkeypatch):
    """Kernels that compute angles where they are used give what tables give, and autograd then keeps no table of any layer."""
    rules = [LayerRule("1", rotary=NoRotary())]
    position = Position(rotary=YarnRope(factor=4.0), lasp=Lasp(s_max=2.0, anchor_layers=1), rules=rules)
    config = ModelConfig(dataclasses.replace(SMALL, n_layers=4), position, 64)
    tokens = torch.arange(128).view(2, 64) * 7 % 96
    positions = torch.cat([torch.arange(40), torch.arange(24)])[None]
    found = []
    for in_kernels in (False, True):
        monkeypatch.setattr(llama, "can_run_triton", lambda *kind, can=in_kernels: can)
        model, tables = fresh_model(config), []

        def pack(x, kept=tables):
            if x.shape[:2] == (1, 64) and x.is_floating_point():
                kept.append(x)
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = model(tokens, positions, labels=tokens.roll(-1, 1))
        loss.backward()
        found.append((loss, len(tables), [p.grad for p in model.parameters()]))
    assert found[0][1] > 0 == found[1][1]
    assert found[0][0] == found[1][0]
    for ours, by_tables in zip(found[1][2], found[0][2], strict=True):
        assert_close(
            ours, by_tables, rtol=1e-5, atol=1e-6
        )  # the gradient is a rotation back, where autograd adds up products
