"""Runs whose checkpoints are on an object store, and paths on one: an S3-compatible server on this machine, behind a proxy."""

import itertools
import json
import os
import pickle
import random
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from farsight import remote, stores
from farsight.benchmarks.forked import Forked
from farsight.benchmarks.kills import Training, join, kill_and_resume, output, rows, train_undisturbed, weights
from farsight.benchmarks.local_store import BUCKET, LocalStore
from farsight.checkpoints.dcp import load
from farsight.checkpoints.intact.__main__ import main as intact
from farsight.checkpoints.intact.check import every_fault
from farsight.checkpoints.load import load_model
from farsight.checkpoints.steps import complete_steps, step_folders
from farsight.configs.load import build_config
from farsight.configs.schema import Position
from farsight.data.tokenizers.tokenizer import BytesTokenizer
from farsight.errors import ConfigError, SaveError, UserError
from farsight.launch.recipe.run import fetch_finished
from farsight.reports.push import main as push
from farsight.stores import StorePath, path_of
from farsight.training import run_store
from farsight.training.run_store import open_run_store
from farsight.training.stages import load_recipe
from tests.finetuned import write_base
from tests.running import TINY, metrics, train_command

STEPS, INTERVAL = 16, 4


@pytest.fixture(scope="module")
def server():
    with LocalStore() as store:
        yield store


@pytest.fixture
def store(server, monkeypatch):
    """The server without faults, and this process set up to use it."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    stores._filesystem.cache_clear()
    server.fault, server.on_piece = (lambda method, path: ""), (lambda method, path, size: None)
    server.forget()
    yield server
    stores._filesystem.cache_clear()


def at(name):
    return StorePath(f"s3://{BUCKET}/{name}")


# ── Whole runs ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run on the disk."""
    return train_undisturbed(Training(tmp_path_factory.mktemp("local"), STEPS, INTERVAL))


def on_store(store, folder, name, **options):
    return Training(folder, STEPS, INTERVAL, store=str(at(name)), environment=store.environment, **options)


def kill_in_upload(training, store, step):
    """Trains until a part of a checkpoint's first file has arrived, and kills the run there."""
    ranks = training.start("run", training.folder / "upload.log")
    arrived = threading.Event()

    def kill(method, path, size):
        if method == "PUT" and f"step-{step}/__0_0" in path and not arrived.is_set():
            arrived.set()
            for process in ranks.processes:
                process.kill()

    store.on_piece = kill
    statuses = join(ranks)
    store.on_piece = lambda method, path, size: None
    assert arrived.is_set(), output(training.folder / "upload.log")
    assert statuses == {-9}


@pytest.mark.slow
def test_a_run_killed_five_times_ends_like_one_on_the_disk(store, tmp_path, whole):
    training = on_store(store, tmp_path, "killed")
    kill_in_upload(training, store, 2 * INTERVAL)
    checkpoints = training.checkpoints("run")
    assert complete_steps(checkpoints) == [INTERVAL]
    assert [*step_folders(checkpoints)] == [INTERVAL, 2 * INTERVAL]  # the second has its config and no weights

    shutil.rmtree(tmp_path / "run")  # as on another machine
    aims = ["start-up", "training", "saving", "export"]
    outcome = kill_and_resume(
        training, "run", replace(whole, save_seconds=0.4, export_seconds=0.4), aims, random.Random(2)
    )
    assert outcome.wrong == []
    assert len(outcome.kills) == len(aims)
    assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(1, STEPS + 1))
    assert not (tmp_path / "run" / "checkpoint").exists()
    assert store.uploads() == []
    # What lies here lies there too, and nothing else but the checkpoints.
    there = {path.relative_to(at("killed/run")).as_posix(): path for path in at("killed/run").rglob("*")}
    assert {name for name in there if not name.startswith("checkpoint/")} == {
        path.relative_to(tmp_path / "run").as_posix()
        for path in (tmp_path / "run").rglob("*")
        if path.is_file() and path.name != ".lock" and path.parent.name != "heartbeat"
    }
    for name, path in there.items():
        if not name.startswith("checkpoint/"):
            assert path.read_bytes() == (tmp_path / "run" / name).read_bytes()


