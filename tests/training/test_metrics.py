"""What a run says of itself while it trains: lines with speed, MFU and time left, or a progress bar in a terminal."""

import io
import logging
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from farsight.configs.load import build_config
from farsight.training import metrics
from farsight.training.metrics import RunMetrics


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Makes the metrics of a run of ten steps, of which each is logged."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(metrics, "peak_flops", lambda device: 1e12)
    values = {"job": {"dump_folder": str(tmp_path / "run")}, "training": {"steps": 10}}

    def start():
        config = build_config(
            values | {"metrics": {"log_freq": 1, "trackers": []}, "lr_scheduler": {"warmup_steps": 1}}
        )
        run = RunMetrics(config, SimpleNamespace(world_size=2, batch=2, pp=1), torch.device("cpu"))
        monkeypatch.setattr(run, "_of_ranks", lambda own: [own, own])
        run.start(0)
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
