"""The memory estimate of fine-tuning against real modules, what autograd saves, and the paper's figures."""

import json
import weakref

import pytest
import torch
from torch import nn

from farsight.configs.check_finetuning import check_base
from farsight.configs.finetuning import FinetuneConfig
from farsight.configs.load import build_config, load_config
from farsight.configs.optimizers import of_kind
from farsight.errors import ConfigError
from farsight.launch.plan.__main__ import main as plan
from farsight.launch.plan.costs import step_traffic
from farsight.launch.plan.hardware import Device, Machine, find_device, find_gpu
from farsight.launch.plan.layout import ParallelLayout
from farsight.launch.plan.memory import rank_memory
from farsight.launch.plan.run import Run
from farsight.launch.plan.suggest import changed, suggestions
from farsight.launch.plan.text import memory_text
from farsight.model.adapt.garfa import train_garfa
from farsight.model.adapt.layers import adapted
from farsight.model.adapt.lora import add_lora, is_lora
from farsight.model.adapt.quantized import fill, is_quantized, quantize_linears
from farsight.model.build import ModelConfig, build_model
from farsight.parallel.recompute import recompute
from tests.running import ROOT

CONFIGS = ROOT / "configs" / "finetune"
PAPER = CONFIGS / "llama3.1_8b_qlora_garfa.toml"
SENSITIVE, RANDOM = (0, *range(23, 32)), (2, 3, 4, 7, 9, 14, 18, 19, 21, 22)
"""L* and L_r of the GARFA paper, section 4."""


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def paper(*options):
    return load_config(["--job.config_file", str(PAPER), *options], FinetuneConfig)


def finetune_memory(config, ranks=1, cpu=False):
    return rank_memory(Run.of(config, ranks, cpu))


def gpu(kind):
    return Machine(kind, find_gpu(kind)).device


def adapter_parameters(config):
    return {group: Run.of(config).trained(group) for group in ("lora", "garfa", "layers")}


def small(**options):
    values = {
        "architecture": {
            "vocab_size": 512, "dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 224,
        },
        "position": {"rotary": {"kind": "rope"}},
        "base_model": {"quantization": "nf4", "dtype": "bfloat16"},
        "lora": {"rank": 8},
        "garfa": {"enable": False},
        "training": {"seq_len": 128, "local_batch_size": 2, "steps": 1},
        "activation_checkpoint": {"mode": "none"},
        "loss": {"chunk_tokens": 1},
    }  # fmt: skip
    for section, changes in options.items():
        values[section] = values[section] | changes
    return build_config(values, FinetuneConfig)


def built(config, device="cpu"):
    """The model that a config describes, built from `model/`, with arbitrary weights on the CPU."""
    layers = adapted(config)
    with torch.device("meta"):
        model = build_model(ModelConfig.from_job(config))
        quantize_linears(model, config.base_model)
        model.requires_grad_(False)
        if layers.lora:
            add_lora(model, config.lora, layers.lora, config.base_model)
        for number in layers.whole:
            for parameter in model.layers[str(number)].parameters():
                parameter.data = parameter.data.float()
                parameter.requires_grad_(True)
        if layers.garfa:
            train_garfa(model, layers.garfa, queries=config.garfa.queries)
    if device == "meta":
        return model
    model.to_empty(device=device)
    for name, module in model.named_modules():
        if is_quantized(module):
            fill(module, torch.randn(module.out_features, module.in_features), config.base_model)
        for parameter_name, parameter in module.named_parameters(f"{name}.", recurse=False):
            if is_lora(parameter_name):
                nn.init.normal_(parameter, std=0.02)
            elif not is_quantized(module):
                model.init_parameter(parameter_name.removeprefix(".").replace("..", "."), parameter)
    model.fill_parameter = lambda name, parameter: None
    model.init_weights(torch.device(device))
    recompute(model, config)
    return model.train()


# Parameters


