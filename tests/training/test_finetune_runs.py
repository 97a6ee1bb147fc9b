"""Complete runs of `train.py finetune`: layouts, resuming, early stopping, and the files they write."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from farsight.checkpoints.load import load_model
from farsight.configs.schema import Llama3Rope, Position
from farsight.evals.perplexity.__main__ import main as perplexity
from tests.finetuned import tokens, write_base
from tests.running import contents, forked, metrics

CONFIG = """
[base_model]
path = "{base}"
quantization = "nf4"
dtype = "float32"

[tokenizer]
kind = "bytes"

[lora]
rank = 4
alpha = 8.0
dropout = 0.1
layers = "1:"

[garfa]
layers = "0:2"
lr = 1e-1

[data]
sources = [{{ kind = "jsonl", path = "{rows}" }}]
held_out = 0.1

[training]
steps = 6
seq_len = 128
local_batch_size = 4
global_batch_size = 4

[activation_checkpoint]
mode = "none"

[optimizer]
lr = 1e-2

[validation]
freq = 3

[checkpoint]
interval = 2

[metrics]
log_freq = 1
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetuning")
    write_base(folder / "base", Position(rotary=Llama3Rope(original_length=64)))
    rows = folder / "rows.jsonl"
    with rows.open("w") as file:
        for n in range(60):
            answer = {"role": "assistant", "content": f"{n} and {n % 7} make {n + n % 7}."}
            file.write(json.dumps({"messages": [{"role": "user", "content": f"{n} + {n % 7}?"}, answer]}) + "\n")
    path = folder / "config.toml"
    path.write_text(CONFIG.format(base=folder / "base", rows=rows))
    return path


