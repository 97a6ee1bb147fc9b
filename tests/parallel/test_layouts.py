"""The same losses and gradient norms under every layout; `python -m benchmarks.parity` runs all of them."""

import sys
from pathlib import Path

import pytest
import torch

from farsight.benchmarks import parity
from farsight.checkpoints.load import load_model
from farsight.configs.load import build_config
from farsight.errors import ConfigError
from farsight.parallel.gradients import clip_gradients, squared_norm
from farsight.parallel.meshes import ParallelDims
from farsight.parallel.pipeline import modules_of_stages
from tests import running
from tests.running import TINY, contents, metrics, train

LAYOUTS = {layout.name: layout for layout in parity.LAYOUTS}
ZERO_BUBBLE = torch.__version__ >= "2.13"
"""PyTorch 2.11 can't compute the gradients of weights by themselves."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for runs, with a run of every model on one process."""
    folder = tmp_path_factory.mktemp("layouts")
    for model, position in parity.MODELS.items():
        (folder / f"{model}.toml").write_text(parity.CONFIG + position)
        parity.run(parity.ONE, model, folder)
    return folder


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("HSDP 2 × 2", "RoPE"),
        ("TP 2", "SCOPE"),
        ("TP 2 × CP 2", "mixed"),
        ("TP 2 × DDP 2", "RoPE"),
        ("TP 2 × PP 2", "SCOPE"),
        ("CP 4, contiguous", "SCOPE"),
        ("PP 2, accumulation 2", "RoPE"),
        ("PP 2, ZBV zero-bubble", "mixed"),
        ("PP 2 × FSDP 2", "SCOPE"),
    ],
)
def test_a_layout_equals_one_process(folder, name, model):
    if "zero-bubble" in name and not ZERO_BUBBLE:
        with pytest.raises(SystemExit, match=r"needs PyTorch 2\.13"):
            parity.run(LAYOUTS[name], model, folder)
        return
    parity.run(LAYOUTS[name], model, folder)
    for key in ("loss", "grad_norm"):
        found, expected = (parity.series(folder / layout / model, key) for layout in (name, parity.ONE.name))
        assert len(found) == 5
        assert found == pytest.approx(expected, rel=1e-5), key


TENSOR = "--parallelism.tensor_parallel_degree=2"
PIPELINE = "--parallelism.pipeline_parallel_degree=2"
GARFA = "garfa = { layers = [{ layer = 1, raw = [-1.0, -3.0] }] }"
ALL_KINDS = [
    "--architecture.qk_norm", "--position.embedding", "sinusoidal", "--position.bias.kind", "alibi",
    "--activation_checkpoint.mode", "full",
]  # fmt: skip

FAMILIES = [
    *[f"--architecture.{name}" for name in (
        "norm_placement=sandwich", "zero_centered_norms", "qk_norm", "qk_norm_span=projection", "attention_bias=all",
        "mlp_bias", "activation=gelu_tanh", "rotary_dim=4", "softmax_scale=0.3", "scaled_embeddings",
    )],
    "--position.query_scaling.beta=0.5", "--position.query_scaling.original_length=8",
    "--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op", "--optimizer.lr=1e-2",
    "--checkpoint.enable=false",
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        # Frozen parameters stay frozen when tensor parallelism replaces them, and a sharded embedding may also be the head.
        (
            [*ALL_KINDS, "--architecture.tie_embeddings", "--training.layers", "1:"],
            [TENSOR, "--training.enable_cpu_offload"],
        ),
        (
            ALL_KINDS,
            [PIPELINE, f"--parallelism.pipeline_parallel_schedule={'ZBVZeroBubble' if ZERO_BUBBLE else '1F1B'}"],
        ),
        ([*FAMILIES, "--architecture.tie_embeddings"], [TENSOR]),
        (["--architecture.norm_placement=post", *FAMILIES[1:]], [PIPELINE, "--parallelism.context_parallel_degree=2"]),
        ([], [TENSOR, PIPELINE, "--compile.enable", "--compile.backend", "aot_eager"]),
    ],
    ids=["tp", "pp", "families-tp", "families-pp-cp", "tp-pp-compiled"],
)
def test_every_part_of_a_model(tmp_path, model, layout):
    short = ["--training.steps", "3", "--checkpoint.interval", "100"]
    config = TINY.replace("[position]", f"[position]\n{GARFA}")
    train(tmp_path / "one", *short, *model, config=config)
    ranks = 2 ** sum("_parallel_degree" in option for option in layout)
    train(tmp_path / "two", *short, *model, *layout, ranks=ranks, config=config)
    for key in ("loss", "grad_norm"):
        for a, b in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
            assert b[key] == pytest.approx(a[key], rel=1e-5)
    for a, b in zip(metrics(tmp_path / "one", "val_loss"), metrics(tmp_path / "two", "val_loss"), strict=True):
        assert b["val_loss"] == pytest.approx(a["val_loss"], rel=1e-5)