def test_trained_parameters_of_the_papers_run():
    """Rank 64 on seven projections of ten layers, eight key/value heads."""
    expected = {"lora": 52_428_800, "garfa": 80, "layers": 0}
    assert adapter_parameters(paper()) == expected
    model = built(paper(), device="meta")
    found = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    assert sum(n for name, n in found.items() if is_lora(name)) == expected["lora"]
    assert sum(n for name, n in found.items() if name.endswith("garfa.raw")) == expected["garfa"]


@pytest.mark.parametrize(
    "lora",
    [
        {"dora": True, "layers": "1:"},
        {"modules": ["q_proj", "down_proj"], "rank_pattern": {"layers.1.*q_proj": 3, "mlp.down_proj": 5}},
        {"rank_pattern": {"model.layers.1.mlp.down_proj": 2, "[qv]_proj": 3, "(gate|down)_proj": 5}},
    ],
)
def test_trained_parameters_are_pefts(lora):
    config = small(lora=lora)
    trained = [p for p in built(config, "meta").parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}
    assert sum(p.numel() for p in trained) == adapter_parameters(config)["lora"]


@pytest.mark.parametrize("x", "abcd")
def test_layers_of_the_ablation_are_the_papers(x):
    lora, garfa = {"a": (SENSITIVE,) * 2, "b": (SENSITIVE, RANDOM), "c": (RANDOM, SENSITIVE), "d": (RANDOM,) * 2}[x]
    config = load_config(["--job.config_file", str(CONFIGS / f"ablation_{x}.toml")], FinetuneConfig)
    assert (adapted(config).lora, adapted(config).garfa) == (lora, garfa)
    tiny = load_config(["--job.config_file", str(CONFIGS / f"ablation_{x}.toml"), "--tiny"], FinetuneConfig)
    tiny.architecture = small(architecture={"n_layers": 4}).architecture
    lora, garfa = {"a": ((0, 3),) * 2, "b": ((0, 3), (1, 2)), "c": ((1, 2), (0, 3)), "d": ((1, 2),) * 2}[x]
    assert (adapted(tiny).lora, adapted(tiny).garfa) == (lora, garfa)


# Bytes


def held_by(module):
    """Bytes of a quantised layer's weight and its quantisation state, without tables of values shared by all layers."""
    weight = module.weight
    if weight.dtype == torch.int8:
        return weight.numel() + module.state.SCB.numel() * 4
    state = weight.quant_state
    tensors = [weight, state.absmax, state.code]
    if state.nested:
        tensors += [state.offset, state.state2.absmax]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize(
    "base",
    [
        {},
        {"double_quantization": False},
        {"quantization": "fp4", "dtype": "float32"},
        {"quantization": "int8"},
        {"quantization": "none"},
    ],
)
def test_the_base_takes_what_bitsandbytes_does(base):
    config = small(base_model=base)
    model = built(config)
    counted = sum(held_by(module) for module in model.modules() if is_quantized(module))
    plain = [p for p in model.parameters() if not p.requires_grad and p.dtype.is_floating_point]
    counted += sum(p.numel() * p.element_size() for p in plain)
    if config.base_model.quantization in ("nf4", "fp4") and config.base_model.double_quantization:
        counted += 256 * 4  # the values of 8 bits, which all layers share
    assert finetune_memory(config).frozen == counted


def test_gradients_and_moments_of_a_step():
    config = small(garfa={"enable": True}, lora={"dora": True})
    model = built(config)
    tokens = torch.randint(512, (2, 128))
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens, labels=tokens).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    optimizer.step()
    memory = finetune_memory(config)
    assert memory.trained == sum(p.numel() * p.element_size() for p in trained)
    assert memory.gradients == sum(p.grad.numel() * p.grad.element_size() for p in trained)
    state = [value for values in optimizer.state.values() for value in values.values()]
    assert memory.optimizer == sum(value.numel() * value.element_size() for value in state)


