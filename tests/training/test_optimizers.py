"""Optimizers by kind: against PyTorch's own on whole matrices, the same in every layout, and resumed under another one."""

import math
from functools import partial
from typing import get_args

import pytest
import torch
from torch import nn

from farsight.configs.load import build_config, load_config
from farsight.configs.optimizers import Adam, AdamW, AdamW8bit, FinetuneOptimizer, Muon, Optimizer
from farsight.errors import ConfigError
from farsight.parallel.meshes import ParallelDims
from farsight.training.optimizers.build import KINDS as BUILDERS
from farsight.training.optimizers.build import build_optimizers
from farsight.training.optimizers.muon import is_matrix
from farsight.training.schedule import rate
from tests import running
from tests.running import metrics

TENSOR = "--parallelism.tensor_parallel_degree=2"
SHORT = ["--validation.enable=false", "--lr_scheduler.total_steps=6", "--lr_scheduler.warmup_steps=2"]
KINDS = ["adamw", "adamw8bit", "muon"]


class Model(nn.Module):
    """Parameters of each sort, named as a model's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tok_embeddings = nn.Embedding(128, 64)
        self.layers = nn.ModuleDict({"0": nn.Linear(64, 96), "1": nn.Linear(96, 64, bias=False)})
        self.output = nn.Linear(64, 128, bias=False)


def steps(optimizers, model, number=4):
    for step in range(number):
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizers.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def build(model, **optimizer):
    config = build_config({"optimizer": optimizer, "lr_scheduler": {"warmup_steps": 0}})
    return build_optimizers(config, [model], ParallelDims(1))


@pytest.mark.parametrize("kind", ["adamw", "adam"])
def test_adam_is_pytorchs(kind):
    cls = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[kind]
    model, theirs = Model(), Model()
    ours = build(model, kind=kind, lr=0.01, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.2)
    exact = cls(theirs.parameters(), lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2, fused=True)
    found, expected = steps(ours, model), steps(exact, theirs)
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_muon_steps_blocks_matrices_as_pytorchs_and_adamw_the_rest():
    model, theirs = Model(), Model()
    settings = {"lr": 0.01, "weight_decay": 0.2}
    matrices = [layer.weight for layer in theirs.layers.values()]
    rest = [theirs.tok_embeddings.weight, theirs.layers["0"].bias, theirs.output.weight]
    muon = torch.optim.Muon(matrices, momentum=0.9, adjust_lr_fn="match_rms_adamw", **settings)
    adamw = torch.optim.AdamW(rest, betas=(0.8, 0.9), eps=1e-6, fused=True, **settings)

    class Both:
        def step(self):
            muon.step()
            adamw.step()

    ours = build(model, kind="muon", momentum=0.9, beta1=0.8, beta2=0.9, eps=1e-6, **settings)
    found, expected = steps(ours, model), steps(Both(), theirs)
    for name in found:
        torch.testing.assert_close(
            found[name], expected[name], rtol=1e-6, atol=1e-7, msg=lambda text, name=name: name + text
        )


@pytest.mark.slow
def test_eight_bits_are_near_the_moments_in_fp32():
    model, theirs = Model(), Model()
    found = steps(build(model, kind="adamw8bit", lr=0.01), model)
    expected, start = steps(build(theirs, kind="adamw", lr=0.01), theirs), dict(Model().named_parameters())
    for name in found:
        moved = (expected[name] - start[name]).norm()
        assert (found[name] - expected[name]).norm() < 0.05 * moved, name
        if found[name].numel() < 4096:  # kept whole
            torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_state_goes_on_bit_for_bit(kind):
    """State that was saved, and loaded into an optimizer that never stepped, continues as if nothing had happened."""
    model = Model()
    ours = build(model, kind=kind, lr=0.01)
    steps(ours, model, 2)
    saved = {name: value.clone() for name, value in ours.state_dict().items()}
    assert all(value.dtype == torch.float32 for value in saved.values())
    other = Model()
    other.load_state_dict(model.state_dict())
    again = build(other, kind=kind, lr=0.01)
    state = again.state_dict()
    assert state.keys() == saved.keys()
    for name, value in saved.items():
        state[name].copy_(value)
    again.load_state_dict(state)
    found, expected = steps(again, other), steps(ours, model)
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "muon"])
def test_bytes_are_those_of_the_state(kind):
    model = Model()
    ours = build(model, kind=kind, lr=0.01)
    steps(ours, model, 1)
    settings = {"adamw": AdamW, "adamw8bit": AdamW8bit, "muon": Muon}[kind]()
    parameters = [*model.named_parameters()]
    sizes = [settings.state_bytes(p.numel(), 4, is_matrix(name, p.shape)) for name, p in parameters]
    assert all(paged == 0 for _, paged in sizes)

    def size(value):
        parts = [getattr(value, part) for part in ("codes", "scale", "qmap") if hasattr(value, part)] or [value]
        return sum(part.untyped_storage().nbytes() for part in parts)

    state = [v for o in ours.optimizers for state in o.state.values() for key, v in state.items()]
    if kind == "adamw8bit":
        state = [v for v in state if v.dim()]  # its steps are counted on the host
    assert sum(held for held, _ in sizes) == sum(map(size, state))


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("beta1", 1.0, "less than 1"),
        ("beta2", -0.1, "at least 0"),
        ("eps", 0.0, "more than 0"),
        ("weight_decay", -1.0, "at least 0"),
        ("lr", 0.0, "more than 0"),
    ],
)
@pytest.mark.parametrize("kind", [*KINDS, "adam"])
def test_every_kind_checks_its_numbers(kind, option, value, says):
    with pytest.raises(ConfigError, match=rf"optimizer\.{option} = .*{says}"):
        build_config({"optimizer": {"kind": kind, option: value}})


def test_every_kind_of_the_configs_is_built():
    assert {cls.kind for cls in (*get_args(Optimizer), *get_args(FinetuneOptimizer))} == BUILDERS.keys()


def test_another_kind_keeps_the_options_that_all_have(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[optimizer]\nkind = "adamw"\nlr = 0.5\nbeta2 = 0.7\nimplementation = "foreach"\n')
    config = load_config(["--job.config_file", str(path), "--optimizer.kind", "muon"])
    assert config.optimizer == Muon(lr=0.5, beta2=0.7)


def test_what_a_kind_does_not_have_is_refused():
    with pytest.raises(ConfigError, match=r"optimizer\.momentum"):
        build_config({"optimizer": {"kind": "adamw", "momentum": 0.9}})
    with pytest.raises(ConfigError, match=r"optimizer\.momentum = 1.0 .*less than 1"):
        build_config({"optimizer": {"kind": "muon", "momentum": 1.0}})
    with pytest.raises(ConfigError, match="does not work with engine"):
        build_config({"optimizer": {"kind": "muon"}, "engine": "deepspeed"})
    with pytest.raises(ConfigError, match="enable_cpu_offload"):
        build_config(
            {
                "optimizer": {"kind": "muon"},
                "training": {"enable_cpu_offload": True},
                "parallelism": {"tensor_parallel_degree": 2},
            }
        )
    assert build_config({"optimizer": {"kind": "adam"}}).optimizer == Adam()


# ── Layouts ───────────────────────────────────────────────────────────────────────────────────────────


def losses(folder):
    return [row["loss"] for row in metrics(folder)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_losses_in_every_layout_and_resumed_in_another(tmp_path, kind):
    options = [*SHORT, "--optimizer.kind", kind, "--training.steps=4", "--checkpoint.interval=2"]
    train = partial(running.train, script="tests/eager_train.py")
    train(tmp_path / "one", *options)
    expected = losses(tmp_path / "one")
    layouts = {
        "ddp 2": (2, "--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1"),
        "fsdp 2": (2,),
        "tp 2 × fsdp 2": (4, TENSOR),
    }
    for name, (ranks, *layout) in layouts.items():
        train(tmp_path / name, *options, "--training.local_batch_size=2", *layout, ranks=ranks)
        assert losses(tmp_path / name) == pytest.approx(expected, rel=1e-4), name
    train(tmp_path / "fsdp 2", *options, "--training.steps=6")
    train(tmp_path / "one", *options, "--training.steps=6")
    assert losses(tmp_path / "fsdp 2")[4:] == pytest.approx(losses(tmp_path / "one")[4:], rel=1e-4)


# ── Schedules ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("decay_type", ["linear", "sqrt", "cosine"])
@pytest.mark.parametrize("decay_ratio", [None, 0.3, 1.0])
@pytest.mark.parametrize("warmup", [0, 7])
def test_rates_are_torchtitans(decay_type, decay_ratio, warmup):
    from torchtitan.components.lr_scheduler import build_lr_schedulers
    from torchtitan.config import LRScheduler

    settings = LRScheduler(
        warmup_steps=warmup, decay_ratio=decay_ratio, decay_type=decay_type, min_lr_factor=0.1, total_steps=40
    )
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    (theirs,) = build_lr_schedulers([optimizer], settings, 40).schedulers
    decay = 40 - warmup if decay_ratio is None else min(40 - warmup, round(40 * decay_ratio))
    for step in range(40):
        ours = rate(step, total=40, warmup=warmup, decay=decay, shape=decay_type, least=0.1)
        assert ours == theirs.lr_lambdas[0](step)
    assert math.isfinite(rate(40, total=40, warmup=40, decay=0, shape="linear", least=0.0))
