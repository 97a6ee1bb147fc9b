"""Complete runs: data parallelism, resuming, signals, and how a run refuses or stops."""

import re
import shutil
import signal
import subprocess
import time

import pytest
import torch
from safetensors.torch import load_file

from farsight.checkpoints.cards.model import read_history
from farsight.checkpoints.intact.check import faults
from farsight.checkpoints.load import load_model
from farsight.checkpoints.model_dir.names import TensorNames
from farsight.checkpoints.steps import complete_steps
from farsight.data.tokenizers.tokenizer import load_tokenizer_dir
from farsight.errors import ConfigError
from farsight.model.build import ModelConfig, build_model
from tests.running import ROOT, environment, metrics, run, train, train_command


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train") / "one"
    train(folder)
    return folder


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


def assert_same_weights(a, b):
    a, b = weights(a), weights(b)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def events(folder):
    """(step, what) of the starts, complete checkpoints and ends in a run's metrics, in order."""
    kinds = {"run": "start", "checkpoint": "saved", "ended": "end"}
    rows = metrics(folder, "step")
    return [(row["step"], kinds[key]) for row in rows for key in kinds if key in row]


def test_metrics_tell_of_start_checkpoints_and_end(undisturbed):
    rows = metrics(undisturbed, "step")
    times = [row["time"] for row in rows]
    assert times == sorted(times)
    assert time.time() - 600 < times[0]
    facts = {
        "run": "one",
        "kind": "pre-training",
        "steps": 12,
        "ranks": 1,
        "seq_len": 64,
        "tokens_per_step": 4 * 64,
        "device": "CPU",
    }
    assert rows[0] == {"step": 0, "time": times[0], **facts}
    saves = [(step, "saved") for step in (3, 6, 9, 12)]
    assert events(undisturbed) == [(0, "start"), *saves, (12, "end")]
    assert [row["checkpoint"] for row in metrics(undisturbed, "checkpoint")] == [
        "step-3",
        "step-6",
        "step-9",
        "step-12",
    ]
    assert rows[-1] == {"step": 12, "time": times[-1], "ended": 0, "sentence": "finished"}
    assert all(row["tokens"] == row["step"] * facts["tokens_per_step"] for row in metrics(undisturbed))


def test_a_run_leaves_what_it_promises(undisturbed):
    losses = [row["loss"] for row in metrics(undisturbed)]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.5
    validation = [row["val_loss"] for row in metrics(undisturbed, "val_loss")]
    assert len(validation) == 3  # before, at 6, after
    assert validation[-1] < validation[0]
    assert sorted(p.name for p in (undisturbed / "checkpoint").iterdir()) == ["step-12", "step-9"]  # keep_latest_k = 2
    assert list((undisturbed / "tb").glob("events.*"))
    assert (undisturbed / "config.toml").is_file()
    model, config = load_model(undisturbed / "model")
    assert config.trained_length == 64
    assert config.position.heads.kind == "scope"
    tokenizer = load_tokenizer_dir(undisturbed / "model")
    assert tokenizer.vocab_size <= config.architecture.vocab_size
    assert model(torch.tensor([tokenizer.encode("import os")])).isfinite().all()