@pytest.mark.slow
def test_two_ranks_write_and_read_their_own_shards(store, tmp_path):
    alone = train_undisturbed(Training(tmp_path, STEPS, INTERVAL, ranks=2))
    training = on_store(store, tmp_path, "two", ranks=2, asynchronous=True)
    kill_in_upload(training, store, 2 * INTERVAL)
    store.forget()
    last = tmp_path / "last.log"
    assert join(training.start("run", last)) == {0}, output(last)
    assert f"resuming from {training.checkpoints('run')}/step-{INTERVAL}" in output(last)
    assert weights(tmp_path / "run") == alone.weights
    assert rows(tmp_path / "run") == alone.rows
    sent = {path.rpartition("/")[2].partition("?")[0] for method, path, _ in store.seen if method == "PUT"}
    assert {"__0_0.distcp", "__1_0.distcp"} <= sent


@pytest.mark.slow
def test_a_store_that_fails_now_and_then_leaves_no_trace(store, tmp_path, whole):
    """Each eighth request fails, in turn by a refusal, a closed connection and half an answer."""
    requests, faults = itertools.count(1), itertools.cycle(["503", "drop", "cut"])
    store.fault = lambda method, path: "" if next(requests) % 8 else next(faults)
    training = on_store(store, tmp_path, "faulty")
    log = tmp_path / "log"
    assert join(training.start("run", log)) == {0}, output(log)
    assert rows(tmp_path / "run") == whole.rows
    assert weights(tmp_path / "run") == whole.weights
    for word in ("can't", "warn", "error", "retr"):
        assert word not in output(log).lower()
    store.fault = lambda method, path: ""
    assert every_fault(training.checkpoints("run") / f"step-{STEPS}") == []


EVALUATING = """
[[evaluations]]
kind = "perplexity"
name = "inside"
every = 1
data = ["{text}"]
lengths = [32]
windows = 4

[[evaluations]]
kind = "perplexity"
name = "beside"
every = 6
data = ["{text}"]
lengths = [32, 64]
windows = 4
where = "beside"
"""