def test_paged_moments_in_8_bits_are_bitsandbytes():
    """8-bit moments are for tensors of 4,096 numbers or more; the state is made without a step, which needs a GPU."""
    import bitsandbytes as bnb

    config = small(garfa={"enable": True}, architecture={"ffn_dim": 700}, lora={"rank": 12})
    parameters = [p for p in built(config).parameters() if p.requires_grad]
    assert {p.numel() < 4096 for p in parameters} == {True, False}
    optimizer = bnb.optim.AdamW8bit(parameters)
    for index, parameter in enumerate(parameters):
        optimizer.init_state(optimizer.param_groups[0], parameter, 0, index)
    state = {id(v): v for values in optimizer.state.values() for v in values.values() if isinstance(v, torch.Tensor)}
    config.optimizer = of_kind(config.optimizer, "paged_adamw8bit")
    memory = finetune_memory(config)
    assert memory.optimizer + memory.paged == sum(v.numel() * v.element_size() for v in state.values())


def test_moments_that_leave_the_gpu():
    """bitsandbytes pages tensors of 100,000 numbers or more: all but the B of keys and values, 1,024 x 64."""
    config = paper("--garfa.enable=false")
    config.optimizer = of_kind(config.optimizer, "paged_adamw")
    memory, stay = finetune_memory(config), 8 * 10 * 2 * 1024 * 64
    assert (memory.optimizer, memory.paged) == (stay, 8 * 52_428_800 - stay)
    assert memory.peak == finetune_memory(paper("--garfa.enable=false")).peak - memory.paged - 4 * 140


class _Held:
    """A tensor that autograd has saved, alive as long as autograd needs it."""

    def __init__(self, tensor):
        self.tensor = tensor


def kept_bytes(config):
    """Bytes of distinct storages kept after a forward pass, by autograd and by bitsandbytes.

    Parameters and their casts aside.
    """
    model, held = built(config), []
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shapes = {tuple(p.shape) for p in model.parameters() if p.requires_grad}

    def pack(x):
        floats = x.is_floating_point() or x.dtype == torch.bool
        if not floats or x.untyped_storage().data_ptr() in own or shapes & {tuple(x.shape), tuple(x.shape)[::-1]}:
            return x
        box = _Held(x)
        held.append(weakref.ref(box))
        return box

    def unpack(box):
        return box.tensor if isinstance(box, _Held) else box

    tokens = torch.randint(512, (2, config.training.seq_len))
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=config.base_model.dtype == "bfloat16")
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), autocast:
        loss = model(tokens, positions=torch.arange(config.training.seq_len).expand_as(tokens), labels=tokens)
    tensors = [box.tensor for box in (ref() for ref in held) if box is not None]
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            if hasattr(node, "A"):  # of bitsandbytes' product in 8 bits
                tensors.append(node.A)
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 1e-9),
        ({"lora": {"dropout": 0.0}}, 1e-9),
        ({"base_model": {"dtype": "float32"}}, 1e-9),
        ({"base_model": {"quantization": "none"}, "architecture": {"qk_norm": True}}, 1e-9),
        ({"architecture": {"norm_placement": "sandwich", "attention_bias": "all", "mlp_bias": True}}, 1e-9),
        ({"architecture": {"zero_centered_norms": True, "activation": "gelu_tanh", "rotary_dim": 4}}, 1e-3),  # 1 + weight
        ({"architecture": {"qk_norm": True, "qk_norm_span": "projection", "norm_placement": "post"}}, 1e-9),
        ({"lora": {"dropout": 0.05, "layers": [1, 2], "modules": ["v_proj", "up_proj"]}}, 1e-9),
        ({"lora": {"dora": True}}, 0.005),
        ({"lora": {"layers": [1]}, "garfa": {"enable": True}}, 0.005),
        ({"base_model": {"quantization": "int8"}}, 0.005),
        ({"activation_checkpoint": {"mode": "full"}}, 1e-9),
        ({"activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"}}, 1e-9),
        ({"activation_checkpoint": {"mode": "full"}, "base_model": {"quantization": "int8"}}, 0.05),
        # The lowest layer keeps less than estimated if nothing before its up-projection is trained.
        ({"lora": {"enable": False}, "base_model": {"quantization": "none", "dtype": "float32"}, "training": {"layers": "1:"}}, 0.03),
    ],
)  # fmt: skip
def test_activations_are_what_is_kept_of_a_forward_pass(options, tolerance):
    config = small(**options)
    memory = finetune_memory(config, cpu=True)
    width = {"bfloat16": 2, "float32": 4}[config.base_model.dtype]
    expected = memory.saved + 256 * 64 * width  # the loss's gradient by hidden states
    if config.activation_checkpoint.mode != "full":  # which holds the tables where autograd's hooks do not see them
        expected += 8 * (config.architecture.rotary_dim or 16) * 256
    assert expected == pytest.approx(kept_bytes(config), rel=tolerance)


