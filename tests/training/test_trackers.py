"""Trackers: the same figures in each as in metrics.jsonl, once; and whatever fails in them leaves a run as it would be without."""

import json
import math
import socket
import sqlite3
import struct
import subprocess
import threading
import time

import pytest
from PIL import Image
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from farsight.cli import explain
from farsight.configs.schema import JobConfig
from farsight.training.metrics_file import read_metrics
from farsight.training.trackers import background, trackers
from farsight.training.trackers.background import Background
from farsight.training.trackers.tracker import TrackedRun, Tracker, keep_id, read_ids
from farsight.training.trackers.trackers import Trackers, check_trackers, checkout
from tests.running import contents, train

ALL = "tensorboard,wandb,mlflow,trackio"
GROUPS = {"loss": "train", "val_loss": "validation"}
BASE = ("--checkpoint.interval=5", "--lr_scheduler.total_steps=14")


def tracked(folder, *options, names=ALL):
    """A run of twelve steps whose trackers write into `folder` alone."""
    home = f"HOME={folder.parent}"
    own = ["WANDB_MODE=offline", "WANDB_X_DISABLE_STATS=true", "WANDB_INIT_TIMEOUT=60", home]
    return train(folder, *BASE, "--metrics.trackers", names, *own, *options, script="tests/tracked_train.py")


def expected(folder):
    """Figures of metrics.jsonl by (group/name, step)."""
    found = {}
    for row in read_metrics(folder):
        for group in (group for key, group in GROUPS.items() if key in row):
            figures = {key: value for key, value in row.items() if key not in ("step", "time")}
            found |= {(f"{group}/{key}", row["step"]): value for key, value in figures.items()}
    return found


def in_tensorboard(folder):
    read = EventAccumulator(str(folder / "tb"))
    read.Reload()
    return [((tag, event.step), event.value) for tag in read.Tags()["scalars"] for event in read.Scalars(tag)]


