"""Short training runs, as `train.py` does them, and the plan of each."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from farsight.benchmarks.gpu import limits
from farsight.benchmarks.gpu.part import Rows
from farsight.launch.plan.hardware import GPUS, Machine
from farsight.launch.plan.plan import Plan, make_plan
from farsight.launch.plan.read import read_configs
from farsight.units import GIB

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 300.0
"""Seconds of a run, or less towards the end of its part."""
MODELS = (("dense", False), ("SCOPE", True))
"""Names of models, and whether their heads are SCOPE's."""


class FailedRunError(Exception):
    """A run that did not end well."""


def planned_gpu() -> str:
    """The listed GPU that plans are for: this machine's, by the words of its name; without a GPU, an H200."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "H200"
    gib = torch.cuda.get_device_properties().total_memory / GIB if torch.cuda.is_available() else 141
    same = [kind for kind in GPUS if kind.partition("-")[0].upper() in name.upper().replace(" ", "")]
    return min(same or GPUS, key=lambda kind: abs(GPUS[kind].memory_gib - gib))


def arguments_of(options: dict[str, Any]) -> list[str]:
    """Command-line options of settings by their names."""
    return [
        part
        for name, value in options.items()
        for part in (f"--{name}", str(value).lower() if value in (True, False) else str(value))
    ]


def plan_of(config: Path, options: dict[str, Any], kind: str = "") -> Plan:
    """The plan of a run on one GPU, of this machine's kind if none is named."""
    kind = kind or planned_gpu()
    _, configs = read_configs(config, arguments_of(options), None)
    return make_plan(config.stem, configs[config.stem], 1, Machine(kind, GPUS[kind]))


def run_train(arguments: Sequence[str], limit: float, on_cpu: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs train.py in a process of its own.

    Raises:
        FailedRunError: it took longer than `limit` seconds.
    """
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
    try:
        return subprocess.run(
            [sys.executable, str(ROOT / "train.py"), *arguments],
            cwd=ROOT, env=os.environ | hidden, capture_output=True, text=True, check=False, timeout=limit,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise FailedRunError(f"not done after {limit:.0f} s: {str(error.stderr or '')[-300:]}") from None


def train(
    rows: Rows,
    config: Path,
    options: dict[str, Any],
    folder: Path,
    command: Sequence[str] = (),
    expected: int = 0,
    on_cpu: bool = False,
) -> list[dict[str, Any]]:
    """Trains, and returns the rows of metrics.jsonl.

    Args:
        rows: the part's, whose time the run may not outlast.
        command: "finetune", or nothing.
        expected: the exit status.
        on_cpu: hide the GPU.

    Raises:
        FailedRunError: the run ended otherwise, or took too long.
    """
    arguments = ["--job.config_file", str(config), "--job.dump_folder", str(folder), *arguments_of(options)]
    done = run_train([*command, *arguments], min(LIMIT, limits.RUN - rows.seconds), on_cpu)
    if done.returncode != expected:
        raise FailedRunError(f"train.py ended with status {done.returncode}: {(done.stderr or done.stdout)[-600:]}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def measured_beside_plan(
    rows: Rows, config: Path, options: dict[str, Any], command: Sequence[str] = (), warm_up: int = 3
) -> dict[str, Any]:
    """Figures of a run, medians of the steps after the warm-up; and the plan's.

    Raises:
        FailedRunError: the run failed.
    """
    plan = plan_of(config, options)
    with tempfile.TemporaryDirectory() as folder:
        found = train(rows, config, options, Path(folder) / "run", command)
    steps = [row for row in found if "tokens_per_second" in row]
    timed = steps[warm_up:]
    return {
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in timed),
        "tflops": statistics.median(row["tflops"] for row in timed),
        "mfu": statistics.median(row.get("mfu", 0.0) for row in timed),
        "memory_gib": steps[-1]["memory_gib"],
        "data_seconds": statistics.median(row["data_seconds"] for row in timed),
        "losses": [steps[0]["loss"], steps[-1]["loss"]],
        "planned": {
            "gpu": plan.machine.kind, "tokens_per_second": plan.tokens_per_second, "mfu": plan.mfu, "memory_gib": plan.worst.peak / GIB,
        },
    }  # fmt: skip


def pretraining_options(T: int, scope: bool, small: bool, steps: int = 8, kind: str = "") -> dict[str, Any]:
    """A 1B-shaped model on one GPU, 131,072 tokens a step without documents: as much recomputation as the plan needs.

    Args:
        T: tokens of a row.
        scope: SCOPE's heads, else dense ones.
        kind: the GPU, if it is not this machine's.
    """
    tokens, flavor = (T, "tiny") if small else (131072, "llama3.2-1b")
    options: dict[str, Any] = {
        "model.flavor": flavor, "tokenizer.kind": "bytes", "data.mask_documents": False, "training.seq_len": T,
        "training.global_batch_size": tokens // T, "training.local_batch_size": max(1, 32768 // T) if not small else 1,
        "training.steps": steps, "lr_scheduler.warmup_steps": 2, "validation.enable": False, "checkpoint.enable": False,
        "metrics.log_freq": 1, "metrics.trackers": [], "compile.enable": not small,
        "activation_checkpoint.mode": "none", **({"position.heads.kind": "scope"} if scope else {}),
    }  # fmt: skip
    if small:
        return options | {"training.mixed_precision_param": "float32"}
    if not plan_of(PRETRAINING, options, kind).fits:
        options |= {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "attention"}
    return options


PRETRAINING = Path(__file__).with_name("pretraining.toml")
"""Settings of all these runs that no option changes."""
