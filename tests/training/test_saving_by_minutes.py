"""Saves by minutes: whichever of steps and minutes comes first, at one step on all ranks, and without a trace in the training."""

import shutil

import pytest

from farsight.checkpoints.steps import complete_steps
from tests.running import ROOT, contents, forked, metrics, train
from tests.training.test_endings import BEHIND, PATCHED, TWO, patched
from tests.training.test_finetune_runs import config  # noqa: F401  a fixture

CLOCK = """
init_before = trainer.Trainer.__init__
def with_clock(self, *arguments, **options):
    init_before(self, *arguments, **options)
    # A minute a step; the other ranks' clocks are two hours fast, and faster.
    rank = int(os.environ.get("RANK", 0))
    self.checkpoints.clock = lambda: 60.0 * self.step * (1 + 9 * rank) + 7200 * rank
trainer.Trainer.__init__ = with_clock
"""
OPTIONS = ["--checkpoint.interval=100", "--checkpoint.keep_latest_k=0", "--metrics.log_freq=12"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The run that saves at its end alone."""
    folder = tmp_path_factory.mktemp("runs") / "plain"
    train(folder, *TWO, *OPTIONS, "--validation.no_enable", "--checkpoint.interval_minutes=0", ranks=2)
    assert complete_steps(folder / "checkpoint") == [12]
    return folder


@pytest.mark.parametrize(("figures_read", "saved"), [("at once", [4, 7, 10, 12]), ("a step later", [5, 9, 12])])
def test_all_ranks_save_where_the_first_ones_clock_says(tmp_path, plain, figures_read, saved):
    """Three minutes after step 1 is step 4, and three after that step 7; losses and weights are those of a run without."""
    patch = CLOCK + BEHIND * (figures_read == "a step later")
    minutes = [*OPTIONS, "--checkpoint.interval_minutes=3"]
    assert patched(tmp_path, patch, *minutes).returncode == 0
    folder = tmp_path / "run" / "checkpoint"
    assert complete_steps(folder) == saved

    shutil.rmtree(folder / "step-12")
    shutil.rmtree(tmp_path / "run" / "model")
    assert "resuming from" in patched(tmp_path, patch, *minutes).stderr
    once, again = (contents(run / "checkpoint" / "step-12") for run in (plain, tmp_path / "run"))
    assert all((once[name] == again[name]).all() for name in once if hasattr(once[name], "shape"))
    assert [row["loss"] for row in metrics(tmp_path / "run")] == [row["loss"] for row in metrics(plain)]


def test_whichever_comes_first(start_run):
    """An interval of 4 steps and one of 5 minutes: clocks go one minute a step, and from step 10 on three."""
    manager, now = (run := start_run(interval=4, interval_minutes=5.0, keep_latest_k=0)).manager, 0.0
    manager.clock = lambda: now
    saved = []
    for step in range(1, 17):
        now += 60 if step < 10 else 180
        manager.overdue = manager.minutes_passed()
        if manager.due(step):
            run.save(step)
            saved.append(step)
    assert saved == [4, 8, 11, 12, 14, 16]  # 8 was at minute 8, 11 is at 15
    assert complete_steps(run.folder) == saved


@pytest.mark.parametrize("off", [{"interval_minutes": 0.0}, {"enable": False}, {"load_only": True}])
def test_minutes_can_be_turned_off(start_run, off):
    manager = start_run(interval=100, **off).manager
    manager.clock = iter(range(0, 10**9, 10**7)).__next__
    due = []
    for step in range(1, 9):
        manager.overdue = manager.minutes_passed()
        due.append(manager.due(step))
    assert not any(due)


def test_the_time_that_a_save_takes_does_not_count(start_run):
    """A save that takes longer than the interval is not followed by another at once."""
    run = start_run(interval=100, interval_minutes=5.0)
    manager, now = run.manager, [0.0]
    manager.clock, write = (lambda: now[0]), manager._write

    def slow(step, in_background):
        write(step, in_background)
        now[0] += 3600

    manager._write = slow
    assert not manager.minutes_passed()
    now[0] = 300.0
    manager.overdue = manager.minutes_passed()
    assert manager.due(6)
    run.save(6)
    assert not manager.due(7)
    assert not manager.minutes_passed()


def test_fine_tuning_saves_by_minutes(tmp_path, config):  # noqa: F811
    script = tmp_path / "patched.py"
    script.write_text(PATCHED.format(root=str(ROOT), patch=CLOCK))
    arguments = ["finetune", "--job.config_file", str(config), "--job.dump_folder", str(tmp_path / "run")]
    options = [*OPTIONS, "--checkpoint.interval_minutes=2", "--base_model.quantization=none"]
    done = forked([*arguments, *options], tmp_path / "printed", script=str(script))
    assert done.returncode == 0, done.stderr
    assert complete_steps(tmp_path / "run" / "checkpoint") == [3, 5, 6]