@pytest.mark.slow
def test_evaluations_and_the_best_checkpoint_are_those_of_a_run_on_the_disk(store, tmp_path, monkeypatch):
    """With a high learning rate, perplexity on a text that is not trained on rises again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text(" ".join(random.Random(0).choices(["the", "river", "runs", "under"], k=400)))
    config, url = TINY + EVALUATING.format(text=tmp_path / "text.txt"), str(at("evaluated"))
    options = ["--optimizer.lr=0.05", "--checkpoint.keep_best=inside.32", "--validation.no_enable"]

    def start(name, *more):
        arguments = train_command(tmp_path / name, *options, *more, config=config)[2:]
        done = Forked(arguments, 1, tmp_path / f"{name}.printed", environment=store.environment).wait()
        assert done.returncode == 0, done.stderr
        return done.stderr

    def figures(name):
        seconds = {"time", "evaluation_seconds"}
        rows = [
            {key: value for key, value in row.items() if key not in seconds}
            for row in metrics(tmp_path / name, "evaluation")
        ]
        return sorted(rows, key=lambda row: (row["step"], row["evaluation"]))

    start("near")
    start("far", f"--job.store={url}")
    assert figures("far") == figures("near")
    assert [row["step"] for row in figures("far") if row["evaluation"] == "beside"] == [6, 12]
    near, far = (json.loads((tmp_path / name / "best.json").read_text()) for name in ("near", "far"))
    assert near.pop("checkpoint") == str(tmp_path / "near" / "checkpoint" / f"step-{near['step']}")
    assert far.pop("checkpoint") == f"{url}/checkpoint/step-{far['step']}"
    assert far == near
    values = {row["step"]: row["inside.32"] for row in figures("near") if row["evaluation"] == "inside"}
    assert far["step"] == min(values, key=values.__getitem__) < 11
    kept = complete_steps(tmp_path / "near" / "checkpoint")
    assert kept == complete_steps(at("evaluated") / "checkpoint")
    assert {far["step"], 12} <= {*kept}
    for name in ("inside", "beside"):
        results = [
            json.loads((tmp_path / run / f"evaluations/step-12/{name}.json").read_text()) for run in ("near", "far")
        ]
        assert results[1].pop("model") == f"{url}/checkpoint/step-12"
        assert results[0].pop("model") == str(tmp_path / "near/checkpoint/step-12")
        assert results[0] == results[1]
        there = at(f"evaluated/evaluations/step-12/{name}.json")
        assert there.read_bytes() == (tmp_path / f"far/evaluations/step-12/{name}.json").read_bytes()
    assert (at("evaluated") / "best.json").read_bytes() == (tmp_path / "far" / "best.json").read_bytes()

    # Another machine, which lacks the last step, knows the best so far and what has been evaluated.
    shutil.rmtree(tmp_path / "far")
    (at("evaluated") / "checkpoint" / "step-12").delete_tree()
    said = start("far", f"--job.store={url}")
    assert f"step {far['step']}: best inside.32 so far" in said
    assert figures("far") == figures("near")
    assert json.loads((tmp_path / "far" / "best.json").read_text())["step"] == far["step"]
    assert far["step"] in complete_steps(at("evaluated") / "checkpoint")


# ── Checkpoints, in this process ──────────────────────────────────────────────────────────────────────


@pytest.fixture
def saved(store, tmp_path, start_run):
    """Starts runs of a name, one after the other, whose checkpoints are on the store."""

    def start(name, **options):
        run = start_run(sections={"job": {"dump_folder": str(tmp_path / "run"), "store": str(at(name))}}, **options)
        run.folder = at(name) / "checkpoint"
        return run

    return start


def test_a_checkpoint_is_complete_with_its_last_object(store, saved):
    run = saved("order")
    run.save(3)
    names = [path.rpartition("/")[2] for method, path, _ in store.seen if method == "PUT" and "step-3" in path]
    assert names[-1] == ".metadata"
    assert sorted(names[:-1]) == [".metadata.tmp", "__0_0.distcp", "checksums.json", "farsight.json"]
    assert complete_steps(run.folder) == [3]
    assert saved("order").load() == 3


def test_the_store_checks_what_it_receives(store, saved):
    """Each upload brings a checksum for the store to compare."""
    saved("sums").save(3)
    uploads = [headers for method, path, headers in store.seen if method == "PUT" and path.endswith(".distcp")]
    assert uploads
    for headers in uploads:
        assert any(name.lower().startswith("x-amz-checksum-") for name in headers)


def test_a_save_reads_nothing_back_and_a_load_reads_each_byte_twice(store, saved):
    run = saved("bytes")
    run.save(3)
    size = (run.folder / "step-3" / "__0_0.distcp").stat().st_size
    data = [path for method, path, _ in store.seen if method == "GET" and path.endswith(".distcp")]
    assert data == []
    store.forget()
    assert saved("bytes").load() == 3
    small = 100_000  # .metadata and the JSON files, which several checks read
    assert 2 * size <= store.down["checkpoints"] < 2 * size + small


def test_remains_are_removed_and_damage_is_set_aside(store, saved, caplog):
    caplog.set_level("INFO", "farsight")
    run = saved("remains", keep_latest_k=0)
    for step in (3, 6, 9):
        run.save(step)
    (run.folder / "step-9" / ".metadata").rename(run.folder / "step-9" / ".metadata.tmp")  # as a save that was killed
    data = bytearray((shard := run.folder / "step-6" / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    unfinished = stores._filesystem("s3", os.getpid()).call_s3
    for folder in ("remains/checkpoint/step-9", "remains-of-another/checkpoint/step-9"):
        unfinished("create_multipart_upload", Bucket=BUCKET, Key=f"{folder}/__0_0.distcp")

    assert saved("remains").load() == 3
    assert "step-9 is removed: its save was interrupted" in caplog.text
    assert "step-6 is damaged: __0_0.distcp was altered between bytes 0 and" in caplog.text
    assert sorted(path.name for path in run.folder.iterdir()) == ["damaged-6", "step-3"]
    assert (run.folder / "damaged-6" / "__0_0.distcp").read_bytes() == data
    assert store.uploads() == ["remains-of-another/checkpoint/step-9/__0_0.distcp"]


def test_old_checkpoints_are_deleted_and_others_files_are_not(store, saved, caplog):
    run = saved("old")
    for step in (3, 6, 9):
        if step == 9:
            (run.folder / "step-3" / "notes.txt").write_text("mine")
        run.save(step)
    run.save(12)
    assert complete_steps(run.folder) == [3, 9, 12]
    assert "step-3 is not deleted: Farsight did not write all that is in it (notes.txt)" in caplog.text
    assert not (run.folder / "step-6").exists()


def test_a_save_that_fails_leaves_no_part_of_it(store, saved):
    run = saved("failing")
    run.save(3)
    store.fault = lambda method, path: "403" if method == "PUT" and "__0_0" in path else ""
    with pytest.raises(
        SaveError, match=r"step 6 could not be saved in s3://bucket/failing/checkpoint: .*AccessDenied.* step 3"
    ):
        run.save(6)
    store.fault = lambda method, path: ""
    assert [*step_folders(run.folder)] == [3]
    assert saved("failing").load() == 3


def write_and_fail(path, size):
    with path.open("wb") as file:
        file.write(bytes(size))
        raise ZeroDivisionError


def test_a_write_that_is_interrupted_leaves_no_object(store, monkeypatch):
    monkeypatch.setattr(stores, "PART_BYTES", 5 * 2**20)
    for size in (100, 6 * 2**20):  # in one request, and in parts
        with pytest.raises(ZeroDivisionError):
            write_and_fail(at("half") / str(size), size)
    assert not at("half").exists()
    assert not any("half" in name for name in store.uploads())


# ── Paths ─────────────────────────────────────────────────────────────────────────────────────────────


def test_paths_are_like_those_of_folders(store, tmp_path):
    """The same calls give the same answers on the disk and on the store."""
    found = []
    for root in (tmp_path / "root", at("root")):
        folder = root / "step-1"
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text("één", encoding="utf-8")
        with (folder / "b.bin").open("wb") as file:
            written = [file.write(b"0123456789" * 3), file.tell()]
        with (folder / "b.bin").open("rb") as file:
            read = [file.read(4), file.seek(-5, 2), file.read(), file.read(), file.seek(2), file.read(3)]
        (folder / "a.txt").rename(folder / "c.txt")
        folder.rename(root / "step-2")
        folder = root / "step-2"
        (folder / "gone").unlink(missing_ok=True)
        with pytest.raises(FileNotFoundError):
            (folder / "gone").read_bytes()
        paths = [folder, folder / "c.txt", folder / "gone", root / "step-1"]
        found.append(
            [
                written, read, (folder / "c.txt").read_text(encoding="utf-8"), (folder / "b.bin").stat().st_size,
                [(path.exists(), path.is_dir(), path.is_file()) for path in paths],
                [path.relative_to(root).as_posix() for path in (*root.iterdir(), *sorted(folder.iterdir()))],
                sorted(path.name for path in root.glob("step-*")), sorted(path.name for path in folder.glob("*.bin")),
                sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()),
                (folder / "b.bin").with_name("d").name, folder.parent == root, folder.suffix, len({folder, root / "step-2"}),
            ]
        )  # fmt: skip
        stores.delete_tree(root)
        assert not root.exists()
    assert found[0] == found[1]


def test_a_path_on_a_store_is_never_taken_for_a_file(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = at("a/b")
    assert str(path) == f"s3://{BUCKET}/a/b"
    assert pickle.loads(pickle.dumps(path)) == path == path_of(Path(str(path)))
    assert isinstance(path_of(str(path)), StorePath)
    assert type(path_of("s3/b")) is type(Path("s3/b"))
    for wrong in (lambda: os.stat(path), lambda: os.listdir(path), lambda: shutil.copy(path, tmp_path)):
        with pytest.raises(TypeError, match="is no file of the operating system"):
            wrong()
    assert [*tmp_path.iterdir()] == []


# ── The start of a run ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def lock(monkeypatch):
    """Leases that grow old within a second."""
    monkeypatch.setattr(run_store, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(run_store, "GONE_SECONDS", 0.5)
    monkeypatch.setattr(run_store, "POLL_SECONDS", 0.1)


def opened(folder, name):
    config = build_config({"job": {"dump_folder": str(folder), "store": str(at(name))}})
    return open_run_store(config.job, config.checkpoint.folder)


@pytest.mark.parametrize(
    ("url", "fault", "said"),
    [
        ("s3://no-such-bucket/x", "", "there is no bucket 'no-such-bucket'"),
        (f"s3://{BUCKET}/x", "403", "access is denied.*list, read, write and delete"),
    ],
)
def test_a_store_that_can_not_be_used_ends_the_run_before_its_first_step(store, tmp_path, url, fault, said):
    store.fault = lambda method, path: fault
    job = build_config({"job": {"dump_folder": str(tmp_path / "run"), "store": url}}).job
    with pytest.raises(ConfigError, match=f"job.store = {url} can't be used: {said}"):
        open_run_store(job, "checkpoint")


def test_without_credentials_or_package_a_sentence_says_so(store, tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="no credentials were found"):
        opened(tmp_path / "run", "x")
    monkeypatch.setitem(stores.PACKAGES, "s3", "package_that_is_not_installed")
    stores._filesystem.cache_clear()
    with pytest.raises(ModuleNotFoundError, match="package_that_is_not_installed"):
        opened(tmp_path / "run", "x")


def test_only_one_run_uses_a_folder_of_a_store(store, tmp_path, lock, monkeypatch):
    first = opened(tmp_path / "run", "leased")
    with pytest.raises(ConfigError, match=rf"s3://{BUCKET}/leased is in use by .*:{tmp_path}/run; wait for it"):
        opened(tmp_path / "another", "leased")
    first.close()
    assert not (at("leased") / run_store.LEASE).exists()
    second = opened(tmp_path / "another", "leased")
    second.close()


def test_a_start_that_can_not_read_the_store_gives_the_lease_back(store, tmp_path, lock):
    (at("unread") / "metrics.jsonl").write_text("1\n")
    store.fault = lambda method, path: "403" if method == "GET" and "metrics.jsonl" in path else ""
    with pytest.raises(ConfigError, match="access is denied"):
        opened(tmp_path / "run", "unread")
    assert not (at("unread") / run_store.LEASE).exists()


def test_the_lease_of_a_killed_run_is_taken_over(store, tmp_path, lock, caplog):
    caplog.set_level("INFO", "farsight")
    lease = at("old") / run_store.LEASE
    lease.write_text(json.dumps({"holder": "elsewhere:/runs/x", "token": "1"}))
    run = opened(tmp_path / "run", "old")
    run.push()  # which would refuse to mix two runs
    while run.lease.thread.is_alive():  # which may have looked just before, and write its own once more
        lease.write_text(json.dumps({"holder": "elsewhere:/runs/x", "token": "2"}))
        run.lease.thread.join(0.2)
    with pytest.raises(SaveError, match="has been taken over by elsewhere:/runs/x"):
        run.push()
    run.close()
    assert json.loads(lease.read_text())["token"] == "2"

    # On the same machine the lock of the run folder says that no run holds it.
    lease.write_text(json.dumps({"holder": run.lease.holder, "token": "3"}))
    caplog.clear()
    again = opened(tmp_path / "run", "old")
    assert "waiting" not in caplog.text
    assert json.loads(lease.read_text())["token"] == again.lease.token
    again.close()


def test_figures_come_from_the_store_where_it_has_others(store, tmp_path, lock):
    there = at("figures")
    (there / "metrics.jsonl").write_text("1\n2\n")
    (there / "tokenizer" / "tokenizer.json").write_text("{}")
    (there / "checkpoint" / "step-3" / "__0_0.distcp").write_text("data")
    (there / "model" / "model.safetensors").write_text("weights")
    run = opened(tmp_path / "run", "figures")
    run.close()
    assert {path.relative_to(tmp_path / "run").as_posix() for path in (tmp_path / "run").rglob("*") if path.is_file()} == {
        "metrics.jsonl", "tokenizer/tokenizer.json",
    }  # fmt: skip
    for here, kept in (("1\n2\n3\n", "1\n2\n3\n"), ("1\n4\n", "1\n2\n")):
        (tmp_path / "run" / "metrics.jsonl").write_text(here)
        (there / "metrics.jsonl").write_text("1\n2\n")
        opened(tmp_path / "run", "figures").close()
        assert (tmp_path / "run" / "metrics.jsonl").read_text() == kept


def test_files_that_vanish_or_are_unfinished_are_not_copied_up(store, tmp_path, lock, monkeypatch):
    """Trackers and evaluations write and delete files while others are copied."""
    run = opened(tmp_path / "run", "vanishing")
    for name in ("a.txt", "b-journal", "c.txt", "model.part/model.safetensors", "d.txt.77.part"):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text(name)
    send = StorePath.send

    def sending(self, source):
        (tmp_path / "run" / "b-journal").unlink(missing_ok=True)
        send(self, source)

    monkeypatch.setattr(StorePath, "send", sending)
    run.push()
    assert sorted(path.name for path in at("vanishing").rglob("*")) == ["a.txt", "c.txt", "lease.json"]
    store.fault = lambda method, path: "403"
    (tmp_path / "run" / "a.txt").write_text("another")
    with pytest.raises(SaveError, match="can't be copied to"):
        run.push()
    store.fault = lambda method, path: ""
    run.close()


def test_a_run_folder_belongs_to_one_store(store, tmp_path, lock):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text('[job]\nstore = "s3://bucket/one"\n')
    with pytest.raises(
        ConfigError, match=r"whose checkpoints are in s3://bucket/one, and job.store = 's3://bucket/two'"
    ):
        opened(folder, "two")
    with pytest.raises(ConfigError, match=r"whose checkpoints are in s3://bucket/one, and job.store = ''"):
        open_run_store(build_config({"job": {"dump_folder": str(folder)}}).job, "checkpoint")
    opened(folder, "one").close()


def test_a_run_folder_on_a_store_has_its_small_files_in_a_folder_of_its_name():
    job = build_config({"job": {"dump_folder": "s3://bucket/team/runs/x"}}).job
    assert (job.dump_folder, job.store) == ("runs/x", "s3://bucket/team/runs/x")
    for values, said in (
        ({"dump_folder": "https://host/x"}, "job.dump_folder = 'https://host/x' must be a folder on a store"),
        ({"dump_folder": "s3://bucket"}, "must be a folder on a store that can be written, as in s3://bucket/runs/x"),
        ({"store": "runs/x"}, "job.store = 'runs/x' must be a folder on a store"),
        ({"dump_folder": "s3://a/x", "store": "s3://b/x"}, "both on a store: leave one out"),
    ):
        with pytest.raises(ConfigError, match=said):
            build_config({"job": values})


# ── Models on stores and web servers ──────────────────────────────────────────────────────────────────


@pytest.fixture
def model(store, tmp_path, monkeypatch):
    """A model directory of several files, in a folder of the store; and the cache is in another place."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "_urls", {})
    forget_places()
    write_base(tmp_path / "model", Position(), shard_bytes=20_000)
    BytesTokenizer().save(tmp_path / "model")
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"a pickle")
    for path in (tmp_path / "model").iterdir():
        (at("models/m") / path.name).write_bytes(path.read_bytes())
    (at("models/m") / "evals" / "results.json").write_text("{}")
    return tmp_path / "model"