def finetune(config, folder, *options, ranks=1, check=True):
    arguments = ["train.py", "finetune", "--job.config_file", str(config), "--job.dump_folder", str(folder), *options]
    done = forked(arguments[1:], folder.with_suffix(".printed"), ranks)
    if check and done.returncode:
        raise AssertionError(f"ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done


@pytest.fixture(scope="module")
def alone(config, tmp_path_factory):
    """The run on one process that the others are compared with."""
    folder = tmp_path_factory.mktemp("runs") / "alone"
    finetune(config, folder)
    return folder


NO_DROPOUT = "--lora.dropout=0"
SHARDS_INTEGERS = torch.__version__ >= "2.13"


def assert_refused(config, folder, *options):
    """PyTorch 2.11 shards no quantised base."""
    done = finetune(config, folder, *options, ranks=2, check=False)
    assert done.returncode == 2, done.stderr
    assert "can't shard a quantised base" in done.stderr


LAYOUTS = {
    "accumulated": (1, "--training.local_batch_size=1"),
    "recomputed": (1, "--activation_checkpoint.mode=full"),
    "fsdp, recomputed": (2, "--training.local_batch_size=2", "--activation_checkpoint.mode=full"),
    "compiled": (1, "--compile.enable"),
    "ddp": (2, "--training.local_batch_size=2", "--parallelism.data_parallel_replicate_degree=2",
            "--parallelism.data_parallel_shard_degree=1"),
    "fsdp": (2, "--training.local_batch_size=2"),
    "context": (2, "--parallelism.context_parallel_degree=2"),
    "zero 1": (2, "--training.local_batch_size=2", "--engine=deepspeed", "--deepspeed.zero_stage=1"),
    "zero 2": (2, "--training.local_batch_size=2", "--engine=deepspeed", "--deepspeed.zero_stage=2"),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "plain"
    finetune(config, folder, NO_DROPOUT)
    return folder


OTHERS = {
    "dora": ("--lora.dora",),
    "whole layers": (
        "--base_model.quantization=none", "--lora.enable=false", "--garfa.enable=false", "--training.layers=-2:", "--merge",
    ),
    "bf16": ("--base_model.dtype=bfloat16",),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_fsdp_trains_what_one_process_does(config, tmp_path, name):
    options = [NO_DROPOUT, *OTHERS[name]]
    sharded = [*options, "--training.local_batch_size=2"]
    if "--base_model.quantization=none" not in options and not SHARDS_INTEGERS:
        assert_refused(config, tmp_path / "two", *sharded)
        return
    finetune(config, tmp_path / "one", *options)
    finetune(config, tmp_path / "two", *sharded, ranks=2)
    bound = 1e-2 if name == "bf16" else 1e-5
    for key in ("loss", "grad_norm", "val_loss"):
        expected = [row[key] for row in metrics(tmp_path / "one", key)]
        assert [row[key] for row in metrics(tmp_path / "two", key)] == pytest.approx(expected, rel=bound), key
    assert metrics(tmp_path / "one")[-1]["loss"] < metrics(tmp_path / "one")[0]["loss"]
    if "--merge" in options:
        one, two = (load_model(tmp_path / name / "model")[0] for name in ("one", "two"))
        x = tokens(length=32)
        assert torch.allclose(one(x), two(x), atol=1e-4)
        base, _ = load_model(config.parent / "base")
        assert not torch.allclose(one(x), base(x), atol=1e-2)


def test_deepspeed_computes_in_bf16(config, tmp_path, monkeypatch):
    """As on a GPU: DeepSpeed asks whether autocast is on there, which it never is on a CPU."""
    script = tmp_path / "as_on_a_gpu.py"
    script.write_text(
        "import runpy, torch\n"
        "torch.is_autocast_enabled = lambda device='cpu': torch._C._is_any_autocast_enabled()\n"
        "runpy.run_path('train.py', run_name='__main__')\n"
    )
    options = ["finetune", "--job.config_file", str(config), NO_DROPOUT, "--base_model.dtype=bfloat16"]
    zero = ["--engine=deepspeed", "--deepspeed.zero_stage=2"]
    for folder, more in (("plain", []), ("zero", zero)):
        arguments = [*options, "--job.dump_folder", str(tmp_path / folder), *more]
        done = forked(arguments, tmp_path / f"{folder}.printed", script=str(script))
        assert done.returncode == 0, done.stderr
    for key in ("loss", "grad_norm", "val_loss"):
        expected = [row[key] for row in metrics(tmp_path / "plain", key)]
        assert [row[key] for row in metrics(tmp_path / "zero", key)] == pytest.approx(expected, rel=1e-5), key


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_alike(config, plain, tmp_path, name):
    ranks, *options = LAYOUTS[name]
    if name in ("fsdp", "fsdp, recomputed", "context") and not SHARDS_INTEGERS:
        assert_refused(config, tmp_path / "run", *options)
        return
    finetune(config, tmp_path / "run", NO_DROPOUT, *options, ranks=ranks)
    for key in ("loss", "grad_norm", "val_loss", "alpha.0.0", "alpha.1.1"):
        expected = [row[key] for row in metrics(plain, key)]
        assert [row[key] for row in metrics(tmp_path / "run", key)] == pytest.approx(expected, rel=1e-5), key
    assert metrics(plain)[-1]["loss"] < metrics(plain)[0]["loss"]


@pytest.fixture(scope="module")
def uneven(config, tmp_path_factory):
    """Options for rows of very different lengths that are not packed, and a run with a global batch in one piece."""
    folder = tmp_path_factory.mktemp("uneven")
    with (folder / "rows.jsonl").open("w") as file:
        for n in range(60):
            file.write(json.dumps({"instruction": "a" * (1 + n % 7), "output": f"{n}." * (1 + 4 * (n % 11))}) + "\n")
    data = f'--data.sources=[{{ kind = "jsonl", path = "{folder / "rows.jsonl"}" }}]'
    options = [NO_DROPOUT, data, "--data.packing=false", "--training.seq_len=256", "--training.steps=4"]
    finetune(config, folder / "whole", *options)
    return options, folder / "whole"


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, ["--training.local_batch_size=1"]),
        (2, ["--training.local_batch_size=1"]),
        (2, ["--training.local_batch_size=2", "--parallelism.context_parallel_degree=2"]),
    ],
    ids=["accumulated", "fsdp", "context"],
)
def test_padding_by_micro_batch_changes_no_loss_and_no_gradient(config, uneven, tmp_path, ranks, options):
    if ranks > 1 and not SHARDS_INTEGERS:
        assert_refused(config, tmp_path / "run", *options)
        return
    common, whole = uneven
    finetune(config, tmp_path / "run", *common, *options, ranks=ranks)
    for key in ("loss", "grad_norm", "val_loss", "alpha.0.0"):
        expected = [row[key] for row in metrics(whole, key)]
        assert [row[key] for row in metrics(tmp_path / "run", key)] == pytest.approx(expected, rel=1e-5), key
    before, after = (metrics(folder) for folder in (whole, tmp_path / "run"))
    assert [row["tokens"] for row in before] == [row["tokens"] for row in after]
    assert all(row["padding"] <= former["padding"] for row, former in zip(after, before, strict=True))
    assert after[0]["padding"] < before[0]["padding"]


