"""How `train.py` ends on errors: one sentence and a distinct status on every rank, and no traceback."""

import os
import re
import shutil
import signal
import subprocess
import time

import pytest
import torch

from farsight.benchmarks.forked import Forked
from farsight.configs.load import load_config
from farsight.errors import ConfigError
from farsight.launch.plan.text import summary
from farsight.training.finetune.model import load_finetune_config
from farsight.training.hangs.read import read_heartbeats
from farsight.training.run_folder import lock_run_folder
from farsight.training.start import report_length, report_theta
from tests.finetuned import write_base
from tests.running import ROOT, contents, environment, forked, metrics, train, train_command

TWO = ["--training.local_batch_size", "2"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--parallelism.tensor_parallel_degree", "2"],
            "start 2 or a multiple with torchrun --nproc_per_node 2 train.py",
        ),
        (["--parallelism.data_parallel_shard_degree", "4"], "start 4 with torchrun --nproc_per_node 4 train.py"),
        (["--parallelism.data_parallel_shard_degree", "0"], "data_parallel_shard_degree = 0"),
        (["--parallelism.data_parallel_shard_degree", "-2"], "data_parallel_shard_degree = -2"),
    ],
)
def test_what_takes_other_processes_is_refused(tmp_path, options, says):
    done = train(tmp_path / "run", *options, check=False)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_runs_do_not_lie_in_one_another(tmp_path):
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer" / "metrics.jsonl").touch()
    done = train(tmp_path / "outer" / "inner", check=False)
    assert (done.returncode, "would lie inside the run" in done.stderr) == (2, True)
    done = train(tmp_path, check=False)
    assert (done.returncode, "contains the run" in done.stderr) == (2, True)
    (tmp_path / "outer" / "inner").mkdir()
    (tmp_path / "outer" / "inner" / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=r"holds metrics\.jsonl that no run wrote"):
        lock_run_folder(tmp_path / "outer" / "inner", wait_seconds=0)
    (tmp_path / "outer" / "inner" / ".lock").touch()
    lock_run_folder(tmp_path / "outer" / "inner", wait_seconds=0)  # one that is there goes on


def test_who_is_waited_for_is_said(tmp_path):
    lock_run_folder(tmp_path / "run")
    waiting = subprocess.Popen(
        train_command(tmp_path / "run"), cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True
    )
    lines = [waiting.stderr.readline() for _ in range(2)]
    assert re.search(r"is in use by process \d+ on .*: waiting up to 60 s", lines[1])
    waiting.terminate()
    assert "stopped before training began" in waiting.communicate()[1]
    assert waiting.returncode == 75


def test_a_folder_that_can_not_be_written(tmp_path):
    (tmp_path / "file").touch()
    train_command(tmp_path / "run")
    done = forked(
        ["--job.config_file", str(tmp_path / "run.toml"), "--job.dump_folder", str(tmp_path / "file" / "run")], tmp_path
    )
    assert done.returncode == 2
    assert f"The run folder {tmp_path}/file/run can't be written: Not a directory." in done.stderr


