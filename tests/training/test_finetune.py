"""The adapted model: the stored base, LoRA and GARFA on it, and which parameters train."""

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from farsight.checkpoints.load import load_model
from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.configs.finetuning import Base, FinetuneConfig, FinetuneTraining, GarfaTraining, Lora
from farsight.configs.schema import (
    Architecture,
    Garfa,
    GarfaLayer,
    LayerRule,
    Llama3Rope,
    NoRotary,
    Position,
    Rope,
    Scope,
    YarnRope,
)
from farsight.errors import ConfigError
from farsight.launch.plan.read import read_finetune_config
from farsight.model.adapt.garfa import garfa_of
from farsight.model.adapt.layers import adapted_layers
from farsight.model.adapt.quantized import dequantize
from farsight.model.build import ModelConfig
from farsight.parallel.meshes import ParallelDims
from farsight.training.finetune.model import build_adapted
from farsight.training.optimizers.build import build_optimizers, trained_parameters
from farsight.training.optimizers.container import set_rates
from tests.finetuned import ARCHITECTURE, adapted_model, finetune_config, precision, tokens, write_base


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base") / "model"
    write_base(directory)
    return directory


def gradients(model, config, x):
    """Gradients of each trained tensor and of each block's input."""
    inputs, hooks = {}, []
    for name, block in model.layers.items():

        def keep(module, arguments, name=name):
            if arguments[0].requires_grad:
                arguments[0].retain_grad()
            inputs[name] = arguments[0]

        hooks.append(block.register_forward_pre_hook(keep))
    model.train()
    model.zero_grad()
    with precision(config):
        loss = model(x, labels=x.roll(-1, 1)) / x.numel()
    loss.backward()
    for hook in hooks:
        hook.remove()
    found = {name: parameter.grad.clone() for name, parameter in trained_parameters(model).items()}
    return found | {f"input of {name}": x.grad for name, x in inputs.items() if x.requires_grad}


def cosine(a, b):
    return float(nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["nf4", "fp4"])
def test_gradients_are_those_of_the_dequantised_weights_before_and_after_an_evaluation(
    base, tmp_path, quantization, dtype
):
    config = finetune_config(base, quantization, dtype)
    model = adapted_model(config)
    plain, theirs = load_model(base)
    weights = {
        name: dequantize(p.detach(), config.base_model).float()
        if name.startswith("layers") and p.dim() == 2
        else p.detach()
        for name, p in plain.named_parameters()
    }
    write_model_dir(tmp_path / "twin", theirs, weights)
    twin_config = finetune_config(tmp_path / "twin", "none", dtype)
    twin = adapted_model(twin_config)
    x = tokens()
    before = gradients(model, config, x)
    with torch.no_grad(), precision(config):
        model.eval()(x)
        twin.eval()(x)
    after, expected = gradients(model, config, x), gradients(twin, twin_config, x)
    layers = ARCHITECTURE.n_layers
    assert len(expected) == layers * (7 * 2 + 1) + layers - 1  # the first block's input is frozen
    assert before.keys() == after.keys() == expected.keys()
    for name in expected:
        assert cosine(before[name], expected[name]) >= 0.9999, name
        assert torch.equal(before[name], after[name]), name


def test_quantised_weights_are_bitsandbytes_own(base):
    import bitsandbytes as bnb

    config = finetune_config(base, dtype="float32")
    model = adapted_model(config)
    plain, _ = load_model(base)
    w = plain.layers["1"].feed_forward.w2.weight.detach()
    theirs = bnb.nn.Linear4bit(*w.shape[::-1], bias=False, compute_dtype=torch.float32, quant_type="nf4")
    theirs.weight = bnb.nn.Params4bit(w.clone(), requires_grad=False, quant_type="nf4", compress_statistics=True)
    theirs = theirs.to("cpu")
    x = torch.randn(3, w.shape[1])
    ours = model.layers["1"].feed_forward.w2.base_layer
    assert ours.weight.numel() == w.numel() // 2
    assert torch.equal(ours(x), theirs(x))
    assert not torch.allclose(ours(x), x @ w.T, atol=1e-3)


@pytest.mark.parametrize("quantization", ["none", "nf4", "int8"])
def test_nothing_is_raised_to_fp32(base, quantization):
    model = adapted_model(finetune_config(base, quantization))
    trained = trained_parameters(model)
    for name, parameter in model.named_parameters():
        if name in trained:
            assert parameter.dtype == torch.float32
        elif "norm" in name or name.startswith(("tok_embeddings", "output")) or quantization == "none":
            assert parameter.dtype == torch.bfloat16, name
    seen = []
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.register_forward_hook(lambda module, given, result: seen.append(result.dtype))
    with precision(finetune_config(base, quantization)):
        model(tokens())
    assert {*seen} == {torch.bfloat16}


