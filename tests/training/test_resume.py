"""Resuming: damaged checkpoints, foreign files, non-finite weights, changed settings."""

import json
import math
import shutil

import pytest
import torch

from farsight.checkpoints.steps import complete_steps
from farsight.errors import ConfigError, NonFiniteError
from tests.checkpoints.test_intact import flip
from tests.running import metrics, train

# ── Damage ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "farsight.json", "checksums.json"])
def test_an_altered_byte_sets_a_checkpoint_aside(start_run, caplog, name):
    saved = start_run()
    saved.save(3)
    saved.save(6)
    path = saved.folder / "step-6" / name
    flip(path, path.stat().st_size // 2)
    again = start_run()
    assert again.load() == 3
    assert f"step-6 is damaged: {name} was altered" in caplog.text
    assert "It is kept as damaged-6; step 3 is used." in caplog.text
    assert sorted(p.name for p in again.folder.iterdir()) == ["damaged-6", "step-3"]


@pytest.mark.parametrize("text", ["[]", "{}", '"farsight"', "{"])
@pytest.mark.parametrize("checksums", [True, False])
def test_a_config_that_is_none_sets_a_checkpoint_aside(start_run, caplog, text, checksums):
    saved = start_run()
    saved.save(3)
    saved.save(6)
    (saved.folder / "step-6" / "farsight.json").write_text(text)
    if not checksums:
        (saved.folder / "step-6" / "checksums.json").unlink()
    assert start_run().load() == 3
    assert "step-6 is damaged: farsight.json" in caplog.text


def test_verification_can_be_turned_off(start_run):
    saved = start_run()
    saved.save(3)
    shard = saved.folder / "step-3" / "__0_0.distcp"
    flip(shard, shard.read_bytes().find(saved.model.weight.new_full((4,), 3.0).numpy().tobytes()))
    with pytest.raises(ConfigError, match=r"no intact checkpoint.*\n.*__0_0\.distcp was altered between bytes 0 and"):
        start_run().load()
    start_run(verify=False).manager.load()
    with pytest.raises(ConfigError, match=r"checkpoint\.initial_load_path = .* is damaged: __0_0\.distcp was altered"):
        start_run(folder="other", initial_load_path=str(saved.folder / "step-3")).load()


def test_a_checkpoint_of_an_earlier_version_is_used(start_run):
    saved = start_run()
    saved.save(3)
    (saved.folder / "step-3" / "checksums.json").unlink()
    path = saved.folder / "step-3" / "farsight.json"
    values = json.loads(path.read_text())
    del values["checksums"], values["job"]
    path.write_text(json.dumps(values))
    assert start_run().load() == 3


def test_ranks_verify_together_and_fall_back_together(tmp_path):
    """A damaged byte in rank 1's file, then settings that every rank refuses. Neither hangs."""
    options = ["--training.local_batch_size=2", "--validation.no_enable"]
    train(tmp_path / "run", *options, "--training.steps=6", ranks=2)
    shard = tmp_path / "run" / "checkpoint" / "step-6" / "__1_0.distcp"
    flip(shard, shard.stat().st_size // 2)
    done = train(tmp_path / "run", *options, "--training.steps=6", ranks=2)
    assert "__1_0.distcp was altered between bytes 0 and" in done.stderr
    assert "resuming from" in done.stderr
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    done = train(tmp_path / "run", *options, "--training.steps=7", "--optimizer.beta1=0.5", ranks=2, check=False)
    assert done.returncode == 2
    assert "optimizer.beta1 = 0.9 there, 0.5 here" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_checkpoint_that_lost_its_list_is_kept(start_run, caplog):
    saved = start_run()
    saved.save(3)
    saved.save(6)
    (saved.folder / "step-6" / ".metadata").unlink()
    assert start_run().load() == 3
    assert "step-6 was saved to its end and has lost .metadata since. It is kept as damaged-6." in caplog.text
    assert sorted(p.name for p in saved.folder.iterdir()) == ["damaged-6", "step-3"]
    shutil.rmtree(saved.folder / "step-3")
    with pytest.raises(ConfigError, match=r"no intact checkpoint.*\n  damaged-6"):
        start_run().load()


# ── Others' files ─────────────────────────────────────────────────────────────────────────────────────


def test_only_what_a_save_left_is_removed(start_run, caplog):
    caplog.set_level("INFO", "farsight")
    saved = start_run()
    saved.save(6)
    left = saved.folder / "step-9"
    shutil.copytree(saved.folder / "step-6", left)
    (left / ".metadata").rename(left / ".metadata.tmp")
    mine = shutil.copytree(left, saved.folder / "step-12")
    (mine / "notes.txt").write_text("mine")
    for name in ("step-6-hf", "step-4-notes", "step-", "step-x", "step-08", "notes"):
        (saved.folder / name).mkdir()
        (saved.folder / name / "model.safetensors").write_text("mine")
    (saved.folder / "step-7").write_text("mine")
    (saved.folder / "step-15").symlink_to(mine)
    before = {p.name for p in saved.folder.iterdir()}
    assert start_run().load() == 6
    assert before - {p.name for p in saved.folder.iterdir()} == {"step-9"}
    assert f"{left} is removed: its save was interrupted." in caplog.text
    assert f"{mine} is not deleted: Farsight did not write all that is in it (notes.txt)." in caplog.text
    assert len(list(mine.iterdir())) == 5


@pytest.mark.parametrize("name", ["step-6-hf", "step-7"])
def test_others_files_alone_stop_no_start(start_run, name):
    run = start_run()
    run.folder.mkdir(parents=True)
    (run.folder / name).write_text("mine")
    assert run.manager.load() is False
    run.save(3)
    assert start_run().load() == 3


def test_old_checkpoints_with_others_files_are_kept(start_run, caplog):
    saved = start_run(keep_latest_k=2)
    saved.save(3)
    (saved.folder / "step-3" / "hf").mkdir()
    for step in (6, 9, 12):
        saved.save(step)
    saved.manager.close()
    assert complete_steps(saved.folder) == [3, 9, 12]
    assert "step-3 is not deleted: Farsight did not write all that is in it (hf)." in caplog.text
    assert start_run().load() == 12


def test_a_failed_save_deletes_nothing_of_others(start_run, monkeypatch):
    saved = start_run()
    saved.save(3)
    (saved.folder / "step-6").mkdir()
    (saved.folder / "step-6" / "notes.txt").write_text("mine")
    monkeypatch.setattr(
        "farsight.checkpoints.dcp.write_manifest", lambda *_: (_ for _ in ()).throw(OSError(28, "No space"))
    )
    for step in (6, 9):
        with pytest.raises(Exception, match="could not be saved"):
            saved.save(step)
    assert (saved.folder / "step-6" / "notes.txt").read_text() == "mine"
    assert not (saved.folder / "step-9").exists()
    assert complete_steps(saved.folder) == [3]


# ── Weights that are not finite ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_not_saved(start_run, value):
    saved = start_run(keep_latest_k=2)
    saved.save(3)
    torch.nn.init.constant_(saved.model.weight, 6.0)
    saved.model.weight.data[511, 17] = value
    with pytest.raises(NonFiniteError, match=r"step 6 is not saved: weights are infinite or NaN \(weight\)"):
        saved.manager.save(6)
    assert [p.name for p in saved.folder.iterdir()] == ["step-3"]
    assert start_run().load() == 3
    saved.model.weight.data[511, 17] = 3e38
    saved.manager.save(6)
    assert complete_steps(saved.folder) == [3, 6]


@pytest.mark.parametrize(
    "layout",
    [["--parallelism.tensor_parallel_degree=2"], ["--training.local_batch_size=2"], ["--engine=deepspeed", "--training.local_batch_size=2"]],
    ids=["tp", "fsdp", "zero"],
)  # fmt: skip
def test_no_rank_saves_weights_that_are_not_finite(tmp_path, layout):
    """This weight decay makes weights infinite in one step."""
    wrong = ["--optimizer.lr=1e10", "--optimizer.weight_decay=1e30", "--checkpoint.interval=1"]
    done = train(tmp_path / "run", *layout, *wrong, "--validation.no_enable", ranks=2, check=False)
    assert done.returncode == 3
    assert "step 1 is not saved: weights are infinite or NaN (" in done.stderr
    assert complete_steps(tmp_path / "run" / "checkpoint") == []


# ── Other settings ────────────────────────────────────────────────────────────────────────────────────

OTHERS = {
    "theta": ({"position": {"rotary": {"theta": 500000.0}}}, "position.rotary.theta = 10000.0 there, 500000.0 here"),
    "rotary": ({"position": {"rotary": {"kind": "none"}}}, "position.rotary.kind = 'rope' there, 'none' here"),
    "scope": ({"position": {"heads": {"kind": "window", "window": 7}}}, "position.heads.window = not set there, 7 here"),
    "alibi": ({"position": {"bias": {"kind": "alibi"}}}, "position.bias.kind = 'none' there, 'alibi' here"),
    "lasp": ({"position": {"lasp": {"s_max": 2.0}}}, "position.lasp.s_max = not set there, 2.0 here"),
    "rules": (
        {"position": {"rules": [{"layers": "0", "rotary": {"kind": "none"}}]}},
        "position.rules.0.rotary.kind = not set there, 'none' here",
    ),
    "embedding": ({"position": {"embedding": "sinusoidal"}}, "position.embedding = 'none' there, 'sinusoidal' here"),
    "lr": ({"optimizer": {"lr": 0.5}}, "optimizer.lr = 0.0008 there, 0.5 here"),
    "beta": ({"optimizer": {"beta2": 0.5}}, "optimizer.beta2 = 0.95 there, 0.5 here"),
    "eps": ({"optimizer": {"eps": 0.5}}, "optimizer.eps = 1e-08 there, 0.5 here"),
    "decay": ({"optimizer": {"weight_decay": 0.5}}, "optimizer.weight_decay = 0.1 there, 0.5 here"),
    "schedule": ({"lr_scheduler": {"decay_type": "cosine"}}, "lr_scheduler.decay_type = 'linear' there, 'cosine' here"),
    "warm-up": ({"lr_scheduler": {"warmup_steps": 5}}, "lr_scheduler.warmup_steps = 200 there, 5 here"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_settings_are_refused_until_they_are_accepted(start_run, caplog, name):
    sections, says = OTHERS[name]
    kind = "position" if "position" in sections else "optimizer"
    start_run().save(3)
    for accepted in ([], [{"position": "optimizer", "optimizer": "position"}[kind]]):
        with pytest.raises(ConfigError) as error:
            start_run(sections=sections, accept_changes=accepted).load()
        assert f"\n  {says}\n" in str(error.value)
        assert f'checkpoint.accept_changes = ["{kind}"]' in str(error.value)
        assert "checkpoint.initial_load_path" in str(error.value)
    assert start_run(sections=sections, accept_changes=[kind]).load() == 3
    assert says in caplog.text
    # From its weights another run starts as it likes.
    fresh = start_run(sections=sections, folder="other", initial_load_path=str(start_run().folder / "step-3"))
    assert fresh.load() == 3


def test_another_optimizer_is_refused_in_any_case(start_run):
    saved = start_run()
    saved.save(3)
    other = {"sections": {"optimizer": {"kind": "adam"}}, "accept_changes": ["position", "optimizer"]}
    says = r"saved with optimizer\.kind = 'adamw', here it is 'adam'"
    with pytest.raises(ConfigError, match=says):
        start_run(**other).load()
    from_there = {"folder": "other", "initial_load_path": str(saved.folder / "step-3")}
    with pytest.raises(ConfigError, match=says):
        start_run(**other, **from_there, initial_load_model_only=False).load()
    assert start_run(**other, **from_there).load() == 3


def test_what_may_change_freely(start_run, caplog):
    start_run().save(3)
    free = {
        "training": {"steps": 777, "local_batch_size": 3, "max_norm": 0.5}, "metrics": {"log_freq": 3},
        "optimizer": {"implementation": "foreach"}, "validation": {"freq": 3}, "activation_checkpoint": {"mode": "full"},
        "parallelism": {"tensor_parallel_degree": 1}, "lr_scheduler": {"warmup_steps": 200}, "attention": {"backend": "reference"},
    }  # fmt: skip
    assert start_run(sections=free, interval=5, keep_latest_k=7).load() == 3
    assert "other settings" not in caplog.text
