"""Checkpoints that are damaged, truncated, saved during training, or failed to save."""

import multiprocessing
import os
import random
import re
import resource
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from farsight.benchmarks.kills import Kill, Training, join, kill_and_resume, output, rows, train_undisturbed
from farsight.benchmarks.kills import weights as weight_bytes
from farsight.checkpoints import upkeep
from farsight.checkpoints.cards.model import read_history
from farsight.checkpoints.convert.to_hf import checkpoint_to_model_dir
from farsight.checkpoints.dcp import Writer
from farsight.checkpoints.model_dir.api import check_tensors, read_config
from farsight.checkpoints.steps import complete_steps
from farsight.errors import ConfigError, SaveError
from tests.checkpoints.test_intact import cut, flip
from tests.running import contents, forked, metrics, run, train_command


def test_a_truncated_model_directory_names_the_file(whole):
    _, copy = whole.copy("model_dir")
    cut(copy / "model" / "model.safetensors", 1000)
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged \(1,000 bytes\)"):
        check_tensors(copy / "model", read_config(copy / "model"))
    cut(copy / "model" / "model.safetensors", 0)
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged \(0 bytes\)"):
        check_tensors(copy / "model", read_config(copy / "model"))


# ── The manager, in this process ──────────────────────────────────────────────────────────────────────


def test_the_newest_intact_one_is_used_and_the_others_are_kept(start_run, caplog):
    saved = start_run(keep_latest_k=0)
    for step in (3, 6, 9, 12):
        saved.save(step)
    size = saved.shard(12).stat().st_size
    cut(saved.shard(12), size - 7)
    (saved.folder / "step-9" / "farsight.json").unlink()
    with pytest.raises(ConfigError, match="no intact checkpoint of step 12"):
        start_run().load(step=12)
    assert complete_steps(saved.folder) == [3, 6, 9, 12]

    again = start_run(keep_latest_k=2)
    assert again.load() == 6
    assert f"__0_0.distcp has {size - 7:,} bytes, {size:,} expected" in caplog.text
    assert "farsight.json is missing" in caplog.text
    assert (again.folder / "damaged-12" / "__0_0.distcp").stat().st_size == size - 7
    # The same steps are saved again; checkpoints that were set aside neither count nor get deleted.
    again.save(9)
    again.save(12, last_step=True)
    again.manager.close()
    assert sorted(p.name for p in again.folder.iterdir()) == ["damaged-12", "damaged-9", "step-12", "step-9"]
    cut(again.shard(12), 0)
    assert start_run().load() == 9
    assert (again.folder / "damaged-12.2").is_dir()


def test_without_an_intact_one_no_run_begins(start_run):
    saved = start_run()
    saved.save(3)
    saved.save(6)
    saved.shard(3).unlink()
    cut(saved.folder / "step-6" / ".metadata", 100)
    for _ in range(2):  # reporting it changes nothing
        with pytest.raises(ConfigError, match="no intact checkpoint") as error:
            start_run().load()
        assert "__0_0.distcp is missing" in str(error.value)
        assert ".metadata has 100 bytes" in str(error.value)
    shutil.rmtree(saved.folder / "step-3")
    (saved.folder / "step-6").rename(saved.folder / "damaged-6")
    with pytest.raises(ConfigError, match="damaged-6"):
        start_run().load()


@pytest.mark.parametrize("name", [".metadata", "farsight.json", "__0_0.distcp"])
def test_a_read_error_changes_nothing(start_run, unreadable, name):
    saved = start_run()
    saved.save(3)
    saved.save(6)
    (saved.folder / "step-7").mkdir()
    unreadable(saved.folder / "step-6" / name, OSError(5, "Input/output error"))
    with pytest.raises(ConfigError, match=r"can't be read \(.*Input/output error.*\); nothing was changed"):
        start_run().load()
    assert sorted(p.name for p in saved.folder.iterdir()) == ["step-3", "step-6", "step-7"]
    with pytest.raises(ConfigError, match=r"step-6 can't be read"):
        start_run(folder="another", initial_load_path=str(saved.folder / "step-6")).load()