def test_eight_bits_are_near_the_base(base):
    config = finetune_config(base, "int8")
    model, (plain, _) = adapted_model(config, trained=False), load_model(base)
    with torch.no_grad(), precision(config):
        found, expected = model.eval()(tokens()).float(), plain(tokens()).float()
    assert (found - expected).norm() / expected.norm() < 0.05
    assert min(g.abs().max() for g in gradients(adapted_model(config), config, tokens()).values()) > 0


@pytest.mark.parametrize(
    "position",
    [
        Position(rotary=Llama3Rope(original_length=64)),
        Position(rotary=YarnRope(factor=4.0, original_length=32)),
        Position(rotary=Rope(), heads=Scope()),
    ],
    ids=["llama3", "yarn", "scope"],
)
def test_at_first_garfa_changes_nothing(tmp_path, position):
    plain = write_base(tmp_path / "base", position)
    x = tokens()
    expected = plain(x)
    none = Lora(enable=False)
    identity = adapted_model(finetune_config(tmp_path / "base", "none", "float32", lora=none), trained=False)
    assert torch.equal(identity(x), expected)
    garfa = GarfaTraining(init="paper")
    paper = adapted_model(finetune_config(tmp_path / "base", "none", "float32", lora=none, garfa=garfa), trained=False)
    assert not torch.allclose(paper(x), expected, atol=1e-3)
    alpha = 0.1 + 9.9 / (1 + math.exp(-2.2))
    assert alpha == pytest.approx(9.012, abs=1e-3)
    from farsight.model.adapt.garfa import garfa_of
    from farsight.model.position.garfa import alphas

    assert alphas(garfa_of(paper))[0] == pytest.approx([alpha] * 2)


def test_sharded_and_tied_bases_load(tmp_path):
    tied = Architecture(**{**vars(ARCHITECTURE), "tie_embeddings": True})
    plain = write_base(tmp_path / "base", architecture=tied, shard_bytes=50_000)
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 3
    model = adapted_model(finetune_config(tmp_path / "base", "none", "float32"), trained=False)
    assert torch.equal(model(tokens()), plain(tokens()))


def test_lora_starts_as_peft_starts_it(base):
    model = adapted_model(finetune_config(base, lora=Lora(rank=32, dropout=0.0)), trained=False)
    weights = trained_parameters(model)
    assert all(not p.any() for name, p in weights.items() if ".lora_B." in name)
    a = torch.cat([p.detach().flatten() * p.shape[1] ** 0.5 for name, p in weights.items() if ".lora_A." in name])
    from peft import LoraConfig
    from peft.tuners.lora import Linear

    theirs = Linear(nn.Linear(64, 64), "default", config=LoraConfig(r=4096), r=4096, lora_alpha=1)
    b = theirs.lora_A["default"].weight.detach().flatten() * 8
    assert a.std() == pytest.approx(float(b.std()), rel=0.02)
    assert a.abs().max() == pytest.approx(float(b.abs().max()), rel=0.001)
    again = trained_parameters(adapted_model(finetune_config(base, lora=Lora(rank=32, dropout=0.0)), trained=False))
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_dora_starts_from_the_kept_weights_norms(base):
    config = finetune_config(base, lora=Lora(rank=4, dora=True, modules=("q_proj",), layers=(1,)))
    model = adapted_model(config, trained=False)
    plain, _ = load_model(base)
    kept = dequantize(plain.layers["1"].attention.wq.weight.detach(), config.base_model).float()
    magnitude = trained_parameters(model)["layers.1.attention.wq.lora_magnitude_vector.default.weight"]
    assert torch.allclose(magnitude, kept.norm(dim=1))


