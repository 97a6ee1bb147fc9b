"""How processes of a run start, are stopped, and end; without training, so that each test takes a second."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from farsight import process
from farsight.errors import UserError
from tests.running import ROOT, environment, run, train_command


def start(command, **variables):
    given = environment() | variables
    return subprocess.Popen(command, cwd=ROOT, env=given, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("what", ["train", "recipe", "ablation"])
def test_a_signal_while_libraries_load(tmp_path, what, number):
    config = "configs/quickstart.toml"
    command = {
        "train": train_command(tmp_path / "run"),
        "recipe": [sys.executable, "-m", "launch.recipe", config, "--recipe.folder", str(tmp_path / "run")],
        "ablation": [sys.executable, "-m", "launch.ablation", config, "--out", str(tmp_path / "run")],
    }[what]
    began = time.monotonic()
    child = start(command)
    assert child.stderr.readline() == "farsight: starting (loading libraries)\n"
    child.send_signal(number)
    _, said = child.communicate()
    assert child.returncode == 75
    assert said in (f"{process.BEFORE_TRAINING}\n", f"{process.BETWEEN_STEPS}\n")
    assert not (tmp_path / "run").exists()
    assert time.monotonic() - began < 10  # importing torch alone takes seconds


ORPHAN = """
import ctypes, os, subprocess, sys
if sys.argv[1] == "launcher":
    child = subprocess.Popen([sys.executable, __file__, "rank"])
    sys.stdin.read()  # the test kills this process, or closes the pipe
else:
    from farsight import process
    process.begin()
    if os.environ["MODE"] == "training":
        process.hand_over()
    print(os.getpid(), flush=True)
    while True:
        ctypes.CDLL(None).sleep(1000)  # a library's call, during which Python runs no handler
"""


@pytest.mark.parametrize(("mode", "says"), [("building", process.BEFORE_TRAINING), ("training", "is ended")])
def test_a_rank_whose_torchrun_was_killed_ends_though_a_library_holds_it(tmp_path, mode, says):
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    given = {"TORCHELASTIC_RUN_ID": "x", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2", "MODE": mode, "RANK": "0"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    launcher = subprocess.Popen([sys.executable, script, "launcher"], env=environment() | given, **pipes)
    int(launcher.stdout.readline())
    launcher.kill()
    said = launcher.stderr.read()  # to its end: the rank has it open until it is gone
    assert f"torchrun (process {launcher.pid}) is gone: rank 0 stops, within 2 s" in said
    assert says in said
    launcher.wait()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"RANK": "x"}, "RANK='x', which must be a whole number"),
        ({"RANK": "-1"}, "RANK='-1'"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"WORLD_SIZE": "0"}, "a rank must be from 0 to WORLD_SIZE - 1"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK=2, LOCAL_RANK=0, WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "not LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
    ],
)
def test_an_environment_that_no_launcher_made(monkeypatch, given, says):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert process.ranks() == process.Ranks(0, 0, 1)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as error:
        process.ranks()
    assert says in str(error.value)


def test_torchrun_reads_the_note_of_a_rank(tmp_path, monkeypatch):
    """Notes are read by PyTorch's own classes, as plain torchrun prints them."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setenv("RANK", "3")
    process.leave_note(4, "step 7 could not be saved")
    failure = ProcessFailure(1, 123, 4, str(path))
    assert "traceback : step 7 could not be saved" in str(ChildFailedError("train.py", {3: failure}))
    note = process.read_note(path)
    assert (note.rank, note.status, note.sentence, note.follows) == (3, 4, "step 7 could not be saved", False)
    path.write_text('{"message": "another program\'s"}')
    assert process.read_note(path) is None


