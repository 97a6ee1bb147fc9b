"""Reports of a run while it trains: lines with speed, MFU and time left, a progress bar in a terminal, figures for trackers."""

import io
import logging
import os
import re
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from farsight.configs.load import build_config
from farsight.training import metrics
from farsight.training.metrics import RunMetrics
from farsight.training.metrics_file import read_metrics


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Makes the metrics of a run of ten steps, of which each is logged."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(metrics, "peak_flops", lambda device: 1e12)
    values = {"job": {"dump_folder": str(tmp_path / "run")}, "training": {"steps": 10}}

    def start(step=0, **settings):
        chosen = {"log_freq": 1, "trackers": []} | settings
        config = build_config(values | {"metrics": chosen, "lr_scheduler": {"warmup_steps": 1}})
        run = RunMetrics(config, SimpleNamespace(world_size=2, batch=2, pp=1), torch.device("cpu"))
        monkeypatch.setattr(run, "_of_ranks", lambda own: [own, own])
        run.start(step)
        return run

    return start


def log(run, step):
    run.advance()
    run.log_step(step, 2.5, 0.5, 1e-3, 100 * step, 100, 1e9, {})


def test_lines_without_a_terminal_have_speed_mfu_and_time_left(started, caplog):
    caplog.set_level(logging.INFO, "farsight")
    run = started()
    for step in (1, 2, 10):
        log(run, step)
    run.close()
    lines = [record.getMessage() for record in caplog.records]
    for line in lines:
        assert re.search(r"loss 2\.5000 .* [\d,]+ tok/s  [\d.]+ [GT]FLOP/s  mfu [\d.]+%", line)
    # The pace is measured from the end of the first step, and after the last nothing is left.
    assert [line.endswith(" left") for line in lines] == [False, True, False]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_progress_bar_has_loss_and_speed(started, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    run = started()
    for step in (1, 2):
        log(run, step)
    speed = metrics.row_of((run.folder / "metrics.jsonl").read_text().splitlines()[-1])["tokens_per_second"]
    assert run._bar.postfix == f"loss 2.5000, {speed:,.0f} tok/s"
    run._bar.refresh()
    assert "2/10 [" in sys.stderr.getvalue()
    assert f"{run._bar.postfix}]" in sys.stderr.getvalue()
    run.close()


def test_evaluations_that_end_late_keep_their_step_in_trackers(started, monkeypatch):
    """Those of one step stay apart, and a run that goes on from a later step has them once."""
    run = started(trackers=["tensorboard"])
    for step in (1, 2, 3):
        log(run, step)
    run.log_evaluation(2, "needle", {"needle.mean": 0.25}, 8.0)
    run.log_evaluation(2, "long", {"long.mean": 0.5}, 2.0)
    run.close()
    monkeypatch.setattr(os, "getpid", lambda: 999_999_999)  # each start has a file, behind those before it
    run = started(step=2, trackers=["tensorboard"])
    log(run, 3)
    run.close()
    rows = [(row["step"], row["evaluation"]) for row in read_metrics(run.folder) if "evaluation" in row]
    assert rows == [(2, "needle"), (2, "long")]
    read = EventAccumulator(str(run.folder / "tb"))
    read.Reload()
    found = {tag: [(e.step, e.value) for e in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    assert {tag: points for tag, points in found.items() if not tag.startswith("train/")} == {
        "needle/needle.mean": [(2, 0.25)],
        "needle/evaluation_seconds": [(2, 8.0)],
        "long/long.mean": [(2, 0.5)],
        "long/evaluation_seconds": [(2, 2.0)],
    }
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3]


def test_evaluations_do_not_make_a_rank_slow(started):
    run = started(slow_ranks_freq=1)
    log(run, 1)
    with run.paused():
        begin = time.thread_time()
        while time.thread_time() - begin < 0.3:
            pass
    seconds, own, waited = run.slow.measure(2)
    assert (seconds < 0.3, own < 0.3, waited) == (True, True, 0)