def test_help_of_what_is_not_there(tmp_path):
    done = forked(["--help", "nosuch"], tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("There is no section nosuch. Known: job, ")


PATCHED = """
import os, runpy, sys
sys.path.insert(0, {root!r})
import farsight.training.trainer as trainer
{patch}
runpy.run_path({root!r} + "/train.py", run_name="__main__")
"""

FULL = """
def full(saved, out, **options):
    raise OSError(28, "No space left on device", str(out))
trainer.checkpoint_to_model_dir = full
"""
FULL_AT_START = """
def full(path, text):
    raise OSError(28, "No space left on device", str(path))
trainer.write_text = full
"""
BEHIND = """
import torch
init = trainer.Trainer.__init__
def behind(self, *arguments):
    init(self, *arguments)
    self.skip = torch.zeros(())
trainer.Trainer.__init__ = behind
"""
"""Has a run on CPUs read a step's figures after the next one is launched, as runs on GPUs do."""
NOT_FINITE = """
forward_backward, report = trainer.Trainer.forward_backward, trainer.Trainer._report_non_finite
def poisoned(self, *arguments):
    loss = forward_backward(self, *arguments)
    if self.step == 3:
        next(p for p in self.model_parts[0].parameters()).grad.mul_(float("inf"))
    return loss
def keep(self, figures):
    weights = self.checkpoints.states["model"].state_dict()
    whole = {name: (w.full_tensor() if hasattr(w, "full_tensor") else w).detach() for name, w in weights.items()}
    if os.environ["RANK"] == "0":
        torch.save(whole, str(self.folder) + ".pt")
        print("launched step", self.step, file=sys.stderr)
    report(self, figures)
trainer.Trainer.forward_backward, trainer.Trainer._report_non_finite = poisoned, keep
"""
BROKEN = """
step = trainer.Trainer.train_step
def broken(self, batches):
    if self.step == 2 and os.environ["RANK"] == "1":
        raise KeyError("broken")
    step(self, batches)
trainer.Trainer.train_step = broken
"""


def patched(tmp_path, patch, *options):
    """Runs two ranks of `train.py` with a patch of the trainer."""
    script = tmp_path / "patched.py"
    script.write_text(PATCHED.format(root=str(ROOT), patch=patch))
    arguments = train_command(tmp_path / "run", *TWO, "--validation.no_enable", *options)[2:]
    return forked(arguments, tmp_path / "printed", ranks=2, script=str(script))


def test_a_disk_that_is_full_at_the_export(tmp_path):
    done = patched(tmp_path, FULL, "--training.steps", "3")
    assert done.returncode == 4
    assert "No space left on device" in done.stderr
    assert "the same command continues from the newest checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
    train(tmp_path / "run", "--validation.no_enable", "--training.steps", "3")
    assert (tmp_path / "run" / "model" / "config.json").is_file()


def test_a_disk_that_is_full_at_the_start(tmp_path):
    done = patched(tmp_path, FULL_AT_START)
    assert done.returncode == 2
    assert "can't be written: [Errno 28] No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("layout", ["shard", "replicate"])
def test_figures_that_are_read_a_step_later(tmp_path, layout):
    """The same rows as when they are read at once; a step that is not finite changes nothing, though the next was launched."""
    options = ["--training.steps", "6", "--validation.no_enable", "--checkpoint.interval", "2"]
    options += ["--metrics.log_freq", "5", "--checkpoint.keep_latest_k", "0"]
    options += ["--parallelism.data_parallel_replicate_degree=2"] * (layout == "replicate")
    options += ["--parallelism.data_parallel_shard_degree=1"] * (layout == "replicate")
    train(tmp_path / "at_once", *TWO, *options, ranks=2)
    assert patched(tmp_path, BEHIND, *options).returncode == 0
    figures = [
        [(row["step"], row["loss"], row["grad_norm"]) for row in metrics(tmp_path / run)] for run in ("at_once", "run")
    ]
    assert figures[0] == figures[1]
    assert [step for step, *_ in figures[1]] == [1, 5, 6]
    shutil.rmtree(tmp_path / "run")

    done = patched(tmp_path, BEHIND + NOT_FINITE, *options)
    assert done.returncode == 3
    assert "step 3: loss" in done.stderr
    assert "launched step 4" in done.stderr
    saved, kept = contents(tmp_path / "run" / "checkpoint" / "step-2"), torch.load(tmp_path / "run.pt")
    for name, weight in kept.items():
        torch.testing.assert_close(weight, saved[name], rtol=0, atol=0)


def test_a_fault_on_one_rank_ends_all_and_is_kept_in_the_run_folder(tmp_path):
    done = patched(tmp_path, BROKEN)
    assert done.returncode == 1
    assert "[rank 1] unexpected KeyError: 'broken'. This is a fault in Farsight" in done.stderr
    assert "Traceback" not in done.stderr
    (report,) = (tmp_path / "run" / "errors").iterdir()
    assert str(report) in done.stderr
    assert "in broken" in report.read_text()
    (end,) = metrics(tmp_path / "run", "ended")
    assert (end["step"], end["ended"], "lost contact with another rank" in end["sentence"]) == (2, 1, True)


STUCK = """
step = trainer.Trainer.train_step
def stuck(self, batches):
    if self.step == 3:
        self.watch.at(self.step, "stuck")
        __import__("time").sleep(100)
    step(self, batches)
trainer.Trainer.train_step = stuck
"""


def test_a_second_ctrl_c_stops_in_the_middle_of_a_step(tmp_path):
    (tmp_path / "patched.py").write_text(PATCHED.format(root=str(ROOT), patch=STUCK))
    arguments = train_command(tmp_path / "run", "--validation.no_enable")[2:]
    started = Forked(arguments, 1, tmp_path / "printed", str(tmp_path / "patched.py"))
    (process,), end = started.processes, time.monotonic() + 60
    while (beat := read_heartbeats(tmp_path / "run").get(0)) is None or beat.phase != "stuck":
        assert time.monotonic() < end
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    time.sleep(1.1)  # two at once count as one
    os.kill(process.pid, signal.SIGINT)
    done = started.wait(60)
    assert done.returncode == 130
    (last,) = metrics(tmp_path / "run", "ended")
    assert (last["step"], last["ended"]) == (3, 130)
    assert last["sentence"] in done.stderr


@pytest.mark.parametrize(("seq_len", "warns"), [(64, True), (128, False), (256, False)])
def test_a_run_on_shorter_sequences_than_its_weights_says_so(tmp_path, caplog, seq_len, warns):
    write_base(tmp_path / "base", length=128)
    report_length(
        load_config(["--checkpoint.initial_load_path", str(tmp_path / "base"), "--training.seq_len", str(seq_len)])
    )
    assert (
        ("training.seq_len = 64, but" in caplog.text and "up to 128 tokens" in caplog.text)
        == warns
        == bool(caplog.text)
    )


def test_the_theta_of_the_weights_counts(tmp_path, caplog):
    """Llama 3's RoPE base is 500,000: a run that starts from it reports a different one, and fine-tuning keeps it."""
    write_base(tmp_path / "base")
    caplog.set_level("INFO")
    yarn, named = ["--position.rotary.kind", "yarn"], ["--position.rotary.theta", "20000"]
    says = f"the weights of {tmp_path}/base were trained with 500000"
    for options, level in ((yarn, "WARNING"), ([*yarn, *named], "INFO"), (["--position.rotary.kind", "llama3"], None)):
        caplog.clear()
        arguments = ["--checkpoint.initial_load_path", str(tmp_path / "base"), *options]
        report_theta(load_config(arguments), arguments)
        assert [record.levelname for record in caplog.records if says in record.getMessage()] == [level] * (
            level is not None
        )
    common = ["--base_model.path", str(tmp_path / "base"), "--tokenizer.kind", "bytes"]
    for options, theta in ((yarn, 5e5), ([*yarn, *named], 2e4), ([], 5e5)):
        config = load_finetune_config([*common, *options])
        assert config.position.rotary.theta == theta
        assert f"{theta:g}" in summary(config, 1)
    config = load_finetune_config([*common, "--optimizer.lr", "1e-3", "--optimizer.beta2", "0.999"])
    assert "AdamW: lr 0.001, betas 0.9 and 0.999, eps 1e-08, weight decay" in summary(config, 1)