def test_mixed_precision_needs_no_fsdp(tmp_path):
    """Tensor or pipeline parallelism alone trains in bf16 too, by FSDP over single ranks."""
    short = ["--training.steps", "3", "--validation.enable=false", "--checkpoint.enable=false"]
    bf16 = ["--training.mixed_precision_param", "bfloat16"]
    train(tmp_path / "exact", *short)
    train(tmp_path / "fsdp", *short, *bf16, "--training.local_batch_size=2", ranks=2)
    for name, layout in {"tp": TENSOR, "pp": PIPELINE}.items():
        train(tmp_path / name, *short, *bf16, layout, ranks=2)
        for exact, fsdp, row in zip(*(metrics(tmp_path / run) for run in ("exact", "fsdp", name)), strict=True):
            assert row["loss"] == pytest.approx(fsdp["loss"], rel=1e-3)
            figures, in_fp32 = (
                (x["loss"], x["grad_norm"]) for x in (row, exact)
            )  # a loss may come out the same by chance
            assert figures != pytest.approx(in_fp32, rel=1e-5)


@pytest.mark.parametrize("layout", [(2, []), (4, [TENSOR])])
def test_checkpoints_of_weights_gathered_in_float8_are_plain(layout, tmp_path):
    """They are read where torchao is not imported, and a run goes on from them as if it had not stopped."""
    pytest.importorskip("torchao")
    ranks, options = layout
    float8 = ["--model.converters=quantize.linear.float8", "--quantize.linear.float8.emulate"]
    options = [*options, *float8, "--quantize.linear.float8.enable_fsdp_float8_all_gather"]
    options += ["--training.local_batch_size=2", "--lr_scheduler.total_steps=6", "--validation.no_enable"]
    train(tmp_path / "whole", *options, "--training.steps=6", ranks=ranks)
    train(tmp_path / "run", *options, "--training.steps=3", ranks=ranks)
    train(tmp_path / "run", *options, "--training.steps=6", ranks=ranks)
    ends = [contents(tmp_path / name / "checkpoint" / "step-6") for name in ("whole", "run")]
    for name, value in ends[0].items():
        if isinstance(value, torch.Tensor):
            assert type(ends[1][name]) is torch.Tensor
            assert torch.equal(value, ends[1][name]), name
    checkpoint = tmp_path / "run" / "checkpoint" / "step-6"
    for shard in checkpoint.glob("*.distcp"):
        assert b"torchao" not in shard.read_bytes()
    running.run([sys.executable, "-m", "farsight", "convert", "to-hf", str(checkpoint), str(tmp_path / "model")])
    saved, exported = load_model(checkpoint)[0].state_dict(), load_model(tmp_path / "model")[0].state_dict()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in saved.items())


def test_float8_layers_train(tmp_path):
    """Emulated, with tensor parallelism: close to bf16, but not equal."""
    short = ["--training.steps", "3", "--validation.enable=false", "--training.mixed_precision_param", "bfloat16"]
    float8 = ["--model.converters", "quantize.linear.float8", "--quantize.linear.float8.emulate"]
    train(tmp_path / "bf16", *short, TENSOR, ranks=2)
    done = train(tmp_path / "float8", *short, *float8, TENSOR, ranks=2)
    assert "float8: 14 linear layers, scaled tensorwise" in done.stderr
    for a, b in zip(metrics(tmp_path / "bf16"), metrics(tmp_path / "float8"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=2e-3)
        assert b["loss"] != a["loss"]
    if not torch.cuda.is_available():
        refused = train(tmp_path / "real", *short, *float8[:2], check=False)
        assert refused.returncode == 2
        assert "needs a GPU with float8 products" in refused.stderr


def test_resumed_under_other_layouts(tmp_path):
    """FSDP 4, TP 2 × FSDP 2, TP 2 × PP 2, one process; no batch is repeated or skipped."""
    schedule = ["--lr_scheduler.total_steps", "9", "--validation.enable=false"]
    train(tmp_path / "whole", *schedule, "--training.steps", "9")
    moved: Path = tmp_path / "moved"
    train(moved, *schedule, "--training.steps", "3", "--training.local_batch_size", "1", ranks=4)
    train(moved, *schedule, "--training.steps", "5", "--training.local_batch_size", "2", TENSOR, ranks=4)
    train(moved, *schedule, "--training.steps", "7", TENSOR, PIPELINE, ranks=4)
    train(moved, *schedule, "--training.steps", "9")
    for a, b in zip(metrics(tmp_path / "whole"), metrics(moved), strict=True):
        assert (b["step"], b["tokens"]) == (a["step"], a["tokens"])
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5)