def test_recomputation_of_a_block_is_what_it_would_keep():
    kept, again = (finetune_memory(small(activation_checkpoint={"mode": mode})) for mode in ("none", "full"))
    inner = kept.saved - (again.saved - 2 * 256 * 64 * 2)  # layers 1 and 2 without the streams that lead to them
    assert again.recomputed < kept.saved < 3 * again.recomputed + inner
    assert kept.recomputed == 0


def test_copies_in_bf16_are_those_that_autograd_keeps():
    """Casts of the trained matrices in the forward pass: all if blocks are kept, none if they are recomputed."""
    for mode, expected in (("none", 1.0), ("full", 0.0)):
        config = small(activation_checkpoint={"mode": mode}, garfa={"enable": False})
        model, held = built(config), {}
        shapes = {tuple(p.shape) for p in model.parameters() if p.requires_grad}

        def pack(x, held=held, shapes=shapes):
            if x.dtype == torch.bfloat16 and shapes & {tuple(x.shape), tuple(x.shape)[::-1]}:
                held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        tokens = torch.randint(512, (1, 24))
        autocast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), autocast:
            loss = model(tokens, labels=tokens)
        matrices = sum(2 * p.numel() for p in model.parameters() if p.requires_grad)
        # No gradient goes to what the lowest layer's q, k and v read, and so none is taken by their A.
        unread = 3 * 2 * config.lora.rank * config.architecture.dim
        assert sum(held.values()) == expected * (matrices - unread)
        casts = finetune_memory(config).casts
        assert casts == matrices if mode == "none" else 0 < casts < matrices
        del loss


def test_nothing_is_kept_below_the_lowest_layer_that_trains():
    low, high = (finetune_memory(small(lora={"layers": layers})) for layers in ([0], [2]))
    assert high.saved < low.saved
    assert high.trained == low.trained
    frozen_stream = small(lora={"layers": [2]}, activation_checkpoint={"mode": "full"})
    assert finetune_memory(frozen_stream).saved == 2 * 256 * 64 * 2 + 4 * 256  # the block's input, the last norm's