def test_numbers_of_parameters_of_the_paper():
    config = FinetuneConfig(base_model=Base("unread"), lora=Lora(layers=(0, *range(23, 32))))
    config.garfa = GarfaTraining(layers=(0, *range(23, 32)))
    a = Architecture(vocab_size=128256, dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, ffn_dim=14336)
    config.architecture, config.position, config.trained_length = a, Position(rotary=Llama3Rope()), 131072
    with torch.device("meta"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("farsight.training.finetune.model.BaseWeights", lambda model, config: None)
        weights = trained_parameters(build_adapted(config))
    lora = sum(p.numel() for name, p in weights.items() if "lora" in name)
    assert (lora, sum(p.numel() for p in weights.values()) - lora) == (52_428_800, 80)


def test_layers_of_adapters(tmp_path):
    profile = tmp_path / "profile.json"
    profile.write_text('{"delta": [5, 1, 2, 9, 9, 3]}')
    assert adapted_layers("all", 6) == (0, 1, 2, 3, 4, 5)
    assert adapted_layers((4, 1), 6) == (1, 4)
    assert adapted_layers("0,-2:", 6) == (0, 4, 5)
    assert adapted_layers("-1", 6) == (5,)
    assert adapted_layers("sensitive:3", 6, str(profile)) == (0, 3, 4)
    assert adapted_layers("sensitive:1", 6, str(profile)) == (3,)  # of equal ones the lower
    assert adapted_layers("random:2:123", 6, str(profile)) == tuple(sorted(random.Random(123).sample([0, 1, 2, 5], 2)))
    for wrong, said in {
        (6,): "0 to 5$",
        (-1,): '0 to 5; to count from the end, write "-1" as a string',
        (1, 1): "twice",
        "sensitive:7": "1 to 6",
        "6": "0 to 5",
    }.items():
        with pytest.raises(ValueError, match=said):
            adapted_layers(wrong, 6, str(profile))
    with pytest.raises(ValueError, match="layer_profile"):
        adapted_layers("sensitive:2", 6)
    with pytest.raises(ValueError, match="has 6 layers, the model 7"):
        adapted_layers("sensitive:2", 7, str(profile))


def test_what_cannot_be_trained_is_refused(base, tmp_path):
    with pytest.raises(ConfigError, match="layer 7 is not one"):
        finetune_config(base, lora=Lora(layers=(7,)))
    with pytest.raises(ConfigError, match="nothing would train"):
        finetune_config(base, lora=Lora(enable=False), garfa=GarfaTraining(enable=False))
    write_base(tmp_path / "nope", Position(rotary=Rope(), rules=(LayerRule("3", rotary=NoRotary()),)))
    with pytest.raises(ConfigError, match="layer 3 does not rotate"):
        adapted_model(finetune_config(tmp_path / "nope"))
    assert adapted_model(finetune_config(tmp_path / "nope", garfa=GarfaTraining(layers="0:3")))
    with pytest.raises(ConfigError, match="does not exist"):
        finetune_config(tmp_path / "missing")


def test_groups_have_their_own_rates(base):
    config = finetune_config(base, garfa=GarfaTraining(lr=1e-3, weight_decay=0.0, warmup_ratio=0.5))
    config.training.steps = 8
    config.lr_scheduler.warmup_steps, config.lr_scheduler.min_lr_factor = 2, 0.1
    (optimizer,) = build_optimizers(config, [adapted_model(config)], ParallelDims(1)).optimizers
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    assert [p.numel() for p in optimizer.param_groups[1]["params"]] == [2] * 4
    rates = []
    for step in range(8):
        assert set_rates([optimizer], step) == optimizer.param_groups[0]["lr"]
        rates.append([group["lr"] for group in optimizer.param_groups])
    lora, garfa = zip(*rates, strict=True)
    cosine = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * i / 6)) for i in range(6)]
    assert lora == pytest.approx([1e-4, 2e-4, *[2e-4 * c for c in cosine]])
    falling = [0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(4)]
    assert garfa == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, *[1e-3 * c for c in falling]])


def test_whole_layers_train_in_fp32(base):
    training = FinetuneTraining(seq_len=64, layers="-2:")
    none = {"lora": Lora(enable=False), "garfa": GarfaTraining(enable=False), "training": training}
    config = finetune_config(base, "none", **none)
    model = adapted_model(config)
    weights = trained_parameters(model)
    assert {name.split(".")[1] for name in weights} == {"2", "3"}
    assert {p.dtype for p in weights.values()} == {torch.float32}
    assert {p.dtype for name, p in model.named_parameters() if name not in weights} == {torch.bfloat16}
    found = gradients(model, config, tokens())
    assert min(g.abs().max() for g in found.values()) > 0
    assert "input of 2" not in found  # nothing below the lowest that trains is passed back to


def test_a_longer_context_takes_other_positions(tmp_path):
    write_base(tmp_path / "base", Position(rotary=Rope(), heads=Scope()), length=64)
    yarn = Position(rotary=YarnRope(factor=4.0, original_length=64))
    config = finetune_config(tmp_path / "base", position=yarn, training=FinetuneTraining(seq_len=256))
    assert ModelConfig.from_job(config).trained_length == 256  # beyond the base's 64
    assert isinstance(adapted_model(config).positions[0].rotary, YarnRope)


def test_other_positions_keep_what_the_base_learned(tmp_path):
    learned = Garfa(layers=(GarfaLayer(1, (1.5, -3.0)),))
    write_base(tmp_path / "base", Position(rotary=Rope(), garfa=learned))
    yarn = Position(rotary=YarnRope(factor=4.0, original_length=64))
    off = {"garfa": GarfaTraining(enable=False)}
    assert garfa_of(adapted_model(finetune_config(tmp_path / "base", position=yarn, **off))) == learned
    without = replace(yarn, garfa=Garfa())  # asked for
    assert garfa_of(adapted_model(finetune_config(tmp_path / "base", position=without, **off))) is None
    file = tmp_path / "planned.toml"
    file.write_text(
        f'[base_model]\npath = "{tmp_path / "base"}"\n[position.rotary]\nkind = "yarn"\nfactor = 4.0\noriginal_length = 64\n'
    )
    assert read_finetune_config(file, []).position == replace(yarn, garfa=learned)