def test_norms_do_not_lose_digits():
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((4096, 128), (3,))]
    # Many squares far below one large one, as in a head's gradient: an fp32 sum stops growing.
    parameters[0].grad = torch.full((4096, 128), 1e-3).index_fill_(0, torch.tensor([0]), 1.0)
    parameters[1].grad = torch.tensor([3.0, 4.0, 12.0])
    dims = ParallelDims(1)
    expected = sum(float(p.grad.double().square().sum()) for p in parameters) ** 0.5
    before = parameters[1].grad.clone()
    norm = squared_norm(parameters, dims).sqrt()
    assert float(norm) == pytest.approx(expected, rel=1e-10)
    clip_gradients(parameters, 2.0, norm)
    torch.testing.assert_close(parameters[1].grad, before * (2.0 / expected), rtol=1e-5, atol=0)
    norm = squared_norm(parameters, dims).sqrt()
    assert float(norm) == pytest.approx(2.0, rel=1e-5)
    clip_gradients(parameters, 10.0, norm)
    torch.testing.assert_close(parameters[1].grad, before * (2.0 / expected), rtol=1e-5, atol=0)  # unchanged


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"parallelism": {"tensor_parallel_degree": 3}}, "= 3 does not divide architecture.n_kv_heads = 4"),
        (
            {"parallelism": {"tensor_parallel_degree": 4, "context_parallel_degree": 8}, "training": {"seq_len": 2064}},
            "does not divide training.seq_len / 8 context-parallel ranks = 258",
        ),
        (
            {"parallelism": {"tensor_parallel_degree": 2}, "validation": {"seq_len": 63}},
            "does not divide validation.seq_len / 1 context-parallel ranks = 63",
        ),
        (
            {"parallelism": {"context_parallel_degree": 2}, "validation": {"seq_len": 62}},
            "validation.seq_len = 62 is not a multiple of 4",
        ),
        ({"parallelism": {"enable_async_tensor_parallel": True}}, "needs torch.compile and tensor parallelism"),
        ({"parallelism": {"pipeline_parallel_degree": 2}, "training": {"local_batch_size": 1}}, "gives a pipeline 1 micro-batches"),
        (
            {"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 3}, "training": {"local_batch_size": 4}},
            "4 is not a multiple of parallelism.pipeline_parallel_microbatch_size = 3",
        ),
        (
            {"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_stages_per_rank": 2}, "training": {"local_batch_size": 4}},
            "pipeline_parallel_stages_per_rank = 2: 1F1B has 1",
        ),
        (
            {"parallelism": {"pipeline_parallel_degree": 2}, "training": {"local_batch_size": 4}, "architecture": {"tie_embeddings": True}},
            "the first and the last stage would share a weight",
        ),
        (
            {"parallelism": {"pipeline_parallel_degree": 2}, "training": {"local_batch_size": 4, "layers": "0"}},
            "stages with nothing to train",
        ),
        (
            {"parallelism": {"pipeline_parallel_degree": 2}, "training": {"local_batch_size": 4}, "validation": {"local_batch_size": 2}},
            "have to equal training's",
        ),
        (
            {
                "parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"},
                "training": {"local_batch_size": 4},
                "compile": {"enable": True},
            },
            "splits backward passes",
        ),
    ],
)  # fmt: skip
def test_what_does_not_divide_is_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        build_config({"model": {"flavor": "tiny"}, **options})


def test_stages_hold_layers_by_their_cost():
    """At this length two dense layers cost more than six with narrow windows."""
    rules = [{"layers": "2:", "heads": {"kind": "window", "window": 16}}]
    config = build_config(
        {
            "architecture": {"n_layers": 8, "vocab_size": 512},
            "training": {"seq_len": 32768, "local_batch_size": 2},
            "position": {"rules": rules},
            "parallelism": {"pipeline_parallel_degree": 2},
        }
    )
    assert modules_of_stages(config) == [
        ["tok_embeddings", "layers.0"],
        ["layers.1", *(f"layers.{i}" for i in range(2, 8)), "norm", "output"],
    ]
