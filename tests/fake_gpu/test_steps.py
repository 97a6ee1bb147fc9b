"""Training steps of every layout, on GPUs that don't exist: no tensor on the wrong device, one wait for the device, nothing copied
from pageable memory, and the collectives that the plan counts."""

import json
import subprocess
import sys
from itertools import accumulate

import pytest

from farsight.launch.plan.costs import step_traffic
from farsight.launch.plan.run import Run
from tests.fake_gpu.layouts import DECODED, LAYOUTS, config_of
from tests.running import ROOT, environment

LAUNCHES = {
    "one GPU": 0,
}
"""Operators of a step that compute something, PyTorch 2.13. A change that adds to them costs every step host time."""


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
    assert sync.startswith("event.synchronize at training/figures.py")
    assert times == 1
    assert found["uploads"] == {}
    assert found["launches"] == LAUNCHES[name]

    sent = found["collectives"]
    traffic = step_traffic(Run.of(config_of(layout, tmp_path / "run"), layout.gpus), 0)
    by_kind = {kind: sum(size for name, (_, size) in sent.items() if name.endswith(kind)) for kind in KINDS}
    print(sent, traffic, by_kind, accumulate)


@pytest.mark.slow
def test_a_decoded_token(steps):
    found = steps[DECODED]
    assert found["syncs in the prompt"] == found["syncs"] == {}
    assert found["replayed"] == {"graph replay": 1}
