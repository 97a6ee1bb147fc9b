"""The launch scripts, under a fake Slurm that starts the tasks of two nodes on this machine."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.running import ROOT, TINY, environment, metrics, train, train_command

SCRIPTS = sorted(
    str(path.relative_to(ROOT)) for folder in ("launch", "containers") for path in (ROOT / folder).glob("*.sh")
)

SRUN = """#!/usr/bin/env bash
# Two tasks on each of two nodes, or TASKS, started at once; like srun, the highest status of all.
while [[ $1 == -* ]]; do
    echo "$1" >> "$FAKE/srun"
    [[ $1 == --output=* ]] && output=${1#--output=}
    shift
done
for ((task = 0; task < ${TASKS:-4}; task++)); do
    SLURM_PROCID=$task SLURM_LOCALID=$((task % 2)) SLURM_NODEID=$((task / 2)) SLURM_NTASKS=${TASKS:-4} \\
        "$@" >> "${output//%t/$task}" 2>&1 &
done
worst=0
for task in $(jobs -p); do
    wait "$task"
    status=$?
    ((status > worst)) && worst=$status
done
exit "$worst"
"""
SCONTROL = """#!/usr/bin/env bash
echo "$*" >> "$FAKE/scontrol"
if [[ $1 == show ]]; then printf '127.0.0.1\\nnode1\\n'; fi
"""
# The image's PATH has torchrun.sh; the rest of the file system is the host's.
APPTAINER = """#!/usr/bin/env bash
echo "$@" > "$FAKE/apptainer-$SLURM_PROCID"
while [[ $1 != torchrun.sh ]]; do shift; done
shift
exec bash "$FAKE/launch/torchrun.sh" "$@"
"""
RANK = """
import os, pathlib, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_NODEID", "MASTER_ADDR", "MASTER_PORT")
folder = pathlib.Path(os.environ["FAKE"])
if "RANK" in os.environ:
    (folder / f"rank-{os.environ['RANK']}").write_text(" ".join(os.environ[name] for name in names))
    caches = (os.environ.get(name, "none") for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"))
    (folder / f"caches-{os.environ['RANK']}").write_text(" ".join(caches))
(folder / "arguments").write_text(" ".join(sys.argv[1:]))
while (folder / "hold").exists():
    time.sleep(0.05)
sys.exit(int((folder / "status").read_text()))
"""


@pytest.fixture
def slurm(tmp_path):
    """Runs launch/slurm.sh as a job that was submitted from an empty folder."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (tmp_path / "rank.py").write_text(RANK)
    fake_python = f'#!/bin/sh\nexec {sys.executable} {tmp_path}/rank.py "$@"\n'
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("fake-python", fake_python)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    for name in ("launch", "train.py"):
        (tmp_path / name).symlink_to(ROOT / name)

    (programs / "apptainer").write_text(APPTAINER)
    (programs / "apptainer").chmod(0o755)

    def start(*arguments, status=0, python=programs / "fake-python", **more):
        (tmp_path / "status").write_text(str(status))
        variables = {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "FAKE": str(tmp_path), "PYTHON": str(python),
            "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "node[0-1]",
            "TMPDIR": str(tmp_path),
        }  # fmt: skip
        command = ["bash", str(ROOT / "launch" / "slurm.sh"), *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=environment() | variables | more, **pipes)

    return start


def ended(process):
    out, error = process.communicate(timeout=300)
    return process.returncode, out + error


@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck(script):
    checker = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([checker, str(ROOT / script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert os.access(ROOT / script, os.X_OK)


def test_ranks_of_two_nodes(slurm, tmp_path):
    status, said = ended(slurm("train", "--job.config_file", "a b.toml"))
    assert status == 0, said
    port = 20000 + 123456 % 20000
    for rank in range(4):
        found = (tmp_path / f"rank-{rank}").read_text()
        assert found == f"{rank} 4 {rank % 2} {rank // 2} 127.0.0.1 {port}"
        assert (tmp_path / "runs" / "slurm" / "123456" / f"rank-{rank}.log").exists()
    assert (tmp_path / "arguments").read_text() == "train.py --job.config_file a b.toml"
    assert (tmp_path / "scontrol").read_text() == "show hostnames node[0-1]\n"


def test_ranks_have_the_cpus_of_the_job(slurm, tmp_path):
    """srun no longer takes them from the job by itself."""
    for given, expected in (({"SLURM_CPUS_PER_TASK": "8"}, ["--cpus-per-task=8"]), ({}, [])):
        (tmp_path / "srun").unlink(missing_ok=True)
        assert ended(slurm("train", **given))[0] == 0
        options = (tmp_path / "srun").read_text().splitlines()
        assert [option for option in options if "cpus" in option] == expected


def test_kernels_are_compiled_on_each_node_s_own_disk(slurm, tmp_path, monkeypatch):
    for name in (
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
    ):  # the compiler sets the second in a process that uses it
        monkeypatch.delenv(name, raising=False)

    def caches(**variables):
        status, said = ended(slurm("train", **variables))
        assert status == 0, said
        (found,) = {(tmp_path / f"caches-{rank}").read_text() for rank in range(4)}
        return found

    own = tmp_path / f"farsight-{os.getuid()}"
    assert caches() == f"{own}/triton {own}/inductor"
    assert own.stat().st_mode & 0o777 == 0o700
    assert caches(TRITON_CACHE_DIR="/mine") == f"/mine {own}/inductor"
    assert caches(SLURM_TMPDIR=str(tmp_path / "job")).startswith(f"{tmp_path}/job/farsight-")
    own.rmdir()
    own.touch()  # someone else's, say
    assert caches() == "none none"


@pytest.mark.parametrize(("status", "queued"), [(75, True), (0, False), (1, False), (2, False)])
def test_a_stopped_run_is_queued_again(slurm, tmp_path, status, queued):
    assert ended(slurm("train", status=status))[0] == status
    assert ("requeue 123456" in (tmp_path / "scontrol").read_text()) == queued


def test_a_cancelled_run_is_not(slurm, tmp_path):
    """scancel signals the batch script too."""
    hold = tmp_path / "hold"
    hold.touch()
    job = slurm("train", status=75)
    while not (tmp_path / "arguments").exists():
        assert job.poll() is None
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    hold.unlink()
    assert ended(job)[0] == 75
    assert "requeue" not in (tmp_path / "scontrol").read_text()


def test_usage(slurm):
    status, said = ended(slurm("pretrain"))
    assert (status, "usage: sbatch launch/slurm.sh train|recipe" in said) == (2, True)


def test_a_recipe_starts_its_stages_with_srun(slurm, tmp_path):
    assert ended(slurm("recipe", "configs/recipes/X.toml", "--training.steps", "3"))[0] == 0
    log = "--output=runs/slurm/123456/rank-%t.log"
    ranks = f"'srun' '--wait=300' '--open-mode=append' '{log}' 'launch/rank.sh' '{tmp_path}/programs/fake-python'"
    expected = f"-m farsight recipe --launcher {ranks} configs/recipes/X.toml --training.steps 3"
    assert (tmp_path / "arguments").read_text() == expected


def test_ranks_train(slurm, tmp_path):
    """Everything but Slurm is real: two ranks, started by the fake srun."""
    (tmp_path / "config.toml").write_text(TINY)
    options = ["--training.steps=2", "--training.local_batch_size=2", "--validation.enable=false"]
    arguments = ["--job.config_file", "config.toml", "--job.dump_folder", "run", *options]
    status, said = ended(slurm("train", *arguments, python=sys.executable, TASKS="2"))
    logs = "".join(path.read_text() for path in (tmp_path / "runs" / "slurm" / "123456").iterdir())
    assert status == 0, said + logs
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]


@pytest.mark.parametrize("command", ["train", "recipe"])
def test_a_container(slurm, tmp_path, command):
    """One task a node, which starts the node's ranks inside the image."""
    job = {"CONTAINER": "farsight.sif", "TASKS": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "4"}
    status, said = ended(slurm(command, "X.toml", status=75, SLURM_CPUS_PER_TASK="8", **job))
    assert status == 75, said
    options = (tmp_path / "srun").read_text().splitlines()
    assert {"--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=32"} <= {*options}
    for task in range(2):
        assert (tmp_path / f"apptainer-{task}").read_text() == (
            f"exec --nv --bind {tmp_path} --pwd {tmp_path} farsight.sif torchrun.sh {command} X.toml\n"
        )
        assert (tmp_path / "runs" / "slurm" / "123456" / f"node-{task}.log").exists()
    head = f"127.0.0.1:{20000 + 123456 % 20000}"
    meeting = f"--nnodes 2 --nproc_per_node 4 --rdzv_backend c10d --rdzv_endpoint {head} "
    assert meeting in (tmp_path / "arguments").read_text()
    assert "requeue 123456" in (tmp_path / "scontrol").read_text()


LONG = ["--training.steps=200", "--training.local_batch_size=2", "--checkpoint.interval=20", "--validation.no_enable"]


def figures(folder):
    return [(row["step"], row["loss"], row["grad_norm"]) for row in metrics(folder)]


def signal_when_it_trains(run, rank, number):
    """Signals a rank in the middle of a run, after a checkpoint."""
    end = time.monotonic() + 120
    while not (run / "checkpoint" / "step-20" / ".metadata").exists() or len(metrics(run)) < 25:
        assert time.monotonic() < end
        time.sleep(0.02)
    os.kill(json.loads((run / "heartbeat" / f"rank-{rank}.json").read_text())["pid"], number)


def test_a_requeued_job_goes_on(slurm, tmp_path):
    """Two ranks are preempted under the fake Slurm; the same script, started again, goes on to the same figures."""
    (tmp_path / "config.toml").write_text(TINY)
    train(tmp_path / "whole", *LONG, ranks=2)
    job = ["train", "--job.config_file", "config.toml", "--job.dump_folder", "run", *LONG]
    first = slurm(*job, python=sys.executable, TASKS="2")
    signal_when_it_trains(tmp_path / "run", 0, signal.SIGTERM)
    assert ended(first)[0] == 75
    assert "requeue 123456" in (tmp_path / "scontrol").read_text()
    assert len(metrics(tmp_path / "run")) < 200
    status, said = ended(slurm(*job, python=sys.executable, TASKS="2"))
    assert status == 0, said
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")


def test_torchrun_starts_killed_ranks_again(tmp_path):
    train(tmp_path / "whole", *LONG, ranks=2)
    launcher = [sys.executable, "-m", "farsight", "torchrun", "--standalone", "--nproc_per_node=2", "--max-restarts=1"]
    command = [*launcher, *train_command(tmp_path / "run", *LONG)[1:]]
    job = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        signal_when_it_trains(tmp_path / "run", 1, signal.SIGKILL)
        said = job.communicate(timeout=200)[0]
    finally:
        job.kill()
    assert job.returncode == 0, said
    assert f"resuming from {tmp_path}/run/checkpoint/step-" in said
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")


def torchrun(tmp_path, *arguments, **variables):
    """Returns the Python command that launch/torchrun.sh runs."""
    fake_python = tmp_path / "fake-python"
    fake_python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake_python.chmod(0o755)
    command = ["bash", str(ROOT / "launch" / "torchrun.sh"), *arguments]
    given = environment() | {"PYTHON": str(fake_python)} | variables
    return subprocess.run(command, env=given, capture_output=True, text=True)


def test_torchrun(tmp_path):
    done = torchrun(tmp_path, "train", "--job.config_file", "a b.toml", PROCESSES="3")
    launcher = ["-m", "farsight", "torchrun", "--nnodes", "1", "--nproc_per_node", "3", "--standalone"]
    assert done.stdout.splitlines() == [*launcher, "train.py", "--job.config_file", "a b.toml"]
    done = torchrun(tmp_path, "recipe", "X.toml", NODES="4", PROCESSES="8", HEAD="node0:29500")
    ranks = "--nnodes 4 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint node0:29500 --rdzv_id farsight"
    waiting = "--rdzv_conf read_timeout=900,join_timeout=900"
    assert done.stdout.splitlines() == ["-m", "farsight", "recipe", "--torchrun", f"{ranks} {waiting}", "X.toml"]
    done = torchrun(tmp_path, "train", NODES="4")
    assert done.returncode != 0
    assert "HEAD" in done.stderr


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"NODES": "2", "HEAD": "pod-0.set", "NODE_RANK": "0"}, ("2", "pod-0.set", "true")),
        ({"NODES": "2", "HEAD": "pod-0.set", "NODE_RANK": "1"}, ("2", "pod-0.set", "false")),
        (
            {"SKYPILOT_NUM_NODES": "3", "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8\n10.0.0.9", "SKYPILOT_NODE_RANK": "0"},
            ("3", "10.0.0.7", "true"),
        ),
        (
            {
                "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "run-master-0", "PET_MASTER_PORT": "23456",
                "MASTER_ADDR": "run-master-0", "MASTER_PORT": "23456", "RANK": "1", "WORLD_SIZE": "2",
            },
            ("2", "run-master-0:23456", "false"),
        ),
        ({"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_IPS": "10.0.0.7", "SKYPILOT_NODE_RANK": "0"}, None),
    ],
)  # fmt: skip
def test_torchrun_reads_where_machines_meet(tmp_path, variables, expected):
    """From its own variables, SkyPilot's, and those of Kubeflow's PyTorchJob and TrainJob."""
    launcher = torchrun(tmp_path, "train", PROCESSES="8", **variables).stdout.splitlines()[3:-1]
    if expected is None:
        assert launcher == ["--nnodes", "1", "--nproc_per_node", "8", "--standalone"]
        return
    nodes, head, host = expected
    meeting = ["--rdzv_backend", "c10d", "--rdzv_endpoint", head, "--rdzv_id", "farsight"]
    waiting = ["--rdzv_conf", f"read_timeout=900,join_timeout=900,is_host={host}"]
    assert launcher == ["--nnodes", nodes, "--nproc_per_node", "8", *meeting, *waiting]