def test_fsdp_divides_weights_and_ddp_does_not():
    one, four = finetune_memory(paper()), finetune_memory(paper("--training.global_batch_size=-1"), ranks=4)
    config = paper("--training.global_batch_size=-1", "--parallelism.data_parallel_replicate_degree=4",
                   "--parallelism.data_parallel_shard_degree=1")  # fmt: skip
    copies = finetune_memory(config, ranks=4)
    assert (copies.frozen, copies.trained, copies.gathered) == (one.frozen, one.trained, 0)
    assert four.trained == pytest.approx(one.trained / 4, rel=1e-5)
    linears = [weight.numel for weight in Run.of(paper()).weights if weight.linear and not weight.trained]
    scales = sum(-(-n // 64) + 4 * -(-n // 64 // 256) for n in linears)
    assert four.frozen == pytest.approx((one.frozen - scales) / 4 + scales, rel=1e-3)
    assert four.gathered > 0


def test_parallelism_costs_what_it_does_in_pre_training():
    """By hand, with three layers, bf16, and two rows of 128 tokens."""
    config = small(training={"local_batch_size": 2, "global_batch_size": 8}, base_model={"quantization": "none"})
    config.parallelism.context_parallel_degree = 2
    run = Run.of(config, 2)
    # Zigzag: a rank has two quarters of a row and lacks two of the others' keys, with two heads of 16; so has the backward pass.
    keys = 2 * 2 * 64 * 2 * 16 * 2
    assert step_traffic(run, 0)["cp"] == 4 * 3 * 2 * keys
    assert rank_memory(run).caches["halo"] == 2 * (keys + keys)

    config.parallelism.context_parallel_degree, config.parallelism.data_parallel_replicate_degree = 1, 2
    run = Run.of(config, 4)
    assert run.layout.accumulation == 1
    replicated = step_traffic(run, 0)["dp_replicate"]
    assert replicated == 4 * run.trained() // 2  # of two replicas' shards
    config.training.global_batch_size = 16
    assert step_traffic(Run.of(config, 4), 0)["dp_replicate"] == replicated  # exchanged after the last pass

    config.training.enable_cpu_offload = True
    offloaded = finetune_memory(config, 4)
    assert (offloaded.frozen, offloaded.trained, offloaded.gradients, offloaded.optimizer) == (0, 0, 0, 0)


# Llama 3.1 8B


def test_llama_8b_fits_24_gb_and_the_papers_batch_80():
    one = finetune_memory(paper("--training.local_batch_size=1"))
    four = finetune_memory(paper())
    assert sum(one.parts.values()) < 24e9
    assert sum(four.parts.values()) < 80e9
    for memory in (one, four):
        assert memory.peak <= sum(memory.parts.values())
    # By hand: 6,979,321,856 weights of linear layers at 4 bits and a byte for 64, two tables of 128,256 x 4,096 in bf16.
    linears, tables = 6_979_321_856, 2 * 128_256 * 4096
    assert one.frozen == pytest.approx(linears * (0.5 + 1 / 64 + 4 / 64 / 256) + 2 * tables, rel=1e-3)
    assert (one.gradients, one.optimizer) == (4 * 52_428_880, 8 * 52_428_880 + 4 * 150)


def test_text_names_parts_device_and_verdict():
    memory = finetune_memory(paper())
    text = memory_text(Run.of(paper()), gpu("h100-80g"))
    assert "LoRA 52,428,800, GARFA 80" in text
    assert text.endswith("fits")
    assert "5.31" in text
    small_device = Device("a small one", 7 * 2**30)
    text = memory_text(Run.of(paper()), small_device)
    assert f"does not fit: {memory.peak / 2**30 - 7:.2f} GiB" in text
    assert "--training.local_batch_size 1" in text
    assert find_device().usable > 2**28
    with pytest.raises(ConfigError, match="Did you mean 'rtx4090-24g'"):
        gpu("rtx4090")


def test_suggestions_save_what_they_say_and_fit():
    config = paper("--training.seq_len=8192", "--base_model.quantization=none", "--activation_checkpoint.mode=none")
    device = gpu("l4-24g")
    before = finetune_memory(config).peak
    alone, enough = suggestions(Run.of(config), device)
    tried = [next(iter(change.options)) for change in alone]
    assert tried[:3] == ["training.local_batch_size", "activation_checkpoint.mode", "base_model.quantization"]
    assert {"optimizer.kind", "training.seq_len", "lora.rank", "lora.layers"} <= {*tried}
    for change in alone:
        assert finetune_memory(changed(config, change.options)).peak == change.peak < before
    assert finetune_memory(changed(config, enough)).peak <= device.usable
    assert config == paper(
        "--training.seq_len=8192", "--base_model.quantization=none", "--activation_checkpoint.mode=none"
    )
    assert suggestions(Run.of(config), Device("none", 2**20))[1] is None


def test_a_batch_row_by_row_is_the_same_on_several_ranks():
    """The global batch is that of all ranks: two copies of four shards, with four rows each."""
    config = paper("--training.global_batch_size=-1", "--parallelism.data_parallel_replicate_degree=2")
    before, first = ParallelLayout.of(config, 8), suggestions(Run.of(config, 8), Device("none", 2**20))[0][0]
    after = ParallelLayout.of(changed(config, first.options), 8)
    assert (before.rows, before.accumulation) == (4, 1)
    assert (after.rows, after.accumulation) == (1, 4)


ZERO_2 = ("--engine=deepspeed", "--deepspeed.zero_stage=2", "--base_model.quantization=none")


@pytest.mark.parametrize(
    ("options", "ranks", "left_out"),
    [
        (ZERO_2, 1, {"adamw8bit", "paged_adamw8bit"}),
        (("--base_model.quantization=none",), 4, {"paged_adamw8bit"}),
        (("--base_model.quantization=none", "--compile.enable"), 4, {"paged_adamw8bit", "base_model.quantization"}),
        (("--base_model.quantization=none", "--parallelism.data_parallel_replicate_degree=4",
          "--parallelism.data_parallel_shard_degree=1"), 4, set()),
    ],
)  # fmt: skip
def test_what_a_run_would_refuse_is_not_suggested(options, ranks, left_out, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # paged moments need a GPU
    config = paper("--training.global_batch_size=-1", *options)
    check_base(config, ranks)
    alone, _ = suggestions(Run.of(config, ranks), Device("none", 2**20))
    for change in alone:
        check_base(changed(config, change.options), ranks)
    tried = {name for change in alone for option in change.options.items() for name in option}
    assert "training.local_batch_size" in tried
    assert {"adamw8bit", "paged_adamw8bit", "base_model.quantization"} - tried == left_out


def test_plan_of_a_fine_tuning_config(tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert plan([str(PAPER), "--gpu", "rtx4090-24g", "--json", str(out), "--training.local_batch_size", "1"]) == 0
    figures = json.loads(out.read_text())
    assert {"parameters", "gradients", "optimizer", "activations", "logits", "parts"} <= figures[
        "per_rank_bytes"
    ].keys()
    assert (figures["fits"], figures["trained_parameters"]["lora"]) == (True, 52_428_800)
    assert figures["per_rank_bytes"]["sum"] == sum(figures["per_rank_bytes"]["parts"].values())
    # All layers and the head forward, their inputs' gradients backward, LoRA in full; pairs 4 forward and 8 backward.
    weights, pairs = 6_979_321_856 + 4096 * 128_256, 32 * 32 * 1025 / 2
    assert figures["flops_per_token"] == pytest.approx(4 * weights + 6 * 52_428_800 + 12 * 128 * pairs, rel=1e-12)
    assert figures["step_seconds"] > 0
    assert "fits" in capsys.readouterr().out
    missing = ["--model.flavor=", "--base_model.path", "nowhere"]
    with pytest.raises(SystemExit, match=r"base_model\.path = 'nowhere' does not exist") as stop:
        plan([str(PAPER), *missing])
    assert stop.value.code == 2


def test_every_config_can_be_planned(tmp_path):
    paths = sorted({*CONFIGS.glob("*.toml")} - {CONFIGS / "tiny.toml"})
    for path, tiny in [*((p, []) for p in paths), *((p, ["--tiny"]) for p in sorted(CONFIGS.glob("ablation_*.toml")))]:
        out = tmp_path / f"{path.stem}{'_'.join(tiny)}.json"
        # The quickstart's base is made by its recipe.
        made = tiny or path.stem == "quickstart"
        options = [*tiny, "--model.flavor=tiny"] if made else []
        assert plan([str(path), "--gpu", "h100-80g", "--json", str(out), *options]) == 0, path
        assert json.loads(out.read_text())["fits"], path
