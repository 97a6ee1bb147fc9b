"""Shipped configs: how they and their data are found from any folder, and what `--tiny` lays over a config."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from farsight.configs import shipped
from farsight.configs.finetuning import FinetuneConfig
from farsight.configs.load import load_config, read_toml
from farsight.configs.shipped import CONFIGS, find_config, shipped_configs
from farsight.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped._taken.cache_clear()


def test_a_config_is_found_by_path_and_by_name(tmp_path, capsys):
    scope, nano = (shipped_configs()[name] for name in ("scope_llama3_8b", "nano_scope"))
    assert scope.parent.name == "llama3_8b"
    for asked, found in {
        "scope_llama3_8b": scope,
        "scope_llama3_8b.toml": scope,
        "configs/recipes/nano_scope.toml": nano,  # where it was once
        "/old/checkout/configs/recipes/nano_scope.toml": nano,
        "llama3.1_8b_qlora_garfa": CONFIGS / "finetune" / "llama3.1_8b_qlora_garfa.toml",
        "tiny": CONFIGS / "tiny.toml",
        "configs/tiny.toml": CONFIGS / "tiny.toml",
        "quickstart": CONFIGS / "quickstart.toml",
        "finetune/quickstart": CONFIGS / "finetune" / "quickstart.toml",
    }.items():
        assert find_config(Path(asked)) == find_config(Path(asked)) == found
        assert capsys.readouterr().err == f"{asked}: taking {found}\n"
    own = tmp_path / "tiny.toml"
    own.touch()
    assert find_config(Path("tiny.toml")) == Path("tiny.toml")
    assert find_config(own) == own
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("scope_llama3_8", "Did you mean 'scope_llama3_8b'"),
        ("mine/nano_scope.toml", "Did you mean 'nano_scope'"),
        ("configs/recipes/tiny/nano_scope.toml", "Name nano_scope and add --tiny"),
        ("gpu", "There is no config file gpu"),  # a part, which can't be run
    ],
)
def test_unknown_names_are_refused(asked, says):
    with pytest.raises(ConfigError, match="There is no config file") as error:
        find_config(Path(asked))
    assert says in str(error.value)


def test_a_folder_of_the_same_name_does_not_hide_a_shipped_config(tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "mine").mkdir()
    assert find_config(Path("tiny")) == shipped_configs()["tiny"]
    with pytest.raises(ConfigError, match="mine is a folder"):
        find_config(Path("mine"))


def test_names_are_distinct_and_folders_small():
    paths = [path for path in CONFIGS.rglob("*.toml") if not {"sizes", "parts"} & {*path.parts}]
    twice = {name for name, count in Counter(path.stem for path in paths).items() if count > 1}
    assert twice == {"tiny", "quickstart"}  # of which finetune/'s need their folder
    assert max(Counter(path.parent for path in CONFIGS.rglob("*.toml")).values()) <= 15


def test_a_base_may_be_a_shipped_config(tmp_path):
    (tmp_path / "mine.toml").write_text('base = "nano_scope"\n[recipe]\ngpus = 2\n')
    values = read_toml(tmp_path / "mine.toml")
    assert (values["recipe"]["gpus"], values["position"]["heads"]["kind"]) == (2, "scope")


BASE = """
[training]
seq_len = 64
steps = 100
[tiny]
base = "overlay.toml"
position.rotary = { kind = "yarn", factor = 2.0 }
[[stages]]
name = "a"
[[stages]]
name = "b"
"""
OVERLAY = """
[training]
steps = 5
[stages.0.training]
seq_len = 8
[stages.1.training]
seq_len = 16
[stages.2.training]
seq_len = 32
"""


def test_tiny_lays_its_table_over_the_config(tmp_path):
    (tmp_path / "base.toml").write_text(BASE)
    (tmp_path / "overlay.toml").write_text(OVERLAY)
    child = tmp_path / "sub" / "child.toml"
    child.parent.mkdir()
    child.write_text('base = "../base.toml"\n[tiny]\nposition.rotary.factor = 4.0\nstages.1.training.steps = 3\n')
    plain, tiny = read_toml(child), read_toml(child, tiny=True)
    assert plain == {"training": {"seq_len": 64, "steps": 100}, "stages": [{"name": "a"}, {"name": "b"}]}
    assert tiny == {
        "training": {"seq_len": 64, "steps": 5},
        "position": {"rotary": {"kind": "yarn", "factor": 4.0}},
        # The overlay's third stage is not the config's.
        "stages": [
            {"name": "a", "training": {"seq_len": 8}},
            {"name": "b", "training": {"seq_len": 16, "steps": 3}},
        ],
    }


def test_tiny_as_an_option(tmp_path):
    (tmp_path / "x.toml").write_text("[training]\nsteps = 100\n[tiny.training]\nsteps = 5\nseq_len = 32\n")
    (tmp_path / "y.toml").write_text("[training]\nsteps = 100\n")
    (tmp_path / "z.toml").write_text("tiny = 3\n")
    x = ["--job.config_file", "x.toml", "--lr_scheduler.warmup_steps", "1"]
    assert load_config(x).training.steps == 100
    for options in (["--tiny"], ["--tiny=true"], ["--tiny", "true"]):
        assert load_config([*x, *options]).training.steps == 5
    t = load_config([*x, "--tiny", "--training.steps", "7"]).training
    assert (t.steps, t.seq_len) == (7, 32)
    for arguments, says in [
        (["--job.config_file", "y.toml", "--tiny"], r"y\.toml has no \[tiny\] table"),
        (["--job.config_file", "z.toml"], "tiny = 3 must be a table"),
        (["--tiny"], "name one with --job.config_file"),
        ([*x, "--tiny", "small"], "tiny = small must be true or false"),
    ]:
        with pytest.raises(ConfigError, match=says):
            load_config(arguments)


def test_shipped_data_are_found_from_any_folder(tmp_path, monkeypatch):
    config = load_config(["--job.config_file", "finetune/quickstart"], FinetuneConfig)
    assert [source.path for source in config.data.sources] == [
        str(ROOT / "examples" / "instructions" / f"{name}.jsonl") for name in ("code", "maths", "knowledge")
    ]
    for option in ([], ["--tiny"]):
        profile = load_config(["--job.config_file", "ablation_a", *option], FinetuneConfig).layer_profile
        assert Path(profile).is_absolute()
        assert Path(profile).is_file()
    source = "--data.sources=[{ kind = 'jsonl', path = 'examples/instructions/*.jsonl' }]"
    assert load_config([source]).data.sources[0].path == str(ROOT / "examples/instructions/*.jsonl")
    # What is here wins.
    (tmp_path / "examples" / "instructions").mkdir(parents=True)
    (tmp_path / "examples" / "instructions" / "mine.jsonl").touch()
    assert load_config([source]).data.sources[0].path == "examples/instructions/*.jsonl"
    monkeypatch.chdir(ROOT)
    config = load_config(["--job.config_file", "configs/finetune/quickstart.toml"], FinetuneConfig)
    assert config.data.sources[0].path == "examples/instructions/code.jsonl"


def test_commands_take_names_and_tiny(tmp_path):
    command = [sys.executable, "-m", "farsight", "positions", "nano_yarn", "--tiny"]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True)
    assert "512 tokens" in done.stdout, done.stderr
    assert "nano_yarn: taking " in done.stderr