def wandb_records(file):
    """The records of an offline run: LevelDB's log format, blocks of 32 KiB with records in one or several parts."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield Record.FromString(parts)
            parts = b""


def in_wandb(folder, own="*"):
    found = []
    for file in sorted((folder / "wandb").glob(f"offline-run-*-{own}/*.wandb")):
        for record in wandb_records(file):
            if record.WhichOneof("record_type") == "history":
                items = {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
                figures = {name: value for name, value in items.items() if "/" in name}
                found += [((name, items["step"]), value) for name, value in figures.items()]
    return found


def mlflow_client(folder, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return MlflowClient((folder / "mlruns").as_uri())


def in_mlflow(folder, monkeypatch, own=None):
    client = mlflow_client(folder, monkeypatch)
    own = own or read_ids(folder)["mlflow"]
    histories = (client.get_metric_history(own, key) for key in client.get_run(own).data.metrics)
    return [((metric.key, metric.step), metric.value) for history in histories for metric in history]


def in_trackio(folder, own=None):
    (database,) = (folder / "trackio").glob("*.db")
    with sqlite3.connect(database) as read:
        lines = read.execute("select run_name, step, metrics from metrics").fetchall()
    rows = [(step, json.loads(text)) for name, step, text in lines if own in (None, name)]
    return [((name, step), value) for step, figures in rows for name, value in figures.items() if "/" in name]


def in_each(folder, monkeypatch):
    return {
        "tensorboard": in_tensorboard(folder),
        "wandb": in_wandb(folder),
        "mlflow": in_mlflow(folder, monkeypatch),
        "trackio": in_trackio(folder),
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with all four, none of which has a network."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, tracked(folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same run without trackers."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    tracked(folder, names="[]")
    return folder


def same_run(folder, other):
    """Compares the losses and the final checkpoints of two runs, bit for bit."""
    for key in ("loss", "val_loss", "grad_norm"):
        assert [row.get(key) for row in read_metrics(folder)] == [row.get(key) for row in read_metrics(other)]
    ours, theirs = (contents(run / "checkpoint" / "step-12") for run in (folder, other))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.equal(theirs[name]) if hasattr(value, "equal") else value == theirs[name], name
    weights, others = (load_file(run / "model" / "model.safetensors") for run in (folder, other))
    assert all(weights[name].equal(others[name]) for name in weights.keys() | others.keys())


def test_all_four_have_the_figures_of_metrics_jsonl(whole, monkeypatch):
    folder, done = whole
    want = expected(folder)
    assert len([key for key in want if key[0] == "train/loss"]) == 12
    for name, found in in_each(folder, monkeypatch).items():
        relative = 1e-6 if name == "tensorboard" else 0  # which has single precision
        figures = dict(found)
        assert len(figures) == len(found), name  # each once
        assert figures.keys() == want.keys(), name
        for key, value in want.items():
            assert math.isclose(figures[key], value, rel_tol=relative), (name, key)
    assert "lost" not in done.stderr


def test_a_run_with_trackers_is_the_run_without(whole, alone):
    same_run(whole[0], alone)


def test_nothing_is_written_outside_the_run_folder(whole):
    folder, _ = whole
    cached = {".cache", ".config"}  # matplotlib's
    assert {path.name for path in folder.parent.iterdir()} - cached == {"run", "run.toml", "run.printed"}
    assert not list(folder.parent.glob(".c*/wandb*")) + list(folder.parent.glob(".c*/*/trackio*"))


def test_each_has_the_config_the_commit_the_plan_and_the_picture(whole, monkeypatch):
    folder, _ = whole
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    client, ids = mlflow_client(folder, monkeypatch), read_ids(folder)
    run = client.get_run(ids["mlflow"])
    assert run.data.params["training.seq_len"] == "64"
    assert run.data.tags["mlflow.source.git.commit"] == run.data.params["git.commit"] == commit
    assert run.info.status == "FINISHED"
    assert {file.path for file in client.list_artifacts(ids["mlflow"])} == {"config.toml", "positions.png"}
    parameters = run.data.params["plan.parameters"]

    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    records = list(wandb_records(file))
    (started,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
    config = {update.key: json.loads(update.value_json) for update in started.config.update}
    assert (started.run_id, started.display_name, started.project) == (ids["wandb"], "run", "farsight")
    assert (config["training"]["seq_len"], config["git"]["commit"]) == (64, commit)
    assert str(config["plan"]["parameters"]) == parameters
    assert list((folder / "wandb").glob("offline-run-*/files/media/images/positions_*.png"))

    with sqlite3.connect(next((folder / "trackio").glob("*.db"))) as read:
        ((name, text),) = read.execute("select run_name, config from configs")
    config = json.loads(text)
    assert (name, config["training"]["seq_len"], config["git"]["commit"]) == (ids["trackio"], 64, commit)
    assert list((folder / "trackio").glob("media/**/*.png"))

    read = EventAccumulator(str(folder / "tb"))
    read.Reload()
    texts = {tag: read.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in read.Tags()["tensors"]}
    assert "seq_len = 64" in texts["config"]
    assert f"| commit | {commit} |" in texts["git"]
    assert f"| parameters | {parameters} |" in texts["plan"]
    picture = read.Images("positions")[0]
    assert picture.encoded_image_string == (folder / "positions.png").read_bytes()
    with Image.open(folder / "positions.png") as image:
        assert (picture.width, picture.height) == image.size


def test_steps_that_run_again_are_there_once(whole, monkeypatch):
    """A run that lost its last checkpoint goes on under the same ids; W&B's part of each start is a file of its own."""
    folder, _ = whole
    ids, before = read_ids(folder), in_each(folder, monkeypatch)
    for path in sorted((folder / "checkpoint" / "step-12").iterdir()):
        path.unlink()
    (folder / "checkpoint" / "step-12").rmdir()
    (row,) = (row for row in read_metrics(folder) if row["step"] == 11)
    losses = {key: value for key, value in expected(folder).items() if key[0].endswith("loss")}
    tracked(folder, "--training.steps=14")
    assert read_ids(folder) == ids
    (again,) = (row for row in read_metrics(folder) if row["step"] == 11)
    assert row["tokens_per_second"] != again["tokens_per_second"]  # it did run again
    want = expected(folder)
    for name, found in in_each(folder, monkeypatch).items():
        figures = dict(found)
        assert len(figures) == len(found), name
        assert figures.keys() == want.keys(), name
        if name != "tensorboard":  # which shows the steps that ran again
            assert {key: value for key, value in found if key[1] <= 12} == dict(before[name])
    assert losses.keys() <= want.keys()


