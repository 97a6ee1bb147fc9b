"""Recipes: the shipped ones against their papers, and whole runs of their tiny twins."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from checkpoints.model_dir import load_model, read_model_config
from configs.load import ConfigError
from configs.schema import Alibi, Lasp, NoRotary, Position, Rope, Scope, SlidingWindow, YarnRope
from launch.recipe import load_recipe
from model.build import ModelConfig, count_parameters
from tests.running import ROOT, metrics, run

RECIPES = ROOT / "configs" / "recipes"


def test_scope_llama3_8b_is_table_5():
    _, stages = load_recipe(RECIPES / "scope_llama3_8b.toml", {})
    training = [stage.config.training for stage in stages]
    assert [t.seq_len for t in training] == [4096, 32768, 131072]
    assert [s.config.optimizer.lr for s in stages] == [3e-4, 3e-5, 1e-5]
    tokens = [t.global_batch_size * t.seq_len * t.steps for t in training]
    assert tokens[0] == pytest.approx(50e9, rel=1e-4)
    assert tokens[1] == pytest.approx(2e9, rel=1e-3)
    assert training[2].steps == 50
    batches = [t.global_batch_size * t.seq_len for t in training]
    assert batches == [pytest.approx(b, rel=0.05) for b in (500e3, 2e6, 4e6)]
    assert all(s.config.optimizer.name == "AdamW" and s.config.optimizer.weight_decay == 0.1 for s in stages)
    for stage in stages:
        config = ModelConfig.from_job(stage.config)
        assert isinstance(config.position.rotary, NoRotary)
        assert isinstance(config.position.heads, Scope)
        for layer in config.layers():
            assert max(layer.scopes) == stage.config.training.seq_len
        assert count_parameters(config) == 8_030_261_248


def test_its_data_is_table_4():
    _, stages = load_recipe(RECIPES / "scope_llama3_8b.toml", {})
    first, *extensions = [stage.config.data.sources for stage in stages]
    assert [(s.name, s.weight) for s in first] == [
        ("tiiuae/falcon-refinedweb", 0.7), ("allenai/c4", 0.2), ("bigcode/starcoderdata", 0.1),
    ]  # fmt: skip
    for sources in extensions:
        assert [s.weight for s in sources] == [0.3, 0.2, 0.1, 0.4]
        assert (sources[3].name, sources[3].min_tokens) == ("cerebras/SlimPajama-627B", 16384)


def test_scope_lasp_differs_in_rotation_alone():
    _, plain = load_recipe(RECIPES / "scope_llama3_8b.toml", {})
    _, lasp = load_recipe(RECIPES / "scope_lasp_llama3_8b.toml", {})
    for a, b in zip(plain, lasp, strict=True):
        assert a.config.training == b.config.training
        assert a.config.data == b.config.data
        assert a.config.position.heads == b.config.position.heads
    assert lasp[0].config.position.lasp is None
    for stage, s_max in zip(lasp[1:], (8.0, 32.0), strict=True):
        assert stage.config.position.lasp == Lasp(s_max=s_max)
        layers = ModelConfig.from_job(stage.config).layers()
        # Eq. 10 and 11 at layers 0, 4, 8 and 20 of 32, with 8 anchors.
        for layer, scale, base in [
            (0, 1, 5e5), (4, 1 + 4 * (s_max - 1) / 8, 5e5), (8, s_max, 5e5), (20, s_max, 5e5 + 12 * 1.5e6 / 24),
        ]:  # fmt: skip
            assert layers[layer].rotary == YarnRope(theta=base, factor=scale, original_length=4096)


def test_every_recipe_builds_and_has_a_tiny_twin():
    names = sorted(path.name for path in RECIPES.glob("*.toml"))
    assert names == sorted(p.name for p in (RECIPES / "tiny").glob("*.toml") if not p.name.startswith("shrink"))
    for name in names:
        for stage in load_recipe(RECIPES / name, {})[1]:
            assert count_parameters(ModelConfig.from_job(stage.config)) == 8_030_261_248
        for stage in load_recipe(RECIPES / "tiny" / name, {})[1]:
            assert count_parameters(ModelConfig.from_job(stage.config)) < 1e6


@pytest.mark.parametrize(
    ("name", "position"),
    [
        ("rope", Position(rotary=Rope(theta=10000.0))),
        ("nope", Position(rotary=NoRotary())),
        ("alibi", Position(rotary=NoRotary(), bias=Alibi())),
    ],
)
def test_scopes_baselines_differ_in_position_alone(name, position):
    _, scope = load_recipe(RECIPES / "scope_llama3_8b.toml", {})
    _, baseline = load_recipe(RECIPES / f"{name}_llama3_8b.toml", {})
    for ours, theirs in zip(scope, baseline, strict=True):
        assert theirs.config.position == position
        for section in ("training", "data", "optimizer", "lr_scheduler", "architecture"):
            assert getattr(ours.config, section) == getattr(theirs.config, section)


def test_the_window_baseline_goes_on_from_the_128k_rope_model():
    _, rope = load_recipe(RECIPES / "rope_llama3_8b.toml", {})
    recipe, (stage,) = load_recipe(RECIPES / "swa_llama3_8b.toml", {})
    assert recipe.start == str(rope[-1].model_dir)
    assert stage.config.position == Position(rotary=Rope(theta=10000.0), heads=SlidingWindow(window=8192))
    assert stage.config.data == rope[-1].config.data
    assert stage.config.training == rope[-1].config.training


def test_tiny_twins_of_the_baselines_train(tmp_path):
    for name in ("nope", "alibi", "rope", "swa"):
        text = f'base = "{RECIPES / "tiny" / name}_llama3_8b.toml"\n[recipe]\nfolder = "{tmp_path}"\n'
        if name == "swa":
            text += f'start = "{tmp_path}/rope_llama3_8b/adapt-128k/model"\n'
        recipe = tmp_path / f"{name}.toml"
        recipe.write_text(text + "perplexity_lengths = [1]\n")
        run([sys.executable, "-m", "launch.recipe", str(recipe), "--training.steps", "2"])
        summary = json.loads((tmp_path / f"{name}_llama3_8b" / "summary.json").read_text())
        assert all(stage["steps"] == 2 for stage in summary["stages"])
        assert read_model_config(Path(summary["model_dir"])).trained_length == 256
    start = f'initial_load_path = "{tmp_path}/rope_llama3_8b/adapt-128k/model"'
    assert start in (tmp_path / "swa_llama3_8b" / "window-8k" / "stage.toml").read_text()


@pytest.mark.parametrize("name", ["scope_llama3_8b", "scope_lasp_llama3_8b"])
def test_tiny_twin_runs_and_is_skipped_once_finished(name, tmp_path):
    recipe = tmp_path / f"{name}.toml"
    recipe.write_text(f'base = "{RECIPES / "tiny" / name}.toml"\n[recipe]\nfolder = "{tmp_path}"\n')
    command = [sys.executable, "-m", "launch.recipe", str(recipe)]
    done = run(command)
    root = tmp_path / name
    last = root / "adapt-128k" / "model"
    assert done.stdout.rstrip().endswith(f"model directory: {last}")
    summary = json.loads((root / "summary.json").read_text())
    assert summary["model_dir"] == str(last)
    assert [s["seq_len"] for s in summary["stages"]] == [64, 128, 256]
    for stage in summary["stages"]:
        assert list(stage["perplexity"]) == [str(m * stage["seq_len"]) for m in (1, 2, 4)]
        assert len(stage["train_loss"]) == len(stage["val_loss"]) == 2
        assert stage["tokens_per_second"] > 0
    assert (root / "loss.png").stat().st_size > 5000
    assert read_model_config(last).trained_length == 256
    model, config = load_model(last)
    assert max(model.layers["0"].attention.scopes_N.tolist()) == 256
    assert (config.position.lasp is not None) == ("lasp" in name)

    # A stage begins where the last one ended, and what is finished is not run again.
    names = ["pretrain-4k", "finetune-32k", "adapt-128k"]
    before = [metrics(root / n) for n in names]
    shutil.rmtree(root / names[2])
    again = run(command)
    assert again.stderr.count("is finished") == 2
    assert [[row["loss"] for row in metrics(root / n)] for n in names] == [[row["loss"] for row in b] for b in before]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[training]\nsteps = 3\n", "has no [[stages]]"),
        ('[[stages]]\noptimizer_state = "carry"\n', "first stage"),
        ('[[stages]]\noptimizer_state = "keep"\n', "'keep'"),
        ("[[stages]]\n[stages.training]\nseq_len = 'x'\n", "stage 0 (unnamed): training.seq_len = 'x'"),
        ('[[stages]]\nname = "a/b"\n', "'a/b'"),
        ('[[stages]]\nname = "a"\n[[stages]]\nname = "a"\n', "names of their own"),
        ("[recipe]\nlengths = [1]\n[[stages]]\n", "recipe.lengths"),
    ],
)
def test_refusals(text, says, tmp_path):
    path = tmp_path / "r.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_recipe(path, {})
    assert says in str(error.value)


def test_stages_start_from_each_other(tmp_path):
    path, there = tmp_path / "r.toml", tmp_path / "there"
    there.mkdir()
    path.write_text(
        f'[recipe]\nstart = "{there}"\n[[stages]]\nname = "a"\ntraining = {{ steps = 300 }}\n'
        '[[stages]]\nname = "b"\noptimizer_state = "carry"\n[[stages]]\nname = "c"\n'
    )
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        load_recipe(path, {})  # weights mean nothing with another tokenizer's ids
    (there / "tokenizer.json").touch()
    _, (a, b, c) = load_recipe(path, {"training": {"seq_len": 32}})
    assert a.config.checkpoint.initial_load_path == str(there)
    assert b.config.checkpoint.initial_load_path == "runs/r/a/checkpoint/step-300"
    assert b.config.checkpoint.initial_load_model_only is False
    assert c.config.checkpoint.initial_load_path == "runs/r/b/model"
    assert [s.config.training.seq_len for s in (a, b, c)] == [32] * 3
    assert [Path(s.config.tokenizer.path) for s in (a, b, c)] == [there] * 3
