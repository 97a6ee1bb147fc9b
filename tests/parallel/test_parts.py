"""Meshes against the numbering of ranks written out, and recomputation against torchtitan's."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.config.job_config import ActivationCheckpoint
from torchtitan.distributed.activation_checkpoint import apply_ac

from farsight.configs.load import build_config
from farsight.errors import ConfigError
from farsight.model.build import ModelConfig, build_model
from farsight.parallel.device import peak_flops
from farsight.parallel.float8 import convert_to_float8
from farsight.parallel.meshes import ParallelDims
from farsight.parallel.pipeline import stages_of_rank
from farsight.parallel.recompute import attention_ops, expensive_ops, recompute
from tests.parallel.counting import Count

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Outermost first."""
VARIED = {
    "pp": {"pp"}, "dp_replicate": {"dp_replicate"}, "tp": {"tp"}, "cp": {"cp"}, "batch": {"dp_replicate", "dp_shard"},
    "fsdp": {"dp_shard", "cp"}, "loss": {"dp_replicate", "dp_shard", "cp"},
}  # fmt: skip
"""The dimensions in which a mesh's ranks differ."""


@pytest.fixture
def connected():
    def connect(rank, ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)

    yield connect
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "degrees",
    [{}, {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"tp": 2, "cp": 2, "dp_shard": 2}, {"pp": 2, "tp": 2, "dp_replicate": 2},
     {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("rank", ["first", "middle", "last"])
def test_meshes_hold_the_ranks_that_differ_in_their_dimensions(connected, degrees, rank):
    sizes = [degrees.get(name, 1) for name in DIMENSIONS]
    places = list(itertools.product(*map(range, sizes)))  # in the order of ranks
    number = {"first": 0, "middle": len(places) // 2, "last": len(places) - 1}[rank]
    connected(number, len(places))
    dims = ParallelDims(len(places), **degrees)
    for name, varied in VARIED.items():
        fixed = [i for i, dimension in enumerate(DIMENSIONS) if dimension not in varied]
        peers = [r for r, place in enumerate(places) if all(place[i] == places[number][i] for i in fixed)]
        mesh = dims.mesh(name)
        assert (mesh.mesh.flatten().tolist() if mesh is not None else [number]) == peers, name
    shards = dims.shards()
    fixed = [i for i, dimension in enumerate(DIMENSIONS) if dimension in ("pp", "dp_replicate")]
    peers = [r for r, place in enumerate(places) if all(place[i] == places[number][i] for i in fixed)]
    assert (dist.get_process_group_ranks(shards) if shards is not None else [number]) == peers
    assert dims.data_mesh().mesh.numel() == dims.dp_replicate * dims.fsdp


def test_degrees_fill_the_ranks():
    assert ParallelDims(8, dp_replicate=2, dp_shard=-1, tp=2).dp_shard == 2
    with pytest.raises(ValueError, match="number of ranks, 6"):
        ParallelDims(6, dp_shard=4)


def test_stages_go_round_the_ranks_or_there_and_back():
    assert [stages_of_rank(rank, 2, 4, folded=False) for rank in range(2)] == [(0, 2), (1, 3)]
    assert [stages_of_rank(rank, 4, 8, folded=True) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]


def small(mode, option):
    a = {"vocab_size": 64, "dim": 32, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "ffn_dim": 64}
    settings = {"mode": mode, "selective_ac_option": option}
    compiled = {"enable": mode == "memory_budget"}
    return build_config(
        {"architecture": a, "training": {"seq_len": 48}, "activation_checkpoint": settings, "compile": compiled}
    )


def kept_and_gradients(model):
    """Bytes of the storages that autograd keeps after a forward pass, and the gradients."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in own:
            storages[x.untyped_storage().data_ptr()] = x
        return x

    tokens = torch.arange(48)[None] * 7 % 64
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(tokens, torch.arange(48)[None], labels=tokens.roll(-1))
    kept = sum(x.untyped_storage().nbytes() for x in storages.values())
    loss.backward()
    return kept, [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    ("mode", "option"), [("full", "2"), ("selective", "1"), ("selective", "2"), ("selective", "op")]
)
def test_recomputation_keeps_what_torchtitans_keeps(mode, option):
    config = small(mode, option)
    ours, theirs, plain = (build_model(ModelConfig.from_job(config)) for _ in range(3))
    for model in (ours, theirs, plain):
        model.init_weights()
    recompute(ours, config)
    settings = ActivationCheckpoint(
        mode=mode, selective_ac_option=option, per_op_sac_force_recompute_mm_shapes_by_fqns=[]
    )
    apply_ac(theirs, settings, op_sac_save_list=attention_ops(config) | expensive_ops())
    (kept, found), (expected, _), (most, exact) = map(kept_and_gradients, (ours, theirs, plain))
    assert kept == expected < most
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_attention_is_spared(compiled):
    config, full = small("selective", "attention"), small("full", "2")
    model, whole = (build_model(ModelConfig.from_job(config)) for _ in range(2))
    ran, gradients = [], []
    for each, settings in ((model, config), (whole, full)):
        each.init_weights()
        recompute(each, settings)
        for name, block in [*each.layers.named_children()] * compiled:
            each.layers.register_module(name, torch.compile(block, backend="aot_eager", fullgraph=True))
        with Count() as count:
            gradients.append(kept_and_gradients(each)[1])
        ran.append(count.ran)
    attention, product = torch.ops.farsight.banded_attention.default, torch.ops.aten.mm.default
    assert [counted[attention] for counted in ran] == [4, 8]
    assert ran[0][product] == ran[1][product] > 0
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_layers_are_counted_in_the_whole_model():
    """A pipeline's stage has some of them."""
    config = small("selective", "2")
    whole, stage = (build_model(ModelConfig.from_job(config)) for _ in range(2))
    del stage.layers["0"], stage.layers["1"], stage.layers["2"]
    recompute(whole, config)
    recompute(stage, config)
    wrapped = [
        {name for name, block in m.layers.items() if isinstance(block, CheckpointWrapper)} for m in (whole, stage)
    ]
    assert wrapped == [{"1", "3"}, {"3"}]


def float8(**options):
    values = {"model": {"converters": ["quantize.linear.float8"]}, "quantize": {"linear": {"float8": options}}}
    config = build_config(values | {"architecture": {"vocab_size": 64, "dim": 32, "n_layers": 1}})
    with torch.device("meta"):
        model = build_model(ModelConfig.from_job(config))
    convert_to_float8(model, config, sharded=True)
    return {name: module.config for name, module in model.named_modules() if hasattr(module, "linear_mm_config")}


@pytest.mark.parametrize("recipe", [None, "tensorwise", "rowwise"])
def test_float8_recipes_keep_the_other_options(recipe):
    options = {} if recipe is None else {"recipe_name": recipe}
    gathers = recipe != "rowwise"
    layers = float8(emulate=True, enable_fsdp_float8_all_gather=gathers, filter_fqns=["w1"], **options)
    assert layers
    assert not [name for name in layers if "w1" in name]
    assert {(c.emulate, c.enable_fsdp_float8_all_gather) for c in layers.values()} == {(True, gathers)}


def test_a_float8_filter_that_fits_no_layer_is_refused():
    with pytest.raises(ConfigError, match="no linear layer has 'auto_filter_small_kn' in its name"):
        float8(emulate=True, filter_fqns=["w1", "auto_filter_small_kn"])


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12), ("NVIDIA H100 NVL", 835e12), ("NVIDIA L4", 121e12), ("NVIDIA L40", 181e12), ("NVIDIA L40S", 362e12),
        ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA RTX A1000", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)  # fmt: skip
def test_peak_flops_are_those_of_the_data_sheets(name, peak, monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(get_device_name=lambda _: name))
    assert peak_flops(torch.device("cuda")) == peak


def test_memory_budget_is_the_compilers(monkeypatch, tmp_path):
    from torch._functorch import config as functorch

    for name in ("activation_memory_budget", "visualize_memory_budget_pareto", "memory_budget_pareto_dir"):
        monkeypatch.setattr(functorch, name, getattr(functorch, name))
    config = small("memory_budget", "2")
    config.activation_checkpoint.memory_budget, config.job.dump_folder = 0.25, str(tmp_path)
    config.activation_checkpoint.visualize_memory_budget_pareto = True
    model = build_model(ModelConfig.from_job(config))
    recompute(model, config)
    assert functorch.activation_memory_budget == 0.25
    assert functorch.memory_budget_pareto_dir == str(tmp_path / "memory_budget_pareto")
