"""Plans against real allocations, saved tensors, schedules and visible pairs, and against the papers' step times."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from farsight.configs.load import build_config
from farsight.configs.shipped import shipped_configs
from farsight.data.tokenizers.tokenizer import train_sentencepiece
from farsight.errors import ConfigError
from farsight.kernels.scoped_attention import Visibility
from farsight.launch.plan.__main__ import main
from farsight.launch.plan.costs import bandwidth, flops_per_token, step_time, step_traffic
from farsight.launch.plan.hardware import GPUS, Efficiency, Machine, find_gpu
from farsight.launch.plan.heads import compare_head_layouts, imbalance, rank_pairs
from farsight.launch.plan.layout import ParallelLayout
from farsight.launch.plan.memory import rank_memory, saved_activations
from farsight.launch.plan.plan import make_plan
from farsight.launch.plan.run import Run
from farsight.model.build import ModelConfig, build_model
from farsight.model.position.scope import geometric_scopes
from farsight.parallel.context import pieces
from farsight.parallel.recompute import recompute
from farsight.training.stages import load_recipe
from tests.running import ROOT, environment

H100, A100 = (Machine(kind, GPUS[kind]) for kind in ("h100-80g", "a100-80g"))

CONFIGS = shipped_configs()
MAIN = {
    "rope_llama3_8b": 32,
    "scope_llama3_8b": 32,
    "scope_lasp_llama3_8b": 32,
    "lasp_llama3_8b": 64,
    "scope_qwen3_2b": 32,
}
OTHERS = [
    {"recipe": "scope_qwen3_2b", "gpus": 32, "options": {
        "parallelism": {"data_parallel_replicate_degree": 2, "context_parallel_degree": 2, "tensor_parallel_degree": 2}
    }},
    # Rows that do not divide over six FSDP ranks, and two stages on each pipeline rank.
    {"recipe": "scope_qwen3_2b", "gpus": 24, "options": {
        "parallelism": {"pipeline_parallel_degree": 4, "pipeline_parallel_schedule": "ZBVZeroBubble"},
        "compile": {"enable": False}, "training": {"local_batch_size": 4},
    }},
]  # fmt: skip


def stages_of(recipe, options=None):
    return load_recipe(CONFIGS[recipe], options or {})[1]


def planned(recipe, stage, gpus, gpu="a100-80g", options=None):
    (config,) = [s.config for s in stages_of(recipe, options) if s.name == stage]
    return make_plan(f"{recipe} {stage}", config, gpus, Machine(gpu, GPUS[gpu]))


# Memory


@pytest.fixture(scope="module")
def allocated():
    """What the first rank, and the last of a pipeline, allocates; one process for all, since its process groups are fake."""
    cases = [{"recipe": name, "gpus": gpus, "options": {}} for name, gpus in MAIN.items()]
    cases += OTHERS
    done = subprocess.run(
        [sys.executable, "-m", "tests.launch.plan_layouts", json.dumps(cases)],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == 3 * 3 + 2 + 1 + 1 + 2  # pipelines twice
    return rows


def test_parameters_and_optimizer_are_what_a_rank_allocates(allocated):
    for row in allocated:
        (config,) = [s.config for s in stages_of(row["recipe"], row["options"]) if s.name == row["stage"]]
        p = config.parallelism
        if p.pipeline_parallel_schedule == "1F1B":  # asks for a micro-batch a stage
            config.training.local_batch_size = max(config.training.local_batch_size, p.pipeline_parallel_degree)
        layout = ParallelLayout.of(config, row["gpus"])
        memory = rank_memory(Run(config, layout), row["rank"] * layout.pp // row["gpus"])
        if row["rank"] == 0:  # the first shard; FSDP's last may be shorter
            assert (memory.parameters, memory.optimizer) == (row["parameters"], row["optimizer"]), row
        assert memory.parameters == pytest.approx(row["parameters"], rel=0.1), row
        assert memory.optimizer == pytest.approx(row["optimizer"], rel=0.1), row


def small(mode="none", **options):
    architecture = {
        "vocab_size": 512,
        "dim": 64,
        "n_layers": 3,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 16,
        "ffn_dim": 224,
    }
    return build_config(
        {
            "architecture": architecture | options.pop("architecture", {}),
            "training": {"seq_len": 128, "local_batch_size": 2, "mixed_precision_param": "float32"} | options.pop("training", {}),
            "activation_checkpoint": {"mode": mode, "selective_ac_option": "2"},
            "loss": {"chunk_tokens": 1},
            **options,
        }
    )  # fmt: skip


def saved_bytes(config):
    """Bytes of the distinct storages that autograd keeps after a forward pass, without parameters."""
    model = build_model(ModelConfig.from_job(config))
    model.init_weights(torch.device("cpu"))
    recompute(model, config)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}  # the tensors are kept, so that no address comes twice

    def pack(x):
        if x.is_floating_point() and x.untyped_storage().data_ptr() not in own:
            storages[x.untyped_storage().data_ptr()] = x
        return x

    tokens = torch.randint(512, (2, config.training.seq_len))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(tokens, positions=torch.arange(config.training.seq_len).expand_as(tokens), labels=tokens)
    assert loss.requires_grad
    return sum(x.untyped_storage().nbytes() for x in storages.values())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"architecture": {"qk_norm": True}, "position": {"heads": {"kind": "scope"}}},
        {"architecture": {"qk_norm": True, "qk_norm_span": "projection", "norm_placement": "post"}},
        {"architecture": {"norm_placement": "sandwich", "zero_centered_norms": True, "activation": "gelu_tanh"}},
        {"architecture": {"attention_bias": "all", "mlp_bias": True, "softmax_scale": 0.3}},
        {"architecture": {"rotary_dim": 4}, "position": {"query_scaling": {"beta": 0.1}}},
        {"architecture": {"n_kv_heads": 4, "ffn_dim": 96}, "position": {"rotary": {"kind": "none"}}},
        {"position": {"rotary": {"kind": "yarn"}, "lasp": {"s_max": 4.0, "anchor_layers": 2}}},
    ],
)
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_activations_are_what_autograd_saves(mode, options):
    config = small(mode, **options)
    run = Run.of(config, cpu=True)
    memory = rank_memory(run)
    expected = saved_activations(run, run.layout.stages[0][0])
    expected += memory.logits  # of a chunk of one token: the loss's gradients
    if mode != "full":  # which holds the tables where autograd's hooks do not see them
        expected += memory.caches["rope"]
    assert expected == pytest.approx(saved_bytes(config), rel=0.02)


def test_frozen_layers_have_no_gradients_and_save_less():
    whole, part = small(), small(training={"layers": "2:"})
    all_trained, one = (rank_memory(Run.of(c)) for c in (whole, part))
    layer = 2 * 64 * 16 * (4 + 2) + 3 * 64 * 224 + 2 * 64
    assert (one.parameters, one.gradients) == (all_trained.parameters, 4 * layer)
    assert one.saved < all_trained.saved / 2


def test_offload_leaves_no_state_on_the_gpu():
    plan = planned("scope_llama3_8b", "finetune-32k", 32, options={"training": {"enable_cpu_offload": True}})
    assert (plan.worst.parameters, plan.worst.gradients, plan.worst.optimizer) == (0, 0, 0)
    assert plan.time.optimizer > planned("scope_llama3_8b", "finetune-32k", 32).time.optimizer
    alone = small(training={"enable_cpu_offload": True})  # FSDP offloads, and one process has none
    with pytest.raises(ConfigError, match="enable_cpu_offload needs FSDP"):
        Run.of(alone)
    assert rank_memory(Run.of(alone, 2)).parameters == 0


# Work and its balance


@pytest.mark.parametrize("cut", ["contiguous", "zigzag"])
def test_pairs_of_ranks_are_those_of_the_mask(cut):
    scopes, T = (3, 64, 17, 1), 64
    seen = Visibility(torch.tensor(scopes)).mask(T)
    for tp, cp in ((1, 4), (2, 1), (2, 4)):
        table = rank_pairs(scopes, T, tp, cp, cut)
        for i in range(tp):
            for j in range(cp):
                heads = seen[i * 4 // tp : (i + 1) * 4 // tp]
                held = pieces(j, cp, T, cut) if cp > 1 else ((0, T),)
                assert table[i][j] == sum(int(heads[:, begin:end].sum()) for begin, end in held)


def test_imbalance_of_dense_attention_by_hand():
    """Contiguous halves see 1/4 and 3/4 of the pairs; zigzag ones see equally many, except for the diagonal."""
    by_tp, by_cp, _ = imbalance([(2**31,) * 4], 4096, 2, 2, "contiguous")
    assert (by_tp, round(by_cp, 3)) == (1.0, 1.5)
    assert imbalance([(2**31,) * 4], 4096, 2, 2, "zigzag")[1] == 1.0


def test_orders_of_heads_at_128k():
    """The table of model/position/scope.py, and received keys of docs/training/parallel.md (71 MiB a layer on four ranks, zigzag)."""
    config = stages_of("scope_llama3_8b")[2].config
    costs = compare_head_layouts(Run.of(config, 32))
    found = {name: [round(x, 2) for x in cost.imbalance.values()] for name, cost in costs.items()}
    assert found == {
        "sorted": [1.99, 3.71, 5.57], "interleaved": [1.11, 1.35, 1.94], "group_balanced": [1.40, 2.79, 5.57]
    }  # fmt: skip
    assert [round(costs[name].cache_share, 4) for name in ("sorted", "interleaved")] == [0.1622, 0.3845]
    four = stages_of("scope_llama3_8b", {"parallelism": {"context_parallel_degree": 4}})[2].config
    assert compare_head_layouts(Run.of(four, 32))["sorted"].halo_bytes[4] // 32 // 2**20 == 71


def test_flops_of_llama3_8b():
    """6 FLOPs for each weight of 32 layers and the head, 12 for each pair, head and dimension."""
    config = stages_of("rope_llama3_8b")[2].config
    weights = 32 * (2 * 4096 * 128 * (32 + 8) + 3 * 4096 * 14336) + 4096 * 128256
    pairs = 32 * 32 * (131072 + 1) / 2
    assert flops_per_token(Run.of(config, 32)) == pytest.approx(6 * weights + 12 * 128 * pairs, rel=1e-12)


# Traffic


def test_traffic_of_each_dimension_by_hand():
    options = {
        "parallelism": {
            "data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2, "context_parallel_degree": 2,
            "tensor_parallel_degree": 2, "pipeline_parallel_degree": 2,
        },
        "training": {"local_batch_size": 2, "global_batch_size": 16, "mixed_precision_param": "bfloat16"},
        "architecture": {"n_layers": 4},
    }  # fmt: skip
    config = small("full", **options)
    layout = ParallelLayout.of(config, 32)
    assert (layout.microbatches, layout.accumulation) == (2, 2)
    assert [len(stages[0].layers) for stages in layout.stages] == [2, 2]
    traffic = step_traffic(Run(config, layout), 0)
    # Two layers and the embedding, divided by TP 2 but for the norms; gathered once a pass, reduced in fp32, and averaged over
    # copies once a step.
    held = 2 * ((2 * 64 * 16 * 6 + 3 * 64 * 224) // 2 + 2 * 64) + 512 * 64 // 2
    assert traffic["dp_shard"] == 2 * 3 * (2 + 4) * held // 4
    assert traffic["dp_replicate"] == 2 * (4 * held // 4) * 1 // 2
    stream = 64 * 64 * 2  # a row of 128 tokens on two context-parallel ranks, bf16
    # Four collectives a layer forward, backward and again; one each way after the embedding. Half of each goes out.
    assert traffic["tp"] == 4 * (2 * 4 * 3 + 2) * stream // 2
    # Dense heads, zigzag: rank 0 has quarters 0 and 3 and lacks 1 and 2; one key-value head of 16 on each TP rank.
    assert traffic["cp"] == 4 * 2 * 3 * (2 * 16 * 2 * 64)
    assert traffic["pp"] == 4 * stream // 2


LAYER, TABLE = 2 * 64 * 16 * 6 + 3 * 64 * 224 + 2 * 64, 512 * 64


@pytest.mark.parametrize(
    ("options", "gathered", "reduced"),
    [
        # Blocks and embedding for both passes; norm and head are kept from the one to the other.
        ({}, 2 * (3 * LAYER + TABLE) + 64 + TABLE, 3 * LAYER + 2 * TABLE + 64),
        ({"policy": "always"}, 2 * (3 * LAYER + 2 * TABLE + 64), 3 * LAYER + 2 * TABLE + 64),
        ({"policy": "never"}, 3 * LAYER + 2 * TABLE + 64, 3 * LAYER + 2 * TABLE + 64),
        # Embedding, final norm and head are the outermost group's.
        ({"tied": True}, 2 * 3 * LAYER + TABLE + 64, 3 * LAYER + TABLE + 64),
        # Nothing runs backward below the trained layer, but FSDP prefetches one group further; above, gradients pass.
        ({"layers": "1"}, TABLE + 2 * 3 * LAYER + 64 + TABLE, LAYER),
        ({"layers": "2"}, TABLE + LAYER + 2 * 2 * LAYER + 64 + TABLE, LAYER),
        ({"layers": "0"}, 2 * TABLE + 2 * 3 * LAYER + 64 + TABLE, LAYER),
    ],
)
def test_fsdp_gathers_what_it_let_go_of(options, gathered, reduced):
    config = small(
        parallelism={"fsdp_reshard_after_forward": options.get("policy", "default")},
        architecture={"tie_embeddings": options.get("tied", False)},
        training={"layers": options.get("layers", "")},
    )
    layout = ParallelLayout.of(config, 4)
    assert step_traffic(Run(config, layout), 0)["dp_shard"] == 3 * 4 * (gathered + reduced) // 4


@pytest.mark.parametrize(("policy", "gathers"), [("default", 1), ("never", 1), ("always", 2 * 6)])
def test_fsdp_gathers_once_in_a_pass_of_a_pipeline(policy, gathers):
    p = {"pipeline_parallel_degree": 2, "fsdp_reshard_after_forward": policy}
    config = small(parallelism=p, architecture={"n_layers": 4}, training={"local_batch_size": 6})
    layout = ParallelLayout.of(config, 4)
    held = len(layout.stages[0][0].layers) * LAYER + TABLE
    assert step_traffic(Run(config, layout), 0)["dp_shard"] == 4 * (gathers + 1) * held // 2


def test_data_parallel_traffic_of_one_replica_group():
    config = small(parallelism={"data_parallel_replicate_degree": 4, "data_parallel_shard_degree": 1})
    layout = ParallelLayout.of(config, 4)
    parameters = sum(p.numel() for p in build_model(ModelConfig.from_job(config)).parameters())
    assert step_traffic(Run(config, layout), 0)["dp_replicate"] == 2 * 3 * 4 * parameters // 4


@pytest.mark.parametrize(
    ("gpus", "degrees", "dimension", "gigabytes"),
    [
        (8, {}, "dp_shard", 300),  # in one node
        (32, {}, "dp_shard", 8 * 25),  # a ring over each of a node's eight adapters
        (32, {"tensor_parallel": 2}, "dp_shard", 4 * 25),  # four of a group's GPUs in a node
        (32, {"context_parallel": 4}, "dp_shard", 8 * 25),  # parts of a sequence hold parts of the model too
        (32, {"data_parallel_replicate": 4, "data_parallel_shard": 8}, "dp_replicate", 25),
        (32, {"data_parallel_replicate": 4, "data_parallel_shard": 8}, "dp_shard", 300),
        (16, {"data_parallel_replicate": 16, "data_parallel_shard": 1}, "dp_replicate", 8 * 25),
        (16, {"context_parallel": 16}, "cp", 25),  # keys go from rank to rank
        (16, {"pipeline_parallel": 2}, "pp", 25),
    ],
)
def test_a_group_has_the_adapters_of_its_members(gpus, degrees, dimension, gigabytes):
    layout = ParallelLayout.of(small(parallelism={f"{name}_degree": degree for name, degree in degrees.items()}), gpus)
    whole = replace(A100, efficiency=Efficiency(links=1.0))
    assert bandwidth(layout, dimension, whole) == gigabytes * 1e9


def test_adapters_are_no_faster_than_nvlink():
    layout = ParallelLayout.of(small(), 32)
    fast = Machine("fast", replace(A100.gpu, network=60e9), Efficiency(links=0.5))
    assert bandwidth(layout, "dp_shard", fast) == 0.5 * 300e9


# Time


@pytest.mark.parametrize(("stage", "paper"), [("finetune-32k", 232 / 163), ("adapt-128k", 2223 / 1180)])
def test_step_time_ratios_of_the_paper(stage, paper):
    """SCOPE, Figure 17: RoPE over SCOPE on A100s, the same efficiencies for all four points."""
    rope, scope = (planned(name, stage, 32).time.total for name in ("rope_llama3_8b", "scope_llama3_8b"))
    assert rope / scope == pytest.approx(paper, rel=0.15)


def test_efficiency_of_windows_is_that_of_the_papers_prefill():
    """SCOPE 4.6: 2 times faster at 131,072 tokens. A forward pass with the head on the last token alone."""
    e, gpu, scopes, T = A100.efficiency, A100.gpu, geometric_scopes(131072, 32), 131072
    products = 2 * 32 * (2 * 4096 * 128 * (32 + 8) + 3 * 4096 * 14336) * T / (gpu.bf16_flops * e.matmul)

    def attention(heads):
        per_pair = 4 * 128 * 32 / (gpu.bf16_flops * A100.attention("forward"))
        return sum(per_pair * (S * T - S * (S - 1) / 2) / (1 if S == T else e.windows) for S in heads)

    assert (products + attention([T] * 32)) / (products + attention(scopes)) == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize(
    ("gpu", "forward", "backward"),
    [("a100-80g", 195 / 312, 185 / 312), ("h100-80g", 415 / 989, 287 / 989), ("rtx4090-24g", 195 / 312, 185 / 312)],
)
def test_attention_takes_as_long_as_the_kernels_of_the_gpu(gpu, forward, backward):
    """The fastest of Triton and FlashAttention 2 in each pass, from published TFLOP/s; a 4090 reaches an A100's shares."""
    peak, T = GPUS[gpu].bf16_flops, 32768
    options = {"activation_checkpoint": {"mode": "none"}}
    plain = planned("rope_llama3_8b", "finetune-32k", 32, gpu, options)
    rows = plain.run.tokens_per_step / T / 32
    pairs = 32 * 32 * rows * T * (T + 1) / 2  # layers, heads, rows of a GPU
    expected = 128 * pairs * (4 / forward + 10 / backward) / peak
    assert plain.time.compute.attention == pytest.approx(expected)
    given = make_plan("given", plain.config, 32, Machine(gpu, GPUS[gpu], Efficiency(attention=0.5)))
    assert given.time.compute.attention == pytest.approx(128 * pairs * 14 / 0.5 / peak)