def forget_places():
    for cached in (remote._local, remote._pinned):
        cached.cache_clear()


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_a_model_is_copied_once_and_loaded(store, model, scheme):
    url = f"s3://{BUCKET}/models/m" if scheme == "s3" else f"{store.address}/{BUCKET}/models/m"
    small = remote.local(url, weights=False)
    assert not [*small.glob("*.safetensors")]
    folder = remote.local(url)
    assert folder == small
    assert remote.shown(folder) == url
    copied = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}
    known = {"README.md", "modeling_farsight.py"} if scheme == "http" else set()  # a web server does not list them
    there = {path.name: path.read_bytes() for path in model.iterdir() if path.name not in {"pytorch_model.bin", *known}}
    assert copied == there
    loaded, whole = load_model(folder)[0].state_dict(), load_model(model)[0].state_dict()
    for name, tensor in whole.items():
        assert torch.equal(loaded[name], tensor)

    store.forget()
    forget_places()
    assert remote.local(url) == folder
    sent = {path.rpartition("/")[2] for method, path, _ in store.seen if method == "GET"}
    assert not sent & {path.name for path in model.glob("*.safetensors")}
    # Another version has another place.
    changed = sorted(model.glob("*.safetensors"))[0]
    (at("models/m") / changed.name).write_bytes(changed.read_bytes() + b" ")
    forget_places()
    assert (remote.local(url) / changed.name).read_bytes() == changed.read_bytes() + b" "
    assert (folder / changed.name).read_bytes() == changed.read_bytes()