@pytest.mark.parametrize(
    "options",
    [
        ["--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree", "1"],
        ["--parallelism.data_parallel_shard_degree", "2"],
        # Two micro-batches a rank: copies of the weights exchange gradients once.
        ["--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree", "1",
         "--training.local_batch_size", "1"],
        ["--parallelism.data_parallel_shard_degree", "2", "--training.local_batch_size", "1"],
        ["--parallelism.context_parallel_degree", "2", "--training.local_batch_size", "4",
         "--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "attention"],
        ["--parallelism.context_parallel_degree", "2", "--training.local_batch_size", "4",
         "--parallelism.context_parallel_load_balancer", "contiguous", "--activation_checkpoint.mode", "full",
         "--compile.enable", "--compile.backend", "aot_eager"],
    ],
    ids=["ddp", "fsdp", "ddp-accumulation", "fsdp-accumulation", "cp-zigzag-attention-kept", "cp-contiguous-recomputed-compiled"],
)  # fmt: skip
def test_two_ranks_equal_one_process(undisturbed, tmp_path, options):
    defaults = ["--training.local_batch_size", "2"]
    train(tmp_path / "two", *defaults, *options, ranks=2)
    for a, b in zip(metrics(undisturbed), metrics(tmp_path / "two"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5)
        assert b["tokens"] == a["tokens"]
    for a, b in zip(metrics(undisturbed, "val_loss"), metrics(tmp_path / "two", "val_loss"), strict=True):
        assert b["val_loss"] == pytest.approx(a["val_loss"], rel=1e-5)


@pytest.mark.parametrize("degrees", [(1, 2), (2, 1)], ids=["fsdp", "ddp"])
def test_layers_that_do_not_train_stay_as_they_started(undisturbed, tmp_path, degrees):
    only = ["--training.layers", "1:"]
    done = train(tmp_path / "one", *only)
    start = build_model(ModelConfig.load(undisturbed / "model" / "farsight.json"))
    start.init_weights()
    for name, value in weights(tmp_path / "one").items():
        same = torch.equal(value, start.get_parameter(TensorNames().parts(name)[0]))
        assert same != name.startswith("model.layers.1."), name
    trained = sum(p.numel() for p in start.layers["1"].parameters())
    assert f"training only layers 1:: {trained:,} parameters" in done.stderr
    # Two ranks, then one process that resumes from their checkpoint, whose optimizer has only some of the parameters.
    replicate, shard = map(str, degrees)
    layout = ["--parallelism.data_parallel_replicate_degree", replicate, "--training.local_batch_size", "2"]
    train(tmp_path / "two", *only, *layout, "--parallelism.data_parallel_shard_degree", shard, ranks=2)
    assert_same_losses(tmp_path / "one", tmp_path / "two")
    shutil.rmtree(tmp_path / "two" / "checkpoint" / "step-12")
    refused = train(tmp_path / "two", check=False)
    assert refused.returncode == 2
    assert "only holds optimizer state of layers 1:" in refused.stderr
    train(tmp_path / "two", *only)
    assert_same_losses(tmp_path / "one", tmp_path / "two")


def assert_same_losses(a, b):
    for x, y in zip(metrics(a), metrics(b), strict=True):
        assert y["loss"] == pytest.approx(x["loss"], rel=1e-5)
        assert y["grad_norm"] == pytest.approx(x["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        ["--activation_checkpoint.mode", "full"],
        ["--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op",
         "--compile.enable", "--compile.backend", "aot_eager"],
    ],
    ids=["recomputed", "selective-compiled"],
)  # fmt: skip
def test_recomputation_and_compilation_change_no_losses(undisturbed, tmp_path, options):
    train(tmp_path / "run", *options)
    assert_same_losses(undisturbed, tmp_path / "run")


def test_a_run_without_checkpoints(tmp_path):
    done = train(tmp_path / "run", "--checkpoint.enable=false", "--training.steps", "3", "--validation.enable=false")
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3]
    assert "step 3 has no checkpoint, so no model directory is written" in done.stderr
    assert not (tmp_path / "run" / "checkpoint").exists()


@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGTERM, ["--checkpoint.interval", "1000"]),
        (signal.SIGINT, ["--checkpoint.interval", "2", "--checkpoint.async_mode", "async"]),
    ],
    ids=["term", "int-async"],
)
def test_a_signal_saves_and_the_same_command_goes_on(undisturbed, tmp_path, number, options):
    folder = tmp_path / "stopped"
    command = train_command(folder, *options)
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True)
    while not (folder / "metrics.jsonl").is_file() or len(metrics(folder)) < 3:
        time.sleep(0.01)
    process.send_signal(number)
    _, printed = process.communicate()
    assert process.returncode == 75
    assert "continues from there" in printed
    (stopped,) = re.findall(r"stopped after step (\d+)", printed)
    assert complete_steps(folder / "checkpoint")[-1] == int(stopped)
    assert faults(folder / "checkpoint" / f"step-{stopped}") == []
    (end,) = metrics(folder, "ended")
    assert (end["step"], end["ended"]) == (int(stopped), 75)
    assert end["sentence"] in printed
    assert events(folder)[-2:] == [(int(stopped), "saved"), (int(stopped), "end")]
    done = train(folder, *options)
    told = events(folder)
    assert told.count((int(stopped), "start")) == 1
    assert told[-2:] == [(12, "saved"), (12, "end")]
    assert f"step-{stopped}" in done.stderr  # where it resumes from
    assert_same_weights(undisturbed, folder)