def test_more_overlap_hides_more_traffic():
    config = stages_of("scope_llama3_8b", {"training": {"local_batch_size": 1, "seq_len": 2048}})[0].config
    machines = [replace(H100, efficiency=Efficiency(overlap=overlap)) for overlap in (0.0, 0.5)]
    exposed = [step_time(Run.of(config, 64), machine).data_parallel for machine in machines]
    assert exposed[0] > exposed[1] > 0


# The command


def test_a_plan_has_the_contracts_keys(tmp_path, capsys):
    out = tmp_path / "plan.json"
    command = [str(CONFIGS["scope_llama3_8b"]), "--gpus", "64", "--gpu", "h100-80g", "--json", str(out)]
    assert main(command) == 0
    figures = json.loads(out.read_text())
    assert {"parameters", "gradients", "optimizer", "activations", "logits"} <= figures["per_rank_bytes"].keys()
    assert figures["traffic_bytes"].keys() == {"dp_replicate", "dp_shard", "cp", "tp", "pp"}
    assert figures["fits"] is True
    assert figures["step_seconds"] > 0
    assert len(figures["stages"]) == 3
    assert figures["stages"][2]["step_seconds"] == figures["step_seconds"]
    shown = capsys.readouterr().out
    assert "note: as written, training.global_batch_size = 32 is not a multiple" in shown
    assert "sorted                      1.98    3.59    5.17" in shown
    assert all(len(line) <= 132 for line in shown.splitlines())