def test_a_step_to_load_where_there_is_none_is_refused(start_run):
    with pytest.raises(ConfigError, match=r"checkpoint\.load_step = 500: .*/checkpoint holds no checkpoint\."):
        start_run().load(step=500)


@pytest.mark.parametrize("saved_before", [False, True])
def test_where_to_start_is_rank_zero_s_decision(start_run, monkeypatch, saved_before):
    """Another rank may still see a folder that rank 0 removed, or not yet see a new one."""
    other, saved = start_run(folder="other"), start_run()
    other.save(3)
    if saved_before:
        saved.save(6)
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: exists(path) != (str(path) == str(saved.folder)))
    assert start_run(initial_load_path=str(other.folder / "step-3")).load() == (6 if saved_before else 3)
    if not saved_before:
        assert start_run().manager.load() is False


def test_weights_alone_are_no_start_for_an_optimizer(start_run, tmp_path):
    with pytest.raises(ConfigError, match="a model directory holds weights alone"):
        start_run(initial_load_path=str(tmp_path), initial_load_model_only=False).load()


def test_a_damaged_start_is_refused(start_run, tmp_path):
    saved = start_run()
    saved.save(3)
    other = shutil.copytree(saved.folder / "step-3", tmp_path / "other")
    cut(other / "__0_0.distcp", 100)
    with pytest.raises(ConfigError, match=r"__0_0\.distcp has 100 bytes, [\d,]+ expected"):
        start_run(folder="another", initial_load_path=str(other)).load()
    with pytest.raises(ConfigError, match=r"__0_0\.distcp has 100 bytes"):
        checkpoint_to_model_dir(other, tmp_path / "out")
    (other / ".metadata").unlink()
    with pytest.raises(ConfigError, match=r"\.metadata is missing"):
        start_run(folder="another", initial_load_path=str(other)).load()


@pytest.fixture
def gate(monkeypatch):
    """Writers wait until it is open."""
    event, write = threading.Event(), FileSystemWriter.write_data
    event.set()

    def write_data(self, *arguments):
        assert event.wait(60)
        return write(self, *arguments)

    monkeypatch.setattr(FileSystemWriter, "write_data", write_data)
    yield event
    event.set()


def test_training_goes_on_while_the_state_of_the_step_is_saved(start_run, gate):
    saved = start_run(async_mode="async", keep_latest_k=2)
    saved.save(3)
    saved.save(6)
    saved.manager.save_future.result()
    gate.clear()
    saved.save(9)  # returns before anything is written
    assert complete_steps(saved.folder) == [3, 6]
    assert (saved.folder / "step-9" / "farsight.json").is_file()
    gate.set()
    saved.manager.finish()
    assert complete_steps(saved.folder) == [6, 9]  # step 3 is deleted when step 9 is complete and intact
    more = start_run(async_mode="async", keep_latest_k=2)
    more.save(12)
    more.save(13, last_step=True)
    assert complete_steps(saved.folder)[-2:] == [12, 13]  # the last save is complete when it returns
    more.manager.finish()
    assert sorted(p.name for p in saved.folder.iterdir()) == ["step-12", "step-13"]
    again = start_run()
    assert again.load() == 13
    shutil.rmtree(saved.folder / "step-13")
    assert again.load() == 12


def test_what_is_being_deleted_is_no_checkpoint_any_more(start_run, monkeypatch):
    """A kill during deletion leaves an interrupted save, not a damaged checkpoint."""
    begun, rmtree = [], shutil.rmtree

    def watched(path, **options):
        begun.append(sorted(p.name for p in (saved.folder / path).iterdir()))
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", watched)
    saved = start_run(keep_latest_k=2)
    for step in (3, 6, 9):
        saved.save(step)
    saved.manager.close()
    assert begun == [[".metadata.tmp", "__0_0.distcp", "farsight.json"]]
    assert complete_steps(saved.folder) == [6, 9]