def test_history_tells_settings_that_changed_on_the_way(tmp_path):
    folder = tmp_path / "run"
    train(folder, "--training.steps", "3")
    train(folder, "--training.steps", "5", "--optimizer.lr", "5e-3", "--checkpoint.accept_changes", "optimizer")
    train(folder, "--training.steps", "6", "--optimizer.lr", "5e-3")
    runs = read_history(folder / "model")
    assert [(r["steps"], r["tokens"], r["optimizer"]["lr"]) for r in runs] == [(3, 768, 1e-2), (3, 768, 5e-3)]
    assert [r["start"] for r in runs] == ["random weights", "the run above, with other settings"]


def test_resume_on_another_number_of_ranks(undisturbed, tmp_path):
    folder = tmp_path / "moved"
    process = subprocess.Popen(train_command(folder), cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True)
    while not (folder / "checkpoint" / "step-3" / ".metadata").is_file():
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    two = ["--training.local_batch_size", "2", "--parallelism.data_parallel_shard_degree", "2"]
    train(folder, *two, ranks=2)
    for a, b in zip(metrics(undisturbed), metrics(folder), strict=True):
        assert b["step"] == a["step"]
        assert b["tokens"] == a["tokens"]
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)


def test_a_start_that_was_interrupted_while_saving_first_still_starts_from_its_weights(undisturbed, tmp_path):
    folder = tmp_path / "second"
    (folder / "checkpoint" / "step-3").mkdir(parents=True)
    (folder / "checkpoint" / "step-3" / "__0_0.distcp").write_bytes(b"half")
    train(folder, "--checkpoint.initial_load_path", str(undisturbed / "model"), "--training.steps", "4")
    first = metrics(undisturbed, "val_loss")
    assert metrics(folder, "val_loss")[0]["val_loss"] == pytest.approx(first[-1]["val_loss"], rel=1e-6)


def test_an_optimizer_can_be_carried_over(undisturbed, tmp_path):
    start = str(undisturbed / "checkpoint" / "step-12")
    carried = [
        "--checkpoint.initial_load_path", start, "--checkpoint.no_initial_load_model_only",
        "--checkpoint.exclude_from_loading", "dataloader,train_state",
    ]  # fmt: skip
    constant = ["--training.steps", "3", "--lr_scheduler.warmup_steps", "0", "--checkpoint.interval", "2"]
    train(tmp_path / "carried", *carried, *constant)
    train(tmp_path / "reset", "--checkpoint.initial_load_path", start, *constant)
    carried_losses, reset_losses = ([r["loss"] for r in metrics(tmp_path / n)] for n in ("carried", "reset"))
    assert carried_losses[0] == reset_losses[0]  # the same weights and the same first batch
    assert carried_losses[1] != reset_losses[1]  # other moments
    assert [r["step"] for r in metrics(tmp_path / "carried")] == [1, 2, 3]


def test_a_carried_optimizer_keeps_the_new_learning_rate(undisturbed, tmp_path):
    """With a tiny learning rate the first step must not move the weights, whatever the rate of the previous run."""
    train(
        tmp_path / "cold", "--checkpoint.initial_load_path", str(undisturbed / "checkpoint" / "step-12"),
        "--checkpoint.no_initial_load_model_only", "--checkpoint.exclude_from_loading", "dataloader,train_state",
        "--training.steps", "2", "--lr_scheduler.warmup_steps", "0", "--optimizer.lr", "1e-12", "--optimizer.weight_decay", "0",
    )  # fmt: skip
    before, after = weights(undisturbed), weights(tmp_path / "cold")
    for name in before:
        torch.testing.assert_close(after[name], before[name], atol=1e-8, rtol=0)