def test_a_stage_that_fits_in_no_layout_names_a_number_of_gpus_once(capsys):
    scope = str(CONFIGS["scope_llama3_8b"])
    assert main([scope, "--gpus", "1", "--gpu", "rtx4090-24g", "--stage", "pretrain-4k"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "no other layout of 1 GPU fits the memory of rtx4090-24g either: use 2 of them, or GPUs with more memory"
        in shown
    )
    assert "does not fit: 147.7 GiB of 22.1 usable on rtx4090-24g; the note above says what would" in shown
    assert shown.count("more memory") == 1


def test_what_is_suggested_fits():
    config = build_config({"model": {"flavor": "70b"}, "training": {"seq_len": 8192, "local_batch_size": 2}})
    plan = make_plan("70b", config, 32, H100)
    assert not plan.fits
    changed = {"model": {"flavor": "70b"}, "training": {"seq_len": 8192, "local_batch_size": 2}}
    for name, value in plan.suggestion.items():
        section, key = name.split(".")
        changed.setdefault(section, {})[key] = value
    other = make_plan("70b", build_config(changed), 32, H100)
    assert other.fits
    assert other.run.tokens_per_step == plan.run.tokens_per_step
    # Recomputing everything would be enough, and slower.
    recomputed = {"model": {"flavor": "70b"}, "training": {"seq_len": 8192, "local_batch_size": 2}}
    recomputing = make_plan("70b", build_config({**recomputed, "activation_checkpoint": {"mode": "full"}}), 32, H100)
    assert recomputing.fits
    assert other.time.total < recomputing.time.total


def test_vocabulary_is_that_of_the_weights_a_run_starts_from(tmp_path):
    """As in train.py: the tokenizer in the weights' folder, with its size rounded up to a multiple of 64."""
    texts = [" ".join(f"{word}{number}" for word in ("line", "words", "other")) for number in range(200)]
    train_sentencepiece(texts, 330, tmp_path / "model" / "tokenizer")
    settings = {"architecture": {"vocab_size": 0}, "checkpoint": {"initial_load_path": str(tmp_path / "model")}}
    plan = make_plan("start", small(**settings), 1, H100)
    assert plan.config.architecture.vocab_size == 384
    assert plan.notes == []
    settings["checkpoint"]["initial_load_path"] = str(tmp_path)
    with pytest.raises(ConfigError, match="has no tokenizer"):
        make_plan("start", small(**settings), 1, H100)


def test_what_cannot_be_planned_is_said(capsys):
    tiny, recipe = str(ROOT / "configs/tiny.toml"), str(CONFIGS["scope_llama3_8b"])
    for arguments, says in (
        ([tiny, "--gpu", "h100"], "--gpu h100 is not a known GPU. Did you mean 'h100-80g'?"),
        ([tiny, "--gpu", "A100"], "--gpu A100 is not a known GPU. Did you mean 'a100-40g' or 'a100-80g'?"),
        ([recipe, "--nproc", "8"], "there is no option --nproc here: use --gpus"),
        ([tiny, "--windows", "2"], "--windows: 2 must be more than 0 and at most 1"),
        ([tiny, "--matmul", "0"], "--matmul: 0 must be more than 0 and at most 1"),
        ([tiny, "--overlap", "nan"], "--overlap: nan must be a finite number"),
        ([recipe, "--stage", "none"], "has no stage 'none'"),
        ([tiny, "--gpus", "0"], "--gpus: 0 must be at least 1"),
        ([tiny, "--gpus", "-8"], "--gpus: -8 must be at least 1"),
        ([tiny, "--engine", "deepspeed"], 'engine = "deepspeed" can\'t be planned'),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
        assert says in capsys.readouterr().err
    with pytest.raises(ConfigError, match="Did you mean"):
        find_gpu("b200")


def test_a_plan_notes_the_model_that_is_gathered_for_evaluations():
    """8.03B parameters in 2 bytes each."""
    _, stages = load_recipe(CONFIGS["scope_llama3_8b"], {})
    needle = {"kind": "needle", "lengths": [4096]}
    for evaluation, noted in (
        (needle, ["14.96 GiB in bf16"]),
        ({**needle, "device": "cpu"}, []),
        ({**needle, "where": "beside"}, []),
    ):
        (evaluation,) = build_config({"evaluations": [evaluation]}).evaluations
        notes = make_plan("stage", replace(stages[0].config, evaluations=(evaluation,)), 32, H100).notes
        assert [note.partition("too, ")[2].partition(",")[0] for note in notes if "evaluation" in note] == noted