def test_an_old_one_that_cannot_be_deleted_is_no_failed_save(start_run, monkeypatch, caplog):
    saved, rename = start_run(keep_latest_k=2), Path.rename

    def refuse(path, target):
        if path == saved.folder / "step-3" / ".metadata":
            raise PermissionError(13, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    for step in (3, 6, 9, 12):
        saved.save(step)
    saved.manager.close()
    assert complete_steps(saved.folder) == [3, 9, 12]
    assert f"{saved.folder / 'step-3'} can't be deleted ([Errno 13] Permission denied); it is kept." in caplog.text
    assert start_run().load() == 12


@pytest.fixture
def full_disk():
    """While full, files can't exceed 200 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda full: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000 if full else before[0], before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_save_that_fails_is_reported_and_leaves_the_one_before(start_run, full_disk, caplog, mode):
    saved = start_run(async_mode=mode)
    saved.save(3)
    saved.manager.finish()
    full_disk(True)
    if mode == "async":
        saved.save(6)
        deadline = time.monotonic() + 60
        while "step 6 could not be saved" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)  # reported when it fails, not when the next save is due
        assert "step 6 could not be saved" in caplog.text
        assert "GiB free there; a quota may allow less" in caplog.text
        assert complete_steps(saved.folder) == [3]
    with pytest.raises(SaveError, match=r"step 9 could not be saved in .*rank 0: .*newest complete .* step 3"):
        saved.save(9)
    full_disk(False)
    assert [p.name for p in saved.folder.iterdir()] == ["step-3"]  # deleting the rest made room
    saved.save(12)
    saved.manager.close()
    assert complete_steps(saved.folder) == [3, 12]


def test_after_an_asynchronous_save_that_failed_the_next_is_waited_for(start_run, full_disk, gate):
    saved = start_run(async_mode="async")
    full_disk(True)
    saved.save(3)
    assert saved.manager.save_future.exception() is not None
    full_disk(False)
    saved.save(6)
    assert complete_steps(saved.folder) == [6]
    assert start_run().load() == 6


# ── Verifying what was saved ──────────────────────────────────────────────────────────────────────────


@pytest.fixture
def after_saving(monkeypatch):
    """Has something done to a step's shard when its save is complete, before it is verified."""
    finish, todo = Writer.finish, {}

    def finish_and_do(self, **results):
        finish(self, **results)
        if (then := todo.get(self.folder.name)) is not None:
            then(self.folder / "__0_0.distcp")

    monkeypatch.setattr(Writer, "finish", finish_and_do)
    return lambda step, then: todo.__setitem__(f"step-{step}", then)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_no_older_one_is_deleted_for_a_damaged_one(start_run, after_saving, caplog, mode):
    after_saving(9, lambda shard: flip(shard, 700_000))
    saved = start_run(async_mode=mode, keep_latest_k=2)
    for step in (3, 6, 9):
        saved.save(step)
    with pytest.raises(SaveError, match=r"last checkpoint in .* was damaged while it was saved"):
        saved.manager.finish()
    assert complete_steps(saved.folder) == [3, 6]
    size = (saved.folder / "damaged-9" / "__0_0.distcp").stat().st_size
    assert f"step-9: __0_0.distcp was altered between bytes 0 and {size:,}" in caplog.text
    saved.save(12)
    saved.save(15, last_step=True)
    saved.manager.finish()
    assert sorted(path.name for path in saved.folder.iterdir()) == ["damaged-9", "step-12", "step-15"]
    assert start_run().load() == 15


def test_without_verify_nothing_is_read_back(start_run, after_saving):
    after_saving(9, lambda shard: flip(shard, 700_000))
    saved = start_run(verify=False, keep_latest_k=2)
    for step in (3, 6, 9):
        saved.save(step)
    saved.manager.finish()
    assert complete_steps(saved.folder) == [6, 9]


def test_what_cannot_be_read_back_counts_for_nothing(start_run, after_saving, unreadable, caplog):
    after_saving(9, lambda shard: unreadable(shard, OSError(5, "Input/output error")))
    saved = start_run(keep_latest_k=2)
    for step in (3, 6, 9):
        saved.save(step)
    assert complete_steps(saved.folder) == [3, 6, 9]
    assert "step-9 can't be verified (OSError(5, 'Input/output error')); no older checkpoint is deleted" in caplog.text
    with pytest.raises(SaveError, match="can't be read back"):
        saved.manager.finish()
    saved.save(12)
    assert complete_steps(saved.folder) == [9, 12]


def test_the_end_of_a_run_does_not_wait_for_it(start_run, monkeypatch):
    """A run that was told to stop has little time, and the next one verifies what it resumes from."""
    saved, find, nice = start_run(keep_latest_k=2, async_mode="async"), upkeep.fault, []

    def slow(*block):
        nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        assert saved.manager.upkeep.closing.wait(60)
        return find(*block)

    for step in (3, 6, 9):
        saved.save(step)
        if step == 6:
            saved.manager.finish()
            monkeypatch.setattr(upkeep, "fault", slow)
    saved.manager.close()
    assert complete_steps(saved.folder) == [3, 6, 9]  # step 9 is not known to be intact
    assert set(nice) <= {19}
    assert os.getpriority(os.PRIO_PROCESS, 0) < 19


def test_files_are_read_back_from_the_disk(start_run, monkeypatch):
    dropped, drop = [], os.posix_fadvise
    saved = start_run()

    def spy(file, *span):
        dropped.append((os.readlink(f"/proc/self/fd/{file}"), *span))
        drop(file, *span)

    monkeypatch.setattr(os, "posix_fadvise", spy)
    saved.save(3)
    files = {str(path) for path in (saved.folder / "step-3").iterdir()}
    assert {*dropped} == {(name, 0, 0, os.POSIX_FADV_DONTNEED) for name in files}


# ── Whole runs ────────────────────────────────────────────────────────────────────────────────────────


class Whole:
    """An uninterrupted run, to compare others with."""

    def __init__(self, folder):
        self.training = Training(folder, steps=24, interval=4)
        self.run = train_undisturbed(self.training)
        self.folder = folder / "undisturbed"

    def copy(self, name):
        return name, shutil.copytree(self.folder, self.training.folder / name)

    def resume(self, name):
        log = self.training.folder / f"{name}.log"
        return [*join(self.training.start(name, log))], output(log)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return Whole(tmp_path_factory.mktemp("whole"))


def test_a_run_whose_newest_checkpoint_is_damaged_ends_with_the_same_weights(whole):
    name, copy = whole.copy("damaged")
    shutil.rmtree(copy / "model")
    shard = copy / "checkpoint" / "step-24" / "__0_0.distcp"
    size = shard.stat().st_size
    cut(shard, size // 2)
    statuses, printed = whole.resume(name)
    assert statuses == [0]
    assert f"__0_0.distcp has {size // 2:,} bytes, {size:,} expected" in printed
    assert f"resuming from {copy / 'checkpoint' / 'step-20'}" in printed
    assert rows(copy) == whole.run.rows
    assert weight_bytes(copy) == whole.run.weights
    assert sorted(p.name for p in (copy / "checkpoint").iterdir()) == ["damaged-24", "step-20", "step-24"]


@pytest.mark.parametrize(
    ("aims", "asynchronous"),
    [(["start-up", "saving", "training"], False), (["saving"], True), (["export"], False)],
    ids=["three-times", "while-saving-async", "exporting"],
)
def test_killed_and_resumed_ends_with_the_same_weights(whole, aims, asynchronous):
    training = Training(whole.training.folder, steps=24, interval=4, asynchronous=asynchronous)
    name = "-".join(["killed", *aims])
    outcome = kill_and_resume(training, name, whole.run, aims, random.Random(0))
    assert outcome.wrong == []
    assert len(outcome.kills) == len(aims)
    folder = training.folder / name
    # Steps that ran twice are logged once.
    assert [row["step"] for row in metrics(folder)] == list(range(1, 25))
    (history,) = read_history(folder / "model")  # one entry, although it was started several times
    assert (history["name"], history["start"], history["steps"]) == (name, "random weights", 24)
    assert history["tokens"] == 24 * 2 * 32


def test_a_run_that_was_done_before_its_kill_is_aimed_at_again(whole):
    """Resumes from the step before the last save, which is not where the earlier run was killed."""
    name, copy = whole.copy("too-late")

    last, starts = copy / "checkpoint" / "step-24", []

    class Scripted(Training):
        def start(self, name, log):
            assert not last.exists()
            log.mkdir(exist_ok=True)
            (log / "0.err").write_text(f"resuming from {last.with_name('step-20')}\nstep 23/24  loss 1.0\n")
            starts.append(log)
            if len(starts) == 1:
                shutil.copytree(whole.folder / "checkpoint" / "step-24", last)
            rank = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60 * (len(starts) == 2),))
            rank.start()
            return SimpleNamespace(processes=[rank])

    training = Scripted(whole.training.folder, steps=24, interval=4)
    outcome = kill_and_resume(training, name, whole.run, ["training"], random.Random(0))
    assert outcome.wrong == []
    assert outcome.kills == [Kill("training", reached=23, resumed=20)]
    assert len(starts) == 3