def in_eight_bits(x):
    """Whether the values of every block of 256 are the block's largest times entries of torchao's map."""
    from torchao.optim.quant_utils import create_dynamic_map

    blocks = x.view(-1, 256).double()
    shares = blocks / blocks.amax(1, keepdim=True)
    entries = torch.tensor(create_dynamic_map(signed=False), dtype=torch.float64)
    return bool(((shares[..., None] - entries).abs().amin(-1) < 1e-6).all())


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_resumed_in_mid_epoch_equals_undisturbed(config, alone, tmp_path, optimizer):
    folder = tmp_path / "run"
    options = ["--optimizer.kind", optimizer]
    if optimizer != "adamw":
        # Of fewer than 4,096 numbers torchao keeps moments in fp32.
        options += ["--lora.rank=64"]
        alone = tmp_path / "alone"
        finetune(config, alone, *options)
    shutil.copytree(alone, folder)
    # Back to step 4, as after a kill.
    shutil.rmtree(folder / "checkpoint" / "step-6")
    finetune(config, folder, *options)
    a, b = contents(alone / "checkpoint" / "step-6"), contents(folder / "checkpoint" / "step-6")
    assert in_eight_bits(next(x for name, x in a.items() if "lora_A" in name and name.endswith("exp_avg_sq"))) == (
        optimizer != "adamw"
    )
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]) if isinstance(a[name], torch.Tensor) else a[name] == b[name], name
    for key in ("loss", "val_loss", "grad_norm"):
        assert [row[key] for row in metrics(folder, key)] == [row[key] for row in metrics(alone, key)]


def test_a_run_stops_early_and_keeps_the_best_adapter(config, tmp_path):
    folder = tmp_path / "run"
    # No step is better than the first one by so much; the third one is the best all the same.
    options = ["--validation.freq=1", "--early_stopping.patience=2", "--early_stopping.min_delta=9"]
    done = finetune(config, folder, *options)
    losses = {row["step"]: row["val_loss"] for row in metrics(folder, "val_loss")}
    assert list(losses) == [0, 1, 2, 3]
    assert min(losses, key=losses.get) == 3
    assert "adapter of step 3" in done.stderr
    again = finetune(config, folder, *options)  # it has ended, and stays so
    assert "adapter of step 3" in again.stderr
    assert len(metrics(folder, "val_loss")) == 4


def test_an_adapter_of_steps_that_run_again_is_not_kept(config, tmp_path):
    """The run is killed between a validation that wrote the adapter and the checkpoint that would record it."""
    folder = tmp_path / "run"
    finetune(config, folder, "--validation.freq=1", "--checkpoint.keep_latest_k=4")
    for step in (4, 6):
        shutil.rmtree(folder / "checkpoint" / f"step-{step}")
    # Steps 3 and 4 now change nothing, and are no better than step 2, whose adapter is gone.
    still = ["--training.steps=4", "--optimizer.lr=1e-12", "--garfa.lr=1e-12", "--checkpoint.accept_changes=optimizer"]
    done = finetune(config, folder, "--validation.freq=1", *still)
    marker = json.loads((folder / "adapter" / "farsight_adapter.json").read_text())
    kept = sum(entry["steps"] for entry in marker["training"])
    assert kept in (3, 4)
    assert f"adapter of step {kept}" in done.stderr