@pytest.fixture
def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]  # bound, but nobody listens


def test_without_a_disk_the_run_is_the_same(tmp_path, alone):
    """Files are in the way of everything that trackers write; W&B would then go on in the system's temporary folder."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("tb", "wandb", "mlruns", "trackio"):
        (folder / name).touch()
    done = tracked(folder, f"WANDB_DIR={folder / 'wandb' / 'inside'}")
    same_run(folder, alone)
    for name in ("wandb", "mlflow", "trackio"):
        assert done.stderr.count(f"{name} failed (") == 1
        assert f"{name}: 16 records were lost in all." in done.stderr  # twelve steps, three validations, a picture
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_without_a_network_the_run_is_the_same(tmp_path, alone, closed_port):
    folder, place = tmp_path / "run", f"http://127.0.0.1:{closed_port}"
    variables = [
        "WANDB_MODE=online",
        f"WANDB_API_KEY={'0' * 40}",
        f"WANDB_BASE_URL={place}",
        "WANDB_INIT_TIMEOUT=2",
        f"MLFLOW_TRACKING_URI={place}",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES=0",
        f"TRACKIO_SERVER_URL={place}",
        "TRACKIO_WRITE_TOKEN=none",
    ]
    done = tracked(folder, *variables)
    same_run(folder, alone)
    for name in ("wandb", "mlflow"):
        assert done.stderr.count(f"{name} failed (") == 1
        assert f"{name}: 16 records were lost in all." in done.stderr
    assert "saved locally" in done.stderr  # Trackio keeps them for its next start
    assert "Traceback" not in done.stderr
    assert not (folder / "mlruns").exists()


# ── What fails ────────────────────────────────────────────────────────────────────────────────────────


class Recorder(Tracker):
    """Keeps what it is given; `faults` maps steps to what happens there."""

    def __init__(self, faults=None, resumed=False):
        self.given, self.faults, self.resumed = [], faults or {}, resumed
        self.closed = None

    def log(self, step, figures):
        if (fault := self.faults.get(step)) is not None:
            fault()
        self.given.append((step, dict(figures)))

    def picture(self, step, path): ...

    def table(self, step, name, columns, rows): ...

    def close(self, finished):
        self.closed = finished


def ended(thread, seconds=10.0):
    thread.end(True)
    thread.wait(seconds)


def said(caplog):
    return [record.getMessage() for record in caplog.records]


def fails(error):
    def fault():
        raise error

    return fault


def test_what_a_tracker_raises_costs_that_record_alone(caplog):
    recorder = Recorder({2: fails(SystemExit("no")), 3: fails(ValueError("second"))})
    thread = Background("one", lambda: recorder)
    for step in range(1, 6):
        thread.log(step, {"train/loss": 0.5})
    ended(thread)
    assert [step for step, _ in recorder.given] == [1, 4, 5]
    assert recorder.closed is True
    failed, lost = said(caplog)
    assert failed == "one failed (SystemExit: no); the run goes on without what it can't take."
    assert lost == "one: 2 records were lost in all."


def test_a_tracker_that_hangs_is_left_behind(caplog, monkeypatch):
    monkeypatch.setattr(background, "HUNG_SECONDS", 0.0)
    monkeypatch.setattr(background, "MOST_WAITING", 3)
    hung, free = threading.Event(), threading.Event()

    def hang():
        hung.set()
        free.wait()

    thread = Background("one", lambda: Recorder({1: hang}))
    thread.log(1, {"train/loss": 0.5})
    assert hung.wait(10)
    for step in range(2, 8):
        thread.log(step, {"train/loss": 0.5})
    ended(thread, 0.1)
    free.set()
    assert said(caplog) == [
        "one has not answered for 0 s; the run goes on without what it can't take.",
        "one does not end, and is left behind.",
        "one: 7 records were lost in all.",  # the first, three that waited, and three that found no place
    ]


def test_what_is_logged_waits_until_a_tracker_opens(caplog, monkeypatch):
    monkeypatch.setattr(background, "AGAIN_SECONDS", 0.01)
    recorder, attempts = Recorder(), []

    def open_tracker():
        attempts.append(time.monotonic())
        if len(attempts) < 3:
            raise OSError("no network")
        return recorder

    thread = Background("one", open_tracker)
    for step in (1, 2):
        thread.log(step, {"train/loss": 0.5})
    for _ in range(1000):
        if len(recorder.given) == 2:
            break
        time.sleep(0.01)
    ended(thread)
    assert [step for step, _ in recorder.given] == [1, 2]
    assert said(caplog) == ["one failed (OSError: no network); the run goes on without what it can't take."]


def test_figures_given_before_are_left_out_if_the_tracker_goes_on():
    again = {(4, "loss"), (4, "lr")}
    for resumed, kept in ((True, [{"train/grad_norm": 3.0}, {"train/loss": 1.0}]), (False, None)):
        recorder = Recorder(resumed=resumed)
        thread = Background("one", lambda recorder=recorder: recorder, again)
        rows = [(4, {"train/loss": 1.0, "train/lr": 2.0}), (4, {"train/grad_norm": 3.0}), (5, {"train/loss": 1.0})]
        for step, figures in rows:
            thread.log(step, figures)
        ended(thread)
        assert [figures for _, figures in recorder.given] == (kept or [figures for _, figures in rows])


def test_only_numbers_are_passed_on(tmp_path):
    opened = Trackers(TrackedRun(tmp_path, "", 0, {}, ""), ["tensorboard"], tmp_path / "tb")
    opened.log("slow", 3, {"step": 3, "time": 1.0, "slow": [{"rank": 1}], "ratio": 2, "none": None, "name": "x"})
    (file,) = (tmp_path / "tb").iterdir()
    size = file.stat().st_size
    opened.log("slow", 4, {"step": 4, "time": 1.0, "slow": []})
    assert file.stat().st_size == size
    opened.close(True)
    assert in_tensorboard(tmp_path) == [(("slow/ratio", 3), 2.0)]


def test_a_picture_that_is_none_costs_itself_alone(tmp_path, caplog):
    opened = Trackers(TrackedRun(tmp_path, "", 0, {}, ""), ["tensorboard"], tmp_path / "tb")
    (tmp_path / "empty.png").touch()
    for name in ("empty.png", "gone.png"):
        opened.picture(1, tmp_path / name)
        assert f"{name} can't be read for TensorBoard: " in said(caplog)[-1]
    opened.close(True)


def test_a_missing_package_is_refused_with_its_extra(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    config = JobConfig()
    check_trackers(config)
    config.metrics.trackers = ["tensorboard", "mlflow"]
    with pytest.raises(ModuleNotFoundError) as error:
        check_trackers(config)
    assert "needs the package mlflow" in explain(error.value)
    assert "[mlflow]" in explain(error.value)


def test_stages_share_a_group_and_a_folder(tmp_path):
    alone, stage = tmp_path / "alone", tmp_path / "recipe" / "2-long"
    for folder in (alone, stage):
        folder.mkdir(parents=True)
    (stage / "stage.toml").touch()
    run, part = (TrackedRun(folder, "", 5, {}, "") for folder in (alone, stage))
    assert (run.group, run.name, run.home) == (None, "alone", alone)
    assert (part.group, part.name, part.home) == ("recipe", "recipe-2-long", tmp_path / "recipe")
    keep_id(stage, "wandb", "abc")
    keep_id(stage, "mlflow", "def")
    assert (part.kept_id("wandb"), part.kept_id("mlflow"), part.kept_id("trackio")) == ("abc", "def", None)
    assert TrackedRun(stage, "", 0, {}, "").kept_id("wandb") is None  # it starts anew


def test_the_commit_is_that_of_the_working_directory(tmp_path, monkeypatch):
    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *who, *arguments], check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert checkout() == {}
    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    assert checkout() == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "file").write_text("2")
    assert checkout()["dirty"] is True