def test_fsdp_saves_the_step_s_state_asynchronously(whole):
    """Compares weights, moments, schedule and order of data with those of one process that saved synchronously."""
    training = Training(whole.training.folder, steps=24, interval=4, ranks=2, asynchronous=True)
    log = training.folder / "fsdp.log"
    assert join(training.start("fsdp", log)) == {0}, output(log)
    for step in (20, 24):  # an asynchronous save and the last one
        one, two = (contents(training.folder / n / "checkpoint" / f"step-{step}") for n in ("undisturbed", "fsdp"))
        assert one.keys() == two.keys()
        for name, value in one.items():
            if isinstance(value, torch.Tensor):
                # Another order of summation gives 1e-6; four steps further, every tensor differs by at least 7e-4.
                assert torch.linalg.vector_norm(two[name] - value) <= 1e-5 * torch.linalg.vector_norm(value), name
            else:
                assert two[name] == value, name


def test_saving_and_loading_may_outlast_the_timeouts(tmp_path):
    """Periodic, asynchronous and last saves, and a load, in which one rank takes longer than a collective may."""
    options = ["--comm.init_timeout_seconds=3", "--comm.train_timeout_seconds=3", "--validation.no_enable"]
    command = train_command(tmp_path / "run", "--training.local_batch_size=2", "--checkpoint.interval=2", *options)[2:]
    for mode, steps in (("disabled", 3), ("async", 5)):
        more = [f"--checkpoint.async_mode={mode}", f"--training.steps={steps}"]
        done = forked(["slow", *command, *more], tmp_path / mode, ranks=2, script="tests/checkpoints/bad_disk.py")
        assert done.returncode == 0, done.stderr
        assert f"step {steps}/{steps}" in done.stderr
        assert complete_steps(tmp_path / "run" / "checkpoint") == [2 * (steps // 2), steps]
        assert ("resuming from" in done.stderr) == (mode == "async")


def test_a_file_that_another_rank_s_disk_damaged_is_named_at_once(tmp_path):
    """By the rank that wrote it; rank 0 sets the checkpoint aside, and the run goes on."""
    options = ["--training.local_batch_size=2", "--training.steps=8", "--checkpoint.interval=2"]
    command = train_command(tmp_path / "run", "--validation.no_enable", *options)[2:]
    done = forked(["lossy", *command], tmp_path / "printed", ranks=2, script="tests/checkpoints/bad_disk.py")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run" / "checkpoint"
    assert re.search(rf"^\[rank 1\] {folder}/step-4: __1_0.distcp has 1,000 bytes, [\d,]+ expected$", done.stderr, re.M)
    assert "step-4 was damaged while it was saved. It is kept as damaged-4" in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["damaged-4", "step-6", "step-8"]


def test_a_full_disk_ends_the_run_with_four(tmp_path):
    command = train_command(tmp_path / "run", "--checkpoint.async_mode", "async", "--validation.no_enable")
    done = run(["sh", "-c", 'ulimit -f 400; exec "$@"', "sh", *command], check=False)
    assert done.returncode == 4, done.stderr
    assert "step 3 could not be saved" in done.stderr
    assert "step 6 could not be saved" in done.stderr
    assert "Traceback" not in done.stderr
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
