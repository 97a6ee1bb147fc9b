"""farsight positions: figures against counting, what it draws and refuses, and the pages that its pictures illustrate."""

import json
import math
import re
import tomllib
from dataclasses import replace

import pytest

from farsight.analysis.positions.__main__ import main
from farsight.analysis.positions.figures import figures, share_by_distance
from farsight.analysis.positions.picture import draw
from farsight.checkpoints.resume import refuse_another_model, take_its_settings
from farsight.configs.load import build_config, load_config
from farsight.configs.schema import (
    Alibi,
    Architecture,
    Lasp,
    LayerRule,
    NoRotary,
    Position,
    Rope,
    Scope,
    SlidingWindow,
    YarnRope,
)
from farsight.configs.shipped import shipped_configs
from farsight.errors import ConfigError
from farsight.model.build import ModelConfig
from farsight.training.stages import read_config
from tests.running import ROOT

CONFIGS, PAGES = shipped_configs(), ROOT / "docs" / "positions"
NANO = sorted(name.removeprefix("nano_") for name in CONFIGS if name.startswith("nano_"))
SMALL = Architecture(vocab_size=32, dim=32, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=48)


def test_figures_are_what_counting_gives():
    rules = (LayerRule(layers="1", heads=SlidingWindow(window=3)), LayerRule(layers="2", rotary=NoRotary()))
    config = ModelConfig(SMALL, Position(rotary=Rope(theta=100.0), heads=Scope(), rules=rules), trained_length=16)
    # ceil(16^(h/4)) is 2, 4, 8, 16 in some order of heads.
    scopes = [[2, 4, 8, 16], [3, 3, 3, 3], [2, 4, 8, 16]]
    got = figures(config, 16)
    assert [sorted(layer["scopes"]) for layer in got["layers"]] == scopes
    seen = [sum(s > d for layer in scopes for s in layer) / 12 for d in range(16)]
    assert share_by_distance(config.layers(), 16).tolist() == pytest.approx(seen)
    visible = sum(min(s, t + 1) for layer in scopes for s in layer for t in range(16))
    assert got["pairs_of_dense_over_visible"] == pytest.approx(12 * 136 / visible)
    turns = [2 * math.pi * 100 ** (2 * i / 8) for i in range(4)]
    assert got["layers"][0]["wavelengths"] == pytest.approx(turns)
    assert got["layers"][2]["wavelengths"] == []


@pytest.mark.parametrize(
    ("position", "panels"),
    [
        (Position(rotary=YarnRope(factor=2.0, original_length=8), lasp=Lasp(anchor_layers=1)), 1),
        (Position(rotary=NoRotary(), bias=Alibi()), 1),
        (Position(rotary=NoRotary(), heads=Scope()), 2),
        (Position(rotary=NoRotary()), 2),
        (Position(rotary=NoRotary(), rules=(LayerRule(layers="1", rotary=Rope()),)), 1),
        (Position(heads=SlidingWindow(window=4), bias=Alibi(), embedding="sinusoidal"), 5),
    ],
)
def test_a_panel_for_each_mechanism(tmp_path, position, panels):
    path = tmp_path / "p.png"
    draw(ModelConfig(SMALL, position, trained_length=16), 16, path)
    width = int.from_bytes(path.read_bytes()[16:20], "big")  # from the PNG's header
    assert width == 672 * panels


def test_it_reads_recipes_and_refuses_what_is_none(tmp_path, capsys):
    recipe = CONFIGS["smollm3_3b"]
    assert read_config(recipe).trained_length == 65536
    assert read_config(recipe, "extend-32k").position.rotary == Rope(theta=2e6)
    assert read_config(ROOT / "configs" / "tiny.toml").trained_length == 256
    out = tmp_path / "f.json"
    main([str(recipe), "--length", "64", "--json", str(out)])
    assert json.loads(out.read_text())["length"] == 64
    for arguments, says in [
        ([str(recipe), "--stage", "x"], "no stage 'x'; it has pretrain-4k, extend-32k, extend-64k"),
        ([str(tmp_path)], "no config.json"),
        ([str(tmp_path / "x.toml")], "no config file"),
        ([str(recipe), "--length", "0"], "--length: 0 must be at least 1"),
        ([str(ROOT / "configs" / "tiny.toml"), "--stage", "x"], "is not a recipe"),
        ([str(recipe), "--picture", str(tmp_path / "p.txt")], "must end with .png"),
        ([str(recipe), "--picture", str(tmp_path)], "is a folder; name a file"),
        ([str(recipe), "--lenth", "64"], "unrecognized arguments: --lenth (did you mean --length?)"),
        ([str(tmp_path), "--position.lasp.s_max", "2"], "a model directory, and --position.lasp.s_max is for configs"),
        ([str(tmp_path), "--tiny"], "a model directory, and --tiny is for configs"),
    ]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
        assert says in capsys.readouterr().err


def test_options_change_the_config_that_is_shown(tmp_path):
    """Under linear scaling the fastest pair turns once in 2π × factor tokens; over two anchor layers LASP takes it from 1 to s_max."""
    out = tmp_path / "f.json"
    main([str(ROOT / "configs" / "tiny.toml"), "--position.lasp.s_max", "4", "--json", str(out)])
    fastest = [layer["wavelengths"][0] for layer in json.loads(out.read_text())["layers"]]
    assert fastest == pytest.approx([2 * math.pi * factor for factor in (1, 2.5, 4, 4)])


@pytest.mark.parametrize("name", NANO)
def test_every_mechanism_has_a_page_that_shows_its_recipe(name):
    page = (PAGES / f"{name.removeprefix('uniform_')}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    shown = [build_config(tomllib.loads(block)).position for block in blocks]
    assert read_config(CONFIGS[f"nano_{name}"]).position in shown
    assert f"](pictures/{name}.png)" in page
    assert (PAGES / "pictures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "position",
    [
        Position(rotary=YarnRope(factor=2.0, original_length=8), lasp=Lasp(anchor_layers=1)),
        Position(rotary=NoRotary(), heads=Scope(s_max=12), rules=(LayerRule(layers="1", rotary=Rope(theta=300.0)),)),
        Position(heads=SlidingWindow(window=4), bias=Alibi(), embedding="sinusoidal"),
    ],
)
def test_a_run_takes_a_model_s_settings_as_toml(tmp_path, position):
    """The command in the refusal of another architecture writes a config that gives this one."""
    theirs = ModelConfig(replace(SMALL, attention_bias="qkv", rotary_dim=4, norm_eps=1e-6), position, trained_length=16)
    (tmp_path / "model").mkdir()
    theirs.save(tmp_path / "model" / "farsight.json")
    mine = tmp_path / "mine.toml"
    mine.write_text('base = "theirs.toml"\n[training]\nsteps = 777\n')
    with pytest.raises(ConfigError, match="another architecture") as error:
        refuse_another_model(
            theirs, ModelConfig.from_job(build_config({})), "it", take_its_settings(tmp_path / "model")
        )
    command = re.search("`farsight positions (.+?)`", str(error.value))[1]
    main(command.replace("theirs.toml", str(tmp_path / "theirs.toml")).split())
    job = load_config(["--job.config_file", str(mine)])
    ours = ModelConfig.from_job(job)
    assert (ours.architecture, ours.position, ours.trained_length) == (theirs.architecture, position, 16)
    assert job.training.steps == 777
