"""Metrics on a full disk: rows are complete or missing, lost ones are counted, and training continues."""

import json
import resource
import subprocess
from contextlib import contextmanager

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from farsight.training.metrics import _cut_after
from farsight.training.metrics_file import read_metrics
from farsight.training.records import Records
from farsight.training.trackers.tensorboard import scalar_event, scalars
from tests.running import ROOT, environment, train_command


@contextmanager
def files_of_at_most(size):
    """Simulates a full disk for this process: Linux writes up to the limit, then refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_record_is_there_whole_or_not_at_all(tmp_path, caplog):
    records = Records(tmp_path / "new" / "rows")
    records.append(b"first\n")
    with files_of_at_most(10):
        records.append(b"second\n")
        records.append(b"third\n")
        assert records.path.read_bytes() == b"first\n"
    records.append(b"fourth\n")
    assert records.path.read_bytes() == b"first\nfourth\n"
    records.close()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3  # when it begins, when it works again, at the end
    assert "can't be written (File too large); training goes on" in said[0]
    assert "can be written again; 2 records were lost so far" in said[1]
    assert "2 records were lost in all" in said[2]


def test_a_file_that_can_never_be_written_is_said_once(tmp_path, caplog):
    (tmp_path / "file").touch()
    records = Records(tmp_path / "file" / "rows")  # a folder that is a file
    for _ in range(5):
        records.append(b"row\n")
    records.close()
    assert [record.getMessage().partition(": ")[2] for record in caplog.records][1:] == ["5 records were lost in all."]


def test_tensorboard_reads_what_is_written(tmp_path):
    """TensorBoard's own reader reads on after lost records, and hides later steps of an earlier run."""
    first, then = scalars(tmp_path, 0), scalars(tmp_path, 3)
    assert first.path == then.path  # of one second and process: two in one file
    for step in range(1, 6):
        first.append(scalar_event(step, {"train/loss": 1 / step, "train/lr": 0.5}))
    with files_of_at_most(first.path.stat().st_size + 20):
        first.append(scalar_event(6, {"train/loss": 9.0}))
    later = Records(tmp_path / "events.out.tfevents.9999999999.host.1.0", then.head)
    for step in (4, 5):
        later.append(scalar_event(step, {"train/loss": -1 / step}))
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("train/loss")] == [
        (1, pytest.approx(1)), (2, pytest.approx(1 / 2)), (3, pytest.approx(1 / 3)),
        (4, pytest.approx(-1 / 4)), (5, pytest.approx(-1 / 5)),
    ]  # fmt: skip


ROWS = [
    {"step": 0, "val_loss": 3.0},
    *({"step": step, "loss": 1.0} for step in (1, 2, 3)),
    {"step": 3, "val_loss": 2.0},
]


@pytest.mark.parametrize("torn", ["", '{"step": 4, "lo', "\0\0\0"])
def test_rows_after_the_checkpoint_and_a_torn_one_are_cut_off(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    path.write_text(text + torn)
    (tmp_path / "metrics.jsonl.1.part").write_text("{")  # what a killed process may leave
    assert read_metrics(tmp_path) == ROWS
    for step, kept in ((9, ROWS), (3, ROWS), (2, ROWS[:3]), (0, [])):
        path.write_text(text + torn)
        _cut_after(path, step)
        assert read_metrics(tmp_path) == kept
        assert path.read_text() == "".join(json.dumps(row) + "\n" for row in kept)


def test_rows_of_a_kept_step_stay_wherever_they_stand(tmp_path):
    """An asynchronous checkpoint is noted behind rows of later steps, and an evaluation beside the run too."""
    late = [{"step": 2, "checkpoint": "step-2"}, {"step": 3, "checkpoint": "step-3"}, {"step": 2, "needle.mean": 0.5}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, *late]))
    _cut_after(path, 2)
    assert read_metrics(tmp_path) == [*ROWS[:3], late[0], late[2]]
    _cut_after(path, 0)
    assert path.read_bytes() == b""


def test_a_torn_row_between_others_costs_itself_alone(tmp_path):
    lines = [json.dumps(row) for row in ROWS]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines[:2], '{"step": 2, "lo', *lines[2:], ""]))
    assert read_metrics(tmp_path) == ROWS
    _cut_after(tmp_path / "metrics.jsonl", 2)
    assert read_metrics(tmp_path) == ROWS[:3]


def test_a_run_goes_on_when_its_figures_cannot_be_written(tmp_path):
    """With a limit of 16 kB per file, later rows are lost, and the run succeeds."""
    options = ["--checkpoint.no_enable", "--validation.no_enable", "--training.steps", "100"]
    command = train_command(tmp_path / "run", *options)
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))  # noqa: E731
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, preexec_fn=limit, timeout=300
    )
    assert done.returncode == 0, done.stderr
    start, *rows = read_metrics(tmp_path / "run")
    assert start["steps"] == 100
    assert [row["step"] for row in rows] == [*range(1, len(rows) + 1)]
    assert 20 < len(rows) < 100
    assert f"metrics.jsonl: {100 - len(rows)} records were lost in all" in done.stderr
    assert done.stderr.count("can't be written") == 2  # metrics.jsonl and TensorBoard's
    assert "Traceback" not in done.stderr