RANK = """
import os, signal, sys, time
from farsight.process import leave_note
rank, cases = os.environ["RANK"], sys.argv[1]
if cases == "status":
    if rank == "0":
        time.sleep(1.5)
        leave_note(1, "lost contact", follows=True)
        sys.exit(1)
    leave_note(3, "loss nan")
    time.sleep(1.5)
    sys.exit(3)
if cases == "killed":
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    leave_note(1, "lost contact", follows=True)
    sys.exit(1)
if cases == "silent":
    sys.exit(7)
if cases == "again" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    leave_note(1, "broken")
    sys.exit(1)
if cases in ("stopped", "again"):
    def stop(number, frame):
        leave_note(75, "stopped")
        sys.exit(75)
    signal.signal(signal.SIGTERM, stop)
    os.write(2, b"ready\\n")  # one write: print makes two where Python doesn't buffer, and ranks share the pipe
    time.sleep(100)
"""


@pytest.mark.parametrize(
    ("case", "status", "says"),
    [
        ("well", 0, ""),
        ("status", 3, "rank 1 ended with status 3: loss nan\n"),
        (
            "killed",
            137,
            "rank 1 was killed by SIGKILL (possibly by the kernel's out-of-memory killer: look in dmesg)\n",
        ),
        ("silent", 7, "ended with status 7\n"),
    ],
)
def test_torchruns_last_line_says_which_rank_and_why(tmp_path, case, status, says):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    launcher = [sys.executable, "-m", "farsight", "torchrun", "--standalone", "--nproc_per_node", "2"]
    done = run([*launcher, str(script), case], check=False)
    assert done.returncode == status
    assert done.stderr.endswith(says)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("case", ["stopped", "again"])
def test_torchrun_that_is_stopped_ends_as_its_ranks_do(tmp_path, case):
    """As they end now, also if they failed before and were started again."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    launcher = [sys.executable, "-m", "farsight", "torchrun", "--standalone", "--nproc_per_node", "2"]
    child = start([*launcher, "--max-restarts", str(int(case == "again")), str(script), case])
    while child.stderr.readline() != "ready\n":
        assert child.poll() is None
    assert child.stderr.readline() == "ready\n"
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate(timeout=60)
    assert (child.returncode, said) == (75, "")


def test_ranks_that_say_the_same_say_it_once(tmp_path, monkeypatch):
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
    before = signal.getsignal(signal.SIGTERM)
    try:
        for local_rank, first, says_it in (("0", "a", False), ("1", "a", True), ("1", "b", False)):
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
            process.leave_note(2, first)
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / local_rank / "error.json"))
            monkeypatch.setenv("LOCAL_RANK", local_rank)
            assert process.first_rank_says("a") is says_it
        (tmp_path / "0" / "error.json").unlink()
        began = time.monotonic()
        assert process.first_rank_says("a") is False
        assert 1 < time.monotonic() - began < 10
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_torchrun_that_is_killed_leaves_a_checkpoint(tmp_path):
    from farsight.checkpoints.manager import complete_steps
    from tests.running import metrics

    folder = tmp_path / "run"
    long = ["--training.steps", "5000", "--checkpoint.interval", "5000", "--training.local_batch_size", "2"]
    launcher = start(train_command(folder, *long, "--validation.no_enable", ranks=2))
    pids = set()
    while not (folder / "metrics.jsonl").is_file() or len(metrics(folder)) < 3:
        assert launcher.poll() is None
        time.sleep(0.05)
    pids = {int(p) for p in subprocess.check_output(["pgrep", "-P", str(launcher.pid)], text=True).split()}
    assert len(pids) == 2
    launcher.kill()
    said = launcher.stderr.read()
    assert "the same command continues from there" in said
    assert len(complete_steps(folder / "checkpoint")) == 1
    launcher.wait()
    deadline = time.monotonic() + 30
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def running(pid):
    """Whether a process is alive and not just a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_a_child_was_ended_by_is_said():
    assert process.killed_by(9).startswith("was killed by SIGKILL (possibly by the kernel's out-of-memory killer")
    assert process.killed_by(signal.SIGUSR1) == "was killed by SIGUSR1"
