"""Training steps of every layout, on GPUs that don't exist: no tensor on the wrong device, one wait for the device, nothing copied
from pageable memory, and the collectives that the plan counts."""

import json
import subprocess
import sys
from collections import defaultdict

import pytest
import torch

from farsight.launch.plan.costs import step_traffic
from farsight.launch.plan.run import Run
from farsight.parallel.context import reaches, sent
from tests.fake_gpu.layouts import DECODED, LAYOUTS, config_of
from tests.running import ROOT, environment

LAUNCHES = {
    "one GPU": 1112,
    "FSDP 8": 1076,
    "HSDP 2 × 4": 1043,
    "DDP 2": 1079,
    "TP 2 × FSDP 2": 1251,
    "CP 4": 1162,
    "8 layers of 8B, CP 8": 1409,
    "LoRA and GARFA, FSDP 2": 3032,
}
"""Operators of a step that compute something, PyTorch 2.13 for CPUs. A change that adds to them costs every step host time."""
NUMBERS = {"one GPU": 0, "CP 4": 1, "8 layers of 8B, CP 8": 1, "LoRA and GARFA, FSDP 2": 2 + 2 * 3}
"""Exchanges of up to 64 bytes; two on other layouts. GARFA's factors are gathered twice and reduced once a micro-batch."""
COUNTED = torch.__version__.startswith("2.13.") and torch.version.cuda is None
"""Other versions take operators apart in other ways, and PyTorch for GPUs has fused ones, such as RMSNorm's."""

PLANNED = {
    "dp_shard": ("fsdp all_gather", "fsdp reduce_scatter"),
    "dp_replicate": ("dp_replicate all_reduce",),
    "tp": ("tp all_gather", "tp reduce_scatter"),
}


@pytest.fixture(scope="module")
def steps():
    """The records by layout, of a process of its own: a fake GPU has to be there before torch is imported."""
    command = [sys.executable, "-m", "tests.fake_gpu.steps"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return {row["layout"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step(steps, tmp_path, name):
    found, layout = steps[name], LAYOUTS[name]
    ((sync, times),) = found["syncs"].items()
    assert sync.startswith("event.synchronize at farsight/training/figures.py")
    assert times == 1
    assert found["uploads"] == {}
    assert found["launches"] == LAUNCHES[name] or not COUNTED

    assert sum(calls for kind, (calls, _) in found["collectives"].items() if "numbers" in kind) == NUMBERS.get(name, 2)

    run = Run.of(config_of(layout, tmp_path / "run"), layout.gpus)
    planned, found_bytes = step_traffic(run, 0), defaultdict(int)
    for collective, (_, size) in found["collectives"].items():
        mesh, kind = collective.split()
        found_bytes["exchanged" if kind == "all_to_all" else f"{mesh} {kind}"] += size
    for name, kinds in PLANNED.items():
        # The plan is exact in pre-training, and an estimate in fine-tuning.
        exact = pytest.approx(planned[name], rel=0.02 if layout.finetunes else 0)
        assert sum(found_bytes[kind] for kind in kinds) == exact, name
    assert found_bytes["exchanged"] == exchanged(run)


def exchanged(run):
    """Bytes that rank 0 receives in context parallelism's exchanges; the plan has those of the rank that receives most."""
    t, p, a = run.config.training, run.config.parallelism, run.config.architecture
    ranks, cut = p.context_parallel_degree, p.context_parallel_load_balancer
    rows = 0
    for position in run.positions:
        reach = reaches(position.scopes, a.n_kv_heads, t.seq_len)
        forward, backward = (
            sum(len(rows) for other in range(1, ranks) for rows in sent(*pair(other), ranks, t.seq_len, reach, cut))
            for pair in (lambda other: (other, 0), lambda other: (0, other))
        )
        rows += forward * (1 + (run.recomputes(0) and not run.keeps_attention)) + backward
    micro_batches = run.layout.accumulation
    return rows * micro_batches * run.layout.rows * 2 * a.head_dim * 2  # keys and values, bf16


@pytest.mark.slow
def test_a_decoded_token(steps):
    found = steps[DECODED]
    assert found["syncs in the prompt"] == found["syncs"] == {}
    assert found["replayed"] == {"graph replay": 1}