def test_torchrun_takes_a_number_of_machines(tmp_path):
    done = torchrun(tmp_path, "train", PET_NNODES="1:4")
    assert done.returncode == 2
    assert "'1:4'" in done.stderr


def test_machines_meet():
    """Two machines under the real torchrun, each with one rank, which has nothing to do but to print the help."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["bash", str(ROOT / "launch" / "torchrun.sh"), "train", "--help"]
    nodes = []
    for rank in range(2):
        variables = {"NODES": "2", "NODE_RANK": str(rank), "PROCESSES": "1", "HEAD": f"127.0.0.1:{port}"}
        given = environment() | {"PYTHON": sys.executable} | variables
        nodes.append(subprocess.Popen(command, env=given, stdout=subprocess.PIPE, text=True))
    printed = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    assert all("Trains a model from a TOML config" in text for text in printed)


def test_torchrun_of_an_installed_package(tmp_path):
    """Without a checkout around it the script runs the package's module, in the folder where it is called."""
    shutil.copytree(ROOT / "launch", tmp_path / "farsight" / "launch")
    fake_python = tmp_path / "fake-python"
    fake_python.write_text('#!/bin/sh\npwd\necho "$TRITON_CACHE_DIR"\nprintf "%s\\n" "$@"\n')
    fake_python.chmod(0o755)
    command = ["bash", str(tmp_path / "farsight" / "launch" / "torchrun.sh"), "train", "--job.config_file", "tiny"]
    given = environment() | {"PYTHON": str(fake_python), "PROCESSES": "2", "TMPDIR": str(tmp_path)}
    given.pop("TRITON_CACHE_DIR", None)
    done = subprocess.run(command, env=given, cwd=tmp_path, capture_output=True, text=True, check=True)
    where, cache, *arguments = done.stdout.splitlines()
    assert (where, cache) == (str(tmp_path), f"{tmp_path}/farsight-{os.getuid()}/triton")
    assert arguments[-4:] == ["-m", "farsight.train", "--job.config_file", "tiny"]