def test_a_cache_behind_a_link_is_known_by_its_real_path(store, model, tmp_path, monkeypatch):
    """Adapters record the real path of their base's folder, which has to name the place again."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
    url = f"s3://{BUCKET}/models/m"
    folder = remote.local(url, weights=False)
    assert folder.is_relative_to(tmp_path / "link")
    assert remote.shown(folder.resolve()) == remote.shown(folder) == url


def test_a_model_on_a_store_can_be_pushed_to_the_hub(store, model, capsys):
    push([f"s3://{BUCKET}/models/m", "org/model", "--dry-run"])
    printed = capsys.readouterr().out
    for path in model.glob("*.safetensors"):
        assert f"{path.stat().st_size:,}  {path.name}" in printed
    assert "left out" not in printed
    assert "results → org/model" in printed


def test_a_copy_goes_on_where_it_was_cut_off(store, model, monkeypatch):
    monkeypatch.setattr(stores, "PART_BYTES", 4096)
    weights = sorted(model.glob("*.safetensors"))[-1]
    reads = itertools.count(1)
    store.fault = lambda method, path: "403" if method == "GET" and weights.name in path and next(reads) > 2 else ""
    with pytest.raises(UserError, match=r"s3://bucket/models/m can't be read: AccessDenied"):
        remote.local(f"s3://{BUCKET}/models/m")
    store.fault = lambda method, path: ""
    store.forget()
    folder = remote.local(f"s3://{BUCKET}/models/m")
    assert (folder / weights.name).read_bytes() == weights.read_bytes()
    ranges = [headers["Range"] for method, path, headers in store.seen if method == "GET" and weights.name in path]
    assert ranges[0] == "bytes=8192-12287"
    assert not [*folder.glob("*.part")]


def test_a_web_server_that_fails_now_and_then_is_asked_again(store, model, monkeypatch):
    monkeypatch.setattr(stores, "time", SimpleNamespace(sleep=lambda seconds: None))
    requests, faults = itertools.count(1), itertools.cycle(["503", "drop", "cut"])
    store.fault = lambda method, path: "" if next(requests) % 4 else next(faults)
    folder = remote.local(f"{store.address}/{BUCKET}/models/m")
    assert (folder / "config.json").read_bytes() == (model / "config.json").read_bytes()
    with pytest.raises(UserError, match="has no files of a model"):
        remote.local(f"{store.address}/{BUCKET}/models/none")
    store.fault = lambda method, path: "403"
    with pytest.raises(UserError, match="can't be read: the server refuses it with status 403"):
        remote.local(f"{store.address}/{BUCKET}/models/private")


def test_checkpoints_are_read_where_they_are(store, saved, model, capsys):
    saved("read").save(3)
    web = f"{store.address}/{BUCKET}/read/checkpoint/step-3"
    for url in (f"s3://{BUCKET}/read/checkpoint/step-3", web):
        assert isinstance(remote.local(url), StorePath)
        assert intact([url]) == 0
        assert capsys.readouterr().out == f"{url}: whole\n"
        state = {"weight": torch.empty(512, 512)}
        load(state, path_of(url))
        assert (state["weight"] == 3).all()
    shard = at("read/checkpoint/step-3/__0_0.distcp")
    shard.write_bytes(shard.read_bytes()[:-1])
    assert intact([web]) == 1
    assert "bytes expected" not in capsys.readouterr().err


# ── Recipes ───────────────────────────────────────────────────────────────────────────────────────────

RECIPE = """
[recipe]
folder = "s3://bucket/recipes"
[lr_scheduler]
warmup_steps = 2
[tokenizer]
kind = "bytes"
[[stages]]
name = "first"
[stages.training]
steps = 6
[[stages]]
name = "second"
optimizer_state = "carry"
"""


def test_another_machine_goes_on_with_a_recipe(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two.toml").write_text(RECIPE)
    recipe, stages = load_recipe(tmp_path / "two.toml", {})
    assert [(stage.config.job.dump_folder, stage.config.job.store) for stage in stages] == [
        ("runs/two/first", "s3://bucket/recipes/two/first"),
        ("runs/two/second", "s3://bucket/recipes/two/second"),
    ]
    assert stages[1].config.checkpoint.initial_load_path == "s3://bucket/recipes/two/first/checkpoint/step-6"
    files = ["metrics.jsonl", "model/config.json", "model/model.safetensors", "checkpoint/step-6/.metadata"]
    for name in files:
        (at("recipes/two/first") / name).write_text(name)
    (at("recipes/two/second") / "metrics.jsonl").write_text("unfinished")
    (at("recipes/two") / "summary.json").write_text("{}")
    fetch_finished(recipe, stages)
    found = {
        path.relative_to(tmp_path / "runs").as_posix() for path in (tmp_path / "runs").rglob("*") if path.is_file()
    }
    assert found == {"two/summary.json", *(f"two/first/{name}" for name in files[:3])}
    assert [stage.finished for stage in stages] == [True, False]

    (tmp_path / "two.toml").write_text(RECIPE.replace("s3://bucket", "https://host"))
    with pytest.raises(ConfigError, match="must be a folder on a store that can be written"):
        load_recipe(tmp_path / "two.toml", {})


def test_the_newest_checkpoint_of_a_run_folder_is_found_on_its_store(store, saved, tmp_path):
    saved("newest").save(3)
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "config.toml").write_text('[job]\nstore = "s3://bucket/newest"\n')
    assert complete_steps(run_store.checkpoints_of(tmp_path / "run")) == [3]
    assert run_store.checkpoints_of(tmp_path / "other") == tmp_path / "other" / "checkpoint"
