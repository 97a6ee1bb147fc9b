"""Runs the real `train.py` in processes of its own, as a user would."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from farsight.benchmarks.forked import Finished, Forked
from farsight.benchmarks.tiny import MODEL, SETTINGS

ROOT = Path(__file__).parent.parent

TINY = (
    MODEL
    + SETTINGS
    + """
[position]
rotary = { kind = "rope", theta = 500000.0 }
heads = { kind = "scope" }
lasp = { s_max = 2.0, anchor_layers = 1 }

[training]
seq_len = 64
local_batch_size = 4
global_batch_size = 4
steps = 12
mixed_precision_param = "float32"

[checkpoint]
interval = 3

[validation]
freq = 6
steps = 2

[metrics]
log_freq = 1
"""
)


def environment() -> dict[str, str]:
    """One thread a rank: ranks share the machine, and sums keep their order."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def train_command(folder: Path, *options: str, ranks: int = 1, config: str = TINY) -> list[str]:
    """The command line that trains `config` in run folder `folder`."""
    path = folder.with_suffix(".toml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(config)
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return [*launcher, "train.py", "--job.config_file", str(path), "--job.dump_folder", str(folder), *options]


def run(command: list[str], check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a command from the repository's root; with `check`, a failure shows what it printed."""
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    if check and done.returncode:
        raise AssertionError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done


def forked(arguments: list[str], output: Path, ranks: int = 1, script: str = "train.py") -> Finished:
    """Runs a script in forks of a process that has imported everything."""
    return Forked(arguments, ranks, output, script).wait()


def train(
    folder: Path, *options: str, ranks: int = 1, config: str = TINY, check: bool = True, script: str = "train.py"
) -> Finished:
    """Trains to the end; with `check`, a failure shows what it printed."""
    arguments = train_command(folder, *options, config=config)[2:]
    done = forked(arguments, folder.with_suffix(".printed"), ranks, script)
    if check and done.returncode:
        raise AssertionError(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done


def metrics(folder: Path, key: str = "loss") -> list[dict]:
    """The rows of `metrics.jsonl` that have `key`."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if key in row]


def contents(checkpoint):
    """Everything in a checkpoint, by name."""
    found = {}
    for name, entry in dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata.items():
        tensor = isinstance(entry, TensorStorageMetadata)
        found[name] = torch.full(entry.size, -7, dtype=entry.properties.dtype) if tensor else None
    dcp.load(found, checkpoint_id=checkpoint, no_dist=True)
    return found
