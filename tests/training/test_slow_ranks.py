"""Ranks that are slower than others: what each measures, and who is named."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from farsight.parallel.meshes import ParallelDims
from farsight.training.slow_ranks import SlowRanks, busy_seconds
from tests.running import metrics
from tests.training.test_hangs import start, until  # noqa: F401  the fixture

CPU = torch.device("cpu")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each of two ranks")
def test_a_rank_that_shares_its_core_is_named(start, tmp_path):  # noqa: F811
    ranks = start("--metrics.log_freq", "5", "--metrics.slow_ranks_freq", "5")
    cores = sorted(os.sched_getaffinity(0))
    for rank, process in enumerate(ranks.processes):
        for thread in os.listdir(f"/proc/{process.pid}/task"):
            os.sched_setaffinity(int(thread), {cores[rank]})
    spin = f"import os\nos.sched_setaffinity(0, {{{cores[1]}}})\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(8)]
    try:
        named = lambda row: [f["rank"] for f in row["slow"]] == [1]  # noqa: E731
        found = until(lambda: [row for row in metrics(tmp_path / "run", "slow") if named(row)], 120)
    finally:
        for other in others:
            other.kill()
    assert found[0]["slow"][0]["ratio"] > 1.2
    assert (found[0]["slow"][0]["host"], found[0]["slow"][0]["device"]) == (os.uname().nodename, "cpu")
    printed = tmp_path / "printed" / "0.err"
    until(lambda: f"slow ranks: rank 1 ({os.uname().nodename}, cpu) at " in printed.read_text())
    for process in ranks.processes:
        os.kill(process.pid, signal.SIGTERM)
    assert ranks.wait().returncode == 75


def test_sleeping_is_not_being_busy():
    begin = busy_seconds(), time.thread_time()
    time.sleep(0.3)
    assert busy_seconds() - begin[0] < 0.1
    while time.thread_time() - begin[1] < 0.1:
        pass
    assert busy_seconds() - begin[0] > 0.09


def slow_ranks(tmp_path, ranks=4, device=CPU, **degrees):
    return SlowRanks(tmp_path, 10, ParallelDims(ranks, **degrees), device)


def test_ranks_are_compared_with_the_median(tmp_path):
    own = [[10.0, work, 0.0] for work in (2.0, 3.0, 4.0, 6.0)]
    assert slow_ranks(tmp_path, dp_shard=4).ratios(own) == pytest.approx([1, 1, 4 / 3, 2])
    # Stages of a pipeline have different work on CPUs; GPUs measure the same piece of work.
    assert slow_ranks(tmp_path, dp_shard=2, pp=2).ratios(own) == pytest.approx([1, 1.5, 1, 1.5])
    on_gpu = slow_ranks(tmp_path, dp_shard=2, pp=2, device=torch.device("cuda", 0))
    assert on_gpu.ratios(own) == pytest.approx([1, 1, 4 / 3, 2])
    # Without its waits for data, the last rank would need 5 of the 10 seconds.
    assert slow_ranks(tmp_path, dp_shard=4).ratios([[10.0, 3.0, wait] for wait in (1.0, 1.0, 1.0, 6.0)]) == [1, 1, 1, 2]


def test_a_rank_is_named_after_three_measurements_in_a_row(tmp_path, caplog):
    slow = slow_ranks(tmp_path, ranks=2, dp_shard=2)
    late, even = [[10.0, 3.0, 0.0], [10.0, 6.0, 0.0]], [[10.0, 3.0, 0.0], [10.0, 3.5, 0.0]]
    found = [slow.find(step, figures) for step, figures in enumerate([late, late, even, *[late] * 4, even, even])]
    assert [row and [rank["rank"] for rank in row] for row in found] == [*[None] * 5, [1], [1], [], None]
    assert caplog.messages == [
        "step 5: slow ranks: rank 1 (None, None) at 2.0 × the median",
        "step 7: no rank is slow any more",
    ]


def test_noise_names_no_rank(tmp_path, caplog):
    slow, rng = slow_ranks(tmp_path, ranks=64, dp_shard=64), random.Random(0)
    for step in range(300):
        assert slow.find(step, [[10.0, rng.gauss(5.0, 0.35), abs(rng.gauss(0.0, 0.2))] for _ in range(64)]) is None


def test_what_a_measurement_covers(tmp_path):
    slow = slow_ranks(tmp_path, ranks=2, dp_shard=2)
    assert slow.measure(1) is None  # the first step compiles
    slow.waited(0.5)
    assert slow.measure(10) is None
    begin = time.thread_time()
    while time.thread_time() - begin < 0.2:
        pass
    slow.left_out(100.0, busy=50.0)
    seconds, own, waited = slow.measure(11)
    assert waited == 0.5
    # What was left out is subtracted.
    assert -100 < seconds < -99
    assert -50 < own < -49
    assert [part >= 0.2 for part in (seconds + 100, own + 50)] == [True, True]
    assert slow_ranks(tmp_path, ranks=1).measure(1) is None