def test_settings_changed_at_a_resume_are_used_and_recorded(config, tmp_path):
    folder = tmp_path / "run"
    finetune(config, folder, "--training.steps=2", "--lr_scheduler.min_lr_factor=1", "--lr_scheduler.warmup_steps=1")
    more = ["--lr_scheduler.min_lr_factor=1", "--lr_scheduler.warmup_steps=1", "--optimizer.lr=1e-3"]
    more += ["--checkpoint.accept_changes=optimizer"]
    finetune(config, folder, "--training.steps=4", "--garfa.warmup_ratio=0.5", *more)
    assert [row["lr"] for row in metrics(folder)] == pytest.approx([1e-2, 1e-2, 1e-3, 1e-3])
    marker = json.loads((folder / "adapter" / "farsight_adapter.json").read_text())
    entries = [(entry["steps"], entry["optimizer"]["lr"]) for entry in marker["training"]]
    assert entries == [(2, 1e-2), (2, 1e-3)]


def test_the_rate_of_garfa_is_that_of_its_step(config, tmp_path):
    finetune(config, tmp_path / "run", "--training.steps=4", "--garfa.warmup_ratio=0.5", "--garfa.lr=0.1")
    assert [row["lr_garfa"] for row in metrics(tmp_path / "run", "lr_garfa")] == pytest.approx([0.05, 0.1, 0.1, 0.05])


def test_an_8_bit_base_trains_and_resumes(config, tmp_path):
    options = ["--base_model.quantization=int8", "--base_model.dtype=bfloat16"]
    finetune(config, tmp_path / "run", *options, "--training.steps=2")
    finetune(config, tmp_path / "run", *options, "--training.steps=4")
    losses = [row["val_loss"] for row in metrics(tmp_path / "run", "val_loss")]
    assert losses[-1] < losses[0]


def test_other_adapters_are_not_resumed(config, tmp_path):
    finetune(config, tmp_path / "run", "--training.steps=2")
    done = finetune(config, tmp_path / "run", "--lora.rank=8", check=False)
    assert done.returncode == 2
    assert "holds other adapters" in done.stderr
    write_base(tmp_path / "other", Position(rotary=Llama3Rope(original_length=64)), seed=5)
    done = finetune(config, tmp_path / "run", f"--base_model.path={tmp_path / 'other'}", check=False)
    assert done.returncode == 2
    assert "holds other weights" in done.stderr
    shutil.copytree(config.parent / "base", tmp_path / "changed")
    (path,) = (tmp_path / "changed").glob("*.safetensors")
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][2, 3] += 1e-3
    save_file(tensors, path)
    done = finetune(config, tmp_path / "run", f"--base_model.path={tmp_path / 'changed'}", check=False)
    assert done.returncode == 2
    assert "holds other weights" in done.stderr
    shutil.copytree(config.parent / "base", tmp_path / "moved")
    finetune(config, tmp_path / "run", f"--base_model.path={tmp_path / 'moved'}", "--training.steps=3")


def test_a_dry_run_builds_everything_and_trains_nothing(config, tmp_path):
    done = finetune(config, tmp_path / "run", "--dry-run")
    assert "fits" in done.stderr
    # Rank 4, three layers: inputs and outputs of q, k, v, o (64 and 64, 32, 32, 64), gate, up, down (64 and 96).
    assert f"{4 * 3 * (128 + 96 + 96 + 128 + 3 * 160):,} parameters" in done.stderr
    assert "everything is ready for 6 steps" in done.stderr
    assert not (tmp_path / "run" / "checkpoint").exists()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    shown = finetune(config, tmp_path / "run", "--inspect", "2")
    assert "row 1:" in shown.stdout


