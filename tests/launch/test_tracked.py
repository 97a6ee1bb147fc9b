"""A recipe in trackers: its stages share a group, and each gets the summary and the loss curves."""

import json
import sys

import pytest

from farsight.configs.load import load_config
from farsight.configs.shipped import shipped_configs
from farsight.launch.plan.plan import make_plan
from farsight.launch.recipe.gpus import machine_of
from farsight.launch.recipe.tracked import summary_rows, track_summary
from farsight.launch.tracked import plan_figures
from farsight.training.trackers.tracker import read_ids
from tests.running import TINY, run
from tests.training.test_trackers import in_mlflow, in_trackio, in_wandb, mlflow_client, wandb_records

RECIPE = (
    TINY.replace("steps = 12", "steps = 3")
    + """
trackers = ["wandb", "mlflow", "trackio"]

[recipe]
name = "two"
perplexity_lengths = [1]

[[stages]]
name = "short"

[[stages]]
name = "long"
training = { seq_len = 128 }
"""
)


@pytest.mark.slow
def test_stages_are_in_one_group_with_the_summary(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_X_DISABLE_STATS", "true")
    (tmp_path / "two.toml").write_text(RECIPE)
    command = [sys.executable, "-m", "farsight", "recipe", str(tmp_path / "two.toml"), "--recipe.folder", str(tmp_path)]
    run(command)
    root = tmp_path / "two"
    stages = json.loads((root / "summary.json").read_text())["stages"]
    given = [figures(root, root / stage["name"], monkeypatch) for stage in stages]
    for stage, each in zip(stages, given, strict=True):
        ((length, value),) = stage["perplexity"].items()
        for name, found in each.items():
            assert found[f"summary/perplexity.{length}", 3] == value, name
            assert len([key for key in found if key[0] == "train/loss"]) == 3, name

    client, (parent,) = mlflow_client(root, monkeypatch), {*read_ids(root).values()}
    for number, stage in enumerate(stages):
        own = read_ids(root / stage["name"])["mlflow"]
        run_there = client.get_run(own)
        assert run_there.data.tags["mlflow.parentRunId"] == parent
        assert run_there.info.run_name == f"two-{stage['name']}"
        paths = {file.path for file in client.list_artifacts(own)}
        assert paths == {"config.toml", "positions.png", "loss.png", "stages.md"}
        table = (root / "mlruns").glob(f"*/{own}/artifacts/stages.md")
        assert len(next(table).read_text().splitlines()) == 3 + number  # a head of two lines, and the stages so far
    starts = [
        record.run
        for file in (root / "wandb").glob("*/*.wandb")
        for record in wandb_records(file)
        if record.WhichOneof("record_type") == "run"
    ]
    assert {start.run_group for start in starts} == {"two"}
    assert {start.run_id for start in starts} == {read_ids(root / stage["name"])["wandb"] for stage in stages}

    for stage in stages:  # as when the recipe is run again
        track_summary(root / stage["name"], root)
    assert [figures(root, root / stage["name"], monkeypatch) for stage in stages] == given  # not told again


def figures(root, stage, monkeypatch):
    """A stage's figures in each tracker."""
    ids = read_ids(stage)
    return {
        "wandb": dict(in_wandb(root, ids["wandb"])),
        "mlflow": dict(in_mlflow(root, monkeypatch, ids["mlflow"])),
        "trackio": dict(in_trackio(root, ids["trackio"])),
    }


def test_nothing_is_written_without_trackers(tmp_path):
    (tmp_path / "config.toml").write_text("[metrics]\ntrackers = []\n")
    track_summary(tmp_path, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_the_table_has_a_column_for_each_length():
    entries = [
        {"name": "a", "steps": 5, "train_loss": [3, 2], "val_loss": [], "tokens_per_second": 9.7, "perplexity": {"64": 8.0}},
        {"name": "b", "steps": 6, "train_loss": [2, 1], "val_loss": [4, 3], "tokens_per_second": 1, "perplexity": {"128": 7.0}},
    ]  # fmt: skip
    columns, rows = summary_rows(entries)
    assert columns[-2:] == ["perplexity at 64", "perplexity at 128"]
    assert rows == [["a", 5, 2, "", 10, 8.0, ""], ["b", 6, 1, 3, 1, "", 7.0]]


def test_the_plans_figures_are_those_of_farsight_plan():
    config = load_config(["--job.config_file", str(shipped_configs()["tiny"]), "--training.global_batch_size", "8"])
    figures = plan_figures(config, 1)
    machine = machine_of("h100-80g")
    assert machine is not None
    planned = make_plan("tiny", config, 1, machine)
    assert figures["parameters"] == planned.parameters == figures["trained_parameters"]
    assert figures["flops_per_token"] == planned.flops_per_token
    assert figures["tokens_per_step"] == 8 * config.training.seq_len
