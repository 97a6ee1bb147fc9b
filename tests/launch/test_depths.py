"""The depth sweep's recipes, and loss curves against the runs' own files."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from farsight.analysis.loss_curves.__main__ import main as loss_curves
from farsight.configs.shipped import shipped_configs
from farsight.launch.depth_sweep import depth_sweep
from farsight.launch.depth_sweep.__main__ import main
from farsight.training.stages import load_recipe
from tests.reports.test_report import write_run

CONFIGS = shipped_configs()


def test_a_sweep_changes_the_depth_alone(tmp_path, capsys):
    """Each printed command is that of a recipe whose stages equal the given one's but for their layers and folder."""
    given = [str(CONFIGS[f"probe_{name}"]) for name in ("scope", "rope")]
    out = tmp_path / "sweep"
    main([*given, "--depths", "4", "2", "--out", str(out), "--nproc", "3", "--dry-run", "--optimizer.lr", "0.001"])
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [command[1:4] for command in commands] == [["-m", "farsight", "recipe"]] * 4
    assert [command[5:] for command in commands] == [["--nproc", "3", "--optimizer.lr", "0.001"]] * 4
    for command, (recipe, depth) in zip(commands, [(r, d) for r in given for d in (2, 4)], strict=True):
        (plain,), (swept,) = (load_recipe(Path(path), {})[1] for path in (recipe, command[4]))
        assert swept.config.architecture.n_layers == depth
        assert swept.folder.parent == out / f"{Path(recipe).stem}_{depth}"
        swept.config.architecture = plain.config.architecture
        swept.config.job = plain.config.job
        assert swept.config == plain.config


def test_a_sweep_runs_what_is_printed_and_stops_where_one_fails(tmp_path, monkeypatch):
    ran = []

    def fake(command):
        ran.append(command)
        return len(ran) - 1

    monkeypatch.setattr(depth_sweep, "run_child", fake)
    with pytest.raises(SystemExit, match="probe_rope_4 ended with status 1"):
        main([str(CONFIGS["probe_rope"]), "--depths", "2", "4", "8", "--out", str(tmp_path)])
    assert ran == [[sys.executable, "-m", "farsight", "recipe", str(tmp_path / f"probe_rope_{n}.toml")] for n in (2, 4)]


def test_a_depth_that_something_else_sets_is_refused(tmp_path):
    arguments = [str(CONFIGS["probe_rope"]), "--depths", "2", "--out", str(tmp_path), "--dry-run"]
    with pytest.raises(SystemExit, match="3 layers, but the sweep sets 2"):
        main([*arguments, "--architecture.n_layers", "3"])


def test_recipes_of_one_name_are_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(CONFIGS["probe_rope"])] * 2 + ["--depths", "2", "--out", str(tmp_path)])
    assert "share a folder" in capsys.readouterr().err


def test_loss_curves_are_those_of_the_runs(tmp_path, capsys):
    losses = [4.0, 3.0, 2.5, 2.25, 2.0]
    write_run(tmp_path / "a", losses)
    write_run(tmp_path / "b", losses[::-1])
    files = ["--json", str(tmp_path / "f.json"), "--picture", str(tmp_path / "f.png")]
    loss_curves([str(tmp_path / "a"), str(tmp_path / "b"), *files])
    found = json.loads((tmp_path / "f.json").read_text())["models"]
    rows = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()[:-1]]
    assert found[str(tmp_path / "a")]["training"] == [[row["tokens"], row["loss"]] for row in rows if "loss" in row]
    assert (tmp_path / "f.png").stat().st_size > 10_000
    assert "2.0000" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="Nor is it a run folder"):
        loss_curves([str(tmp_path)])