def test_memory_that_runs_out_is_explained(config, tmp_path, monkeypatch):
    import torch

    import train

    class Full:
        def __init__(self, config, evaluator):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    said = []
    monkeypatch.setattr("farsight.training.finetune.trainer.Finetuner", Full)
    monkeypatch.setattr(train.logger, "error", said.append)
    monkeypatch.setattr(train.logger, "info", lambda line: None)
    status = train.main(["finetune", "--job.config_file", str(config), "--job.dump_folder", str(tmp_path / "run")])
    assert status == 5
    assert "loading" in said[0]
    assert "Tried to allocate 2.00 GiB" in said[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--parallelism.tensor_parallel_degree=2"], "PEFT's layers can't be divided"),
        (["--base_model.quantization=int8", "--lora.dora"], "lora.dora does not work with"),
        (["--optimizer.kind=paged_adamw8bit"], "pages GPU memory"),
        (["--training.layers=0"], "lora.enable"),
        (["--base_model.path=nowhere"], "does not exist"),
        (["--lora.layers=sensitive:2"], "layer_profile"),
        (["--engine=deepspeed", "--deepspeed.zero_stage=3"], "zero_stage = 3"),
        (["--engine=deepspeed", "--training.clip=group"], "computes one norm"),
        (["--lora.rank=0"], "lora.rank = 0"),
        (["--training.enable_cpu_offload", "ranks=2"], "scales stay on the GPU"),
        (
            ["--base_model.quantization=int8", "--parallelism.context_parallel_degree=2",
             "--parallelism.data_parallel_shard_degree=1", "ranks=2"],
            "FSDP can't shard",
        ),
        (["--base_model.quantization=int8", "ranks=2"], "FSDP can't shard"),
        (["--compile.enable", "ranks=2"], "under FSDP"),
        (["--inspect", "none"], "--inspect 3"),
        (
            ["--model.flavor=nano"],
            r"^(?!.*norm_placement).* the base .*: vocab_size is \d+ here and \d+ there; dim is .* there\. Leave out model.flavor = 'nano' and any",
        ),
        (["--architecture.dim=96"], r"dim is 96 here and 64 there; .*\. Leave out \[architecture\]"),
    ],
)  # fmt: skip
def test_what_is_refused(config, tmp_path, monkeypatch, options, said):
    import train

    if options[-1] == "ranks=2":
        monkeypatch.setenv("WORLD_SIZE", "2")
        options = options[:-1]
    with pytest.raises(ValueError, match=said):
        train.finetune(["--job.config_file", str(config), "--job.dump_folder", str(tmp_path / "run"), *options])


@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluations_read_the_adapter_as_it_is(ranks, config, tmp_path):
    """The run does not notice them, and the last figure is that of the adapter that it leaves."""
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"{n} and {n % 7} make {n + n % 7}." for n in range(99)))
    options = ["--validation.no_enable", "--training.local_batch_size=2"]
    finetune(config, tmp_path / "plain", *options, ranks=ranks)
    evaluations = f"""
[[evaluations]]
kind = "perplexity"
every = 4
data = ["{text}"]
lengths = [32]
"""
    path = tmp_path / "evaluating.toml"
    path.write_text(config.read_text() + evaluations)
    finetune(path, tmp_path / "run", *options, ranks=ranks)
    assert metrics(tmp_path / "plain")
    for key in ("loss", "grad_norm", "lr_garfa"):
        a, b = ([row[key] for row in metrics(tmp_path / run, key)] for run in ("plain", "run"))
        assert a == b
    for name in ("adapter_model.safetensors", "garfa.safetensors"):
        a, b = (load_file(tmp_path / run / "adapter" / name) for run in ("plain", "run"))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)
    rows = metrics(tmp_path / "run", "perplexity.32")
    assert [row["step"] for row in rows] == [4, 6]
    out = tmp_path / "figures.json"
    perplexity([str(tmp_path / "run" / "adapter"), "--data", str(text), "--lengths", "32", "--json", str(out)])
    assert json.loads(out.read_text())["lengths"]["32"] == rows[-1]["perplexity.32"] != rows[0]["perplexity.32"]
    assert not list(tmp_path.rglob("evaluations/*/adapter"))
    done = finetune(path, tmp_path / "run", "--evaluations.0.where=beside", check=False)
    assert done.returncode == 2
    assert 'where = "beside", which is for pre-training' in done.stderr