def test_bf16_under_fsdp_and_autocast_stay_near_fp32(undisturbed, tmp_path):
    """The GPU default: losses are close to fp32's, and RoPE tables, which bf16 would ruin at long range, stay fp32."""
    for name, options in {
        "autocast": [
            "--parallelism.data_parallel_replicate_degree",
            "2",
            "--parallelism.data_parallel_shard_degree",
            "1",
        ],
        "fsdp": ["--parallelism.data_parallel_shard_degree", "2"],
    }.items():
        bf16 = ["--training.mixed_precision_param", "bfloat16", "--training.local_batch_size", "2"]
        train(tmp_path / name, *bf16, *options, ranks=2)
        for a, b in zip(metrics(undisturbed), metrics(tmp_path / name), strict=True):
            assert b["loss"] == pytest.approx(a["loss"], rel=5e-3)
            assert b["loss"] != a["loss"]


def test_one_run_folder_takes_one_process(undisturbed, tmp_path):
    import fcntl

    from farsight.training.run_folder import lock_run_folder

    held = lock_run_folder(tmp_path / "run")
    with pytest.raises(ConfigError, match="in use by process"):
        lock_run_folder(tmp_path / "run", wait_seconds=0.3)
    fcntl.flock(held, fcntl.LOCK_UN)
    lock_run_folder(tmp_path / "run", wait_seconds=0)


def test_going_back_to_an_earlier_step_in_place_is_refused(undisturbed, tmp_path):
    import shutil

    shutil.copytree(undisturbed, tmp_path / "copy")
    for step, says in (("9", "goes on to step 12"), ("7", "holds steps 9, 12")):
        done = train(tmp_path / "copy", "--checkpoint.load_step", step, check=False)
        assert done.returncode == 2
        assert says in done.stderr
    done = train(tmp_path / "copy", "--position.heads.layout", "sorted", check=False)
    assert done.returncode == 2
    assert "the heads would change places" in done.stderr


def test_a_non_finite_loss_stops_before_the_optimizer_step(undisturbed, tmp_path):
    broken = tmp_path / "broken"
    import shutil

    shutil.copytree(undisturbed / "model", broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    from safetensors.torch import save_file

    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    start = ["--checkpoint.initial_load_path", str(broken), "--validation.no_enable", "--checkpoint.interval", "1"]
    done = train(tmp_path / "run", *start, check=False)
    assert done.returncode == 3
    assert "step 1" in done.stderr
    assert "micro-batch 0 of 1 on rank 0" in done.stderr
    assert not (tmp_path / "run" / "checkpoint").exists()
    (kept,) = (tmp_path / "run" / "non_finite").iterdir()
    assert load_file(kept)["input"].shape == (4, 64)
    (end,) = metrics(tmp_path / "run", "ended")
    assert (end["step"], end["ended"]) == (1, 3)
    assert end["sentence"] in done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--training.seq_length", "3"], "Did you mean 'seq_len'"),
        (["--parallelism.tensor_parallel_degree", "3"], "tensor_parallel_degree = 3 does not divide"),
        (
            [
                "--parallelism.pipeline_parallel_degree",
                "5",
                "--training.local_batch_size",
                "5",
                "--training.global_batch_size",
                "5",
            ],
            "2 layers do not fill 5 pipeline stages; use 4 or fewer",
        ),
        (["--checkpoint.initial_load_path", "no/such/dir", "--tokenizer.kind", "bytes"], "no/such/dir does not exist"),
        (["--architecture.vocab_size", "100"], "vocab_size = 100 is less than the tokenizer's"),
        (["--data.sources", "[{ kind = 'jsonl', path = 'no/such.jsonl' }]"], "no/such.jsonl"),
        (["--position.lasp.anchor_layers", "9"], "anchor_layers"),
        (["--training.layers", "0:8"], "training.layers: layers '0:8' names 8, but the model has 2 layers"),
        (["--checkpoint.initial_load_path", "configs", "--tokenizer.kind", "auto"], "has no tokenizer.json"),
    ],
)
def test_refusals_end_with_two_and_no_traceback(tmp_path, options, says):
    done = train(tmp_path / "run", *options, check=False)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dry_run_builds_everything_and_trains_nothing(tmp_path):
    done = run([*train_command(tmp_path / "run"), "--dry-run"])
    assert "dry run: everything is ready for " in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert not (tmp_path / "run" / "comm_traces").exists()
