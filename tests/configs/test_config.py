"""The config loader: what it accepts and refuses, and its messages."""

import tomllib
from pathlib import Path

import pytest

from farsight.configs.check import check_processes
from farsight.configs.check_finetuning import NOT_FOR_FINETUNING
from farsight.configs.finetuning import FinetuneConfig
from farsight.configs.help import help_text
from farsight.configs.load import build_config, load_config, merge, read_toml
from farsight.configs.schema import (
    Alibi,
    JobConfig,
    JsonlSource,
    LinearRope,
    NoRotary,
    Rope,
    Scope,
    SlidingWindow,
    YarnRope,
)
from farsight.configs.typed import to_toml
from farsight.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_command_line_wins_over_file_and_file_over_size(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[model]\nflavor = "tiny"\n[architecture]\nn_layers = 3\n[training]\nseq_len = 64\nsteps = 7\n')
    config = load_config(["--job.config_file", str(path), "--training.steps", "9", "--lr_scheduler.warmup_steps=1"])
    assert config.training.steps == 9
    assert config.training.seq_len == 64
    assert config.architecture.n_layers == 3
    assert config.architecture.dim == 128  # from configs/sizes/tiny.toml
    assert config.job.dump_folder == "runs/run"


def test_base_is_relative_and_below(tmp_path):
    (tmp_path / "a.toml").write_text(
        '[training]\nseq_len = 64\nsteps = 5\n[position.rotary]\nkind = "yarn"\nfactor = 4.0\n'
    )
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.toml").write_text(
        'base = "../a.toml"\n[training]\nsteps = 6\n[position.rotary]\nkind = "rope"\n'
    )
    values = read_toml(tmp_path / "sub" / "b.toml")
    assert values["training"] == {"seq_len": 64, "steps": 6}
    # Another kind replaces the table: a YaRN factor means nothing to plain RoPE.
    assert values["position"]["rotary"] == {"kind": "rope"}


def test_merge_reaches_into_lists_by_index():
    below = {"stages": [{"a": {"x": 1, "y": 2}}, {"a": {"x": 3}}]}
    assert merge(below, {"stages": {"1": {"a": {"y": 4}}}})["stages"] == [
        {"a": {"x": 1, "y": 2}},
        {"a": {"x": 3, "y": 4}},
    ]
    with pytest.raises(ConfigError, match=r"^recipe\.stages\.2: this list has 2 items, counted from 0"):
        merge({"recipe": below}, {"recipe": {"stages": {"2": {}}}})


def test_kinds_and_unions():
    options = [
        "--position.rotary.kind", "linear", "--position.rotary.factor", "4",
        "--position.heads.kind=scope", "--position.heads.layout=sorted",
        "--position.bias", '{ kind = "alibi", uniform = true }',
        "--data.sources", '[{ kind = "jsonl", path = "x.jsonl", weight = 2 }]',
        "--position.rules", '[{ layers = "3::4", heads = { kind = "window", window = 8 } }]',
    ]  # fmt: skip
    config = load_config([*options, "--lr_scheduler.warmup_steps", "0"])
    assert config.position.rotary == LinearRope(factor=4.0)
    assert config.position.heads == Scope(layout="sorted")
    assert config.position.bias == Alibi(uniform=True)
    assert config.position.rules[0].heads == SlidingWindow(window=8)
    assert config.data.sources == (JsonlSource(path="x.jsonl", weight=2.0),)


def test_rules_that_rotate_keep_the_base_unless_they_name_one():
    rules = [
        {"layers": "0", "rotary": {"kind": kind, **own}}
        for kind, own in (("yarn", {}), ("rope", {"theta": 7.0}), ("none", {}))
    ]
    config = build_config({"position": {"rotary": {"theta": 5e5}, "rules": rules}})
    assert [rule.rotary for rule in config.position.rules] == [YarnRope(theta=5e5), Rope(theta=7.0), NoRotary()]
    plain = build_config({"position": {"rules": rules}})
    assert plain.position.rules[0].rotary == YarnRope()


def test_flags_none_and_numbers():
    config = load_config(
        [
            "--checkpoint.no_enable",
            "--compile.enable",
            "--debug.seed",
            "none",
            "--training.steps",
            "2e3",
            "--data.seed=-1",
        ]
    )
    assert config.checkpoint.enable is False
    assert config.compile.enable is True
    assert config.debug.seed is None
    assert config.training.steps == 2000
    assert config.data.seed == -1


@pytest.mark.parametrize("source", ["default", *sorted((ROOT / "configs" / "sizes").glob("*.toml"))], ids=str)
def test_saved_config_reads_back_equal(source):
    values = {} if source == "default" else {"model": {"flavor": source.stem}}
    values = merge(values, {"position": {"heads": {"kind": "scope"}, "lasp": {"s_max": 4.0}}})
    config = build_config(values)
    assert build_config(tomllib.loads(to_toml(config))) == config
    assert isinstance(config, JobConfig)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"position": {"lasp": {"s_min": "eight"}}}, ["position.lasp.s_min", "'eight'", "a number"]),
        ({"training": {"seq_len": 64.5}}, ["training.seq_len", "64.5", "whole number"]),
        ({"training": {"seq_len": True}}, ["training.seq_len", "True", "whole number"]),
        ({"checkpoint": {"enable": "yes"}}, ["checkpoint.enable", "'yes'", "true or false"]),
        ({"position": {"lasp": {"smax": 4}}}, ["position.lasp.smax", "Did you mean 's_max'"]),
        ({"trainin": {}}, ["trainin", "Did you mean 'training'"]),
        ({"position": {"heads": {"kind": "scoop"}}}, ["position.heads.kind", "'scoop'", "Did you mean 'scope'"]),
        ({"position": {"heads": {"kind": "scope", "layout": "sort"}}}, ["layout", "'sort'", "'sorted'"]),
        ({"position": {"rotary": {"kind": "rope", "factor": 2.0}}}, ["position.rotary.factor"]),
        ({"position": {"rules": [{"layers": 3}]}}, ["position.rules.0.layers", "3", "string"]),
        ({"training": 3}, ["training", "3", "table"]),
        ({"data": {"sources": {"kind": "stdlib"}}}, ["data.sources", "list"]),
        ({"model": {"flavor": "tinny"}}, ["model.flavor", "'tinny'", "Did you mean 'tiny'"]),
        ({"architecture": {"n_heads": 6, "n_kv_heads": 4}}, ["n_heads = 6", "n_kv_heads = 4"]),
        ({"architecture": {"head_dim": 5}}, ["head_dim = 5", "even"]),
        ({"training": {"tokens": 1e9}}, ["training.tokens", "global_batch_size"]),
        ({"checkpoint": {"keep_latest_k": 1}}, ["keep_latest_k = 1", "2"]),
        ({"training": {"steps": 10}, "lr_scheduler": {"warmup_steps": 20}}, ["warmup_steps = 20", "10"]),
        ({"training": {"dtype": "float16"}}, ["training.dtype", "'float16'", "bfloat16"]),
    ],
)
def test_refusals_name_the_option_its_value_and_the_remedy(values, says):
    with pytest.raises(ConfigError) as error:
        build_config(values)
    for words in says:
        assert words in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--job.config_file", "configs/quickstar.toml"], "Did you mean 'configs/quickstart.toml'"),
        (["training.steps", "3"], "options look like"),
        (["--training.steps", "three"], "whole number"),
        (["--data.sources.3.weight", "1"], "must be a list"),
    ],
)
def test_command_line_refusals(arguments, says, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as error:
        load_config(arguments)
    assert says in str(error.value)


def test_broken_toml_names_file_and_line(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text("[training]\nseq_len = \n")
    with pytest.raises(ConfigError, match=r"x\.toml is not valid TOML.*line 2"):
        load_config(["--job.config_file", str(path)])


def test_flash_attention_is_not_compiled():
    wanted = {"attention": {"backend": "flash"}, "compile": {"enable": True}}
    with pytest.raises(ConfigError, match=r"set compile\.enable = false or attention\.backend"):
        build_config(wanted)
    build_config({"attention": {"backend": "flash"}})


def test_tokens_set_steps():
    t = {"tokens": 1000.0, "global_batch_size": 2, "seq_len": 64}
    assert build_config({"training": t, "lr_scheduler": {"warmup_steps": 0}}).training.steps == 8  # 7.8 rounded up


def test_default_rotary_is_rope_and_help_names_every_option():
    assert build_config({}).position.rotary == Rope()
    text = help_text()
    for option in ("--training.seq_len", "--position.lasp.s_max", "--position.heads.layout", "--data.held_out"):
        assert option in text
    assert "L_anchor" in help_text(["position"])
    with pytest.raises(ConfigError, match="Did you mean 'position'"):
        help_text(["positoin"])


def test_help_of_parts_kinds_and_lists():
    rotary = help_text(["position.rotary"])
    assert '[position.rotary] kind = "rope" (the default)' in rotary
    assert '[position.rotary] kind = "yarn"  ' in rotary
    assert rotary.count("(the default)") == 1
    assert "--position.heads" not in rotary
    optimizer = help_text(["optimizer"])
    assert '[optimizer] kind = "adamw" (the default)' in optimizer
    assert optimizer.count("(the default)") == 1
    assert '[optimizer] kind = "muon"  ' in optimizer
    assert "--optimizer.momentum" in optimizer
    assert optimizer.count("Learning rate after warm-up.") == 1
    assert optimizer.count("as above: --optimizer.lr, --optimizer.beta1") == 3


def test_a_default_kind_that_is_named_above_keeps_the_options_below():
    below = {"optimizer": {"implementation": "foreach", "lr": 0.5}}
    assert merge(below, {"optimizer": {"kind": "adamw"}}) == {
        "optimizer": {"implementation": "foreach", "lr": 0.5, "kind": "adamw"}
    }
    assert merge(below, {"optimizer": {"kind": "muon"}}) == {"optimizer": {"lr": 0.5, "kind": "muon"}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"recipe_name": "rowwise", "enable_fsdp_float8_all_gather": True}, "one scale for a whole weight"),
        ({"precompute_float8_dynamic_scale_for_fsdp": True}, "set enable_fsdp_float8_all_gather = true too"),
    ],
)
def test_float8_options_that_do_nothing_are_refused(values, message):
    converters = ["quantize.linear.float8"]
    with pytest.raises(ConfigError, match=message):
        build_config({"model": {"converters": converters}, "quantize": {"linear": {"float8": values}}})


def test_options_of_loading_and_offload_that_do_nothing_are_refused():
    with pytest.raises(ConfigError, match="initial_load_model_only = false too"):
        build_config({"checkpoint": {"exclude_from_loading": ["optimizer"]}})
    offloaded = build_config({"training": {"enable_cpu_offload": True}})
    check_processes(offloaded, 2)
    with pytest.raises(ConfigError, match="enable_cpu_offload needs FSDP"):
        check_processes(offloaded, 1)
    assert "--data.sources.N.path" in help_text(["data.sources"])
    assert "--position.rules.N.rotary.…  as [position.rotary]" in help_text(["position"])


def test_help_leaves_out_what_fine_tuning_always_refuses():
    text, finetune = help_text(), help_text((), FinetuneConfig, NOT_FOR_FINETUNING)
    for option in NOT_FOR_FINETUNING:
        assert f"--{option}" not in [line.split("  ")[1] for line in finetune.splitlines() if line.startswith("  --")]
    assert "--parallelism.tensor_parallel_degree" in text
    assert "--parallelism.tensor_parallel_degree" not in finetune


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lr", "1e-4"], "no option lr. Did you mean 'optimizer.lr'"),
        (["--config", "tiny"], "no option config. Did you mean 'job.config_file'"),
        (["--dryrun"], "no option dryrun. Did you mean 'dry-run'"),
        (["--job.config_file"], "job.config_file was given no value"),
        (["--training.steps"], "training.steps was given no value"),
        (["--data.sources.path", "x"], "data.sources = .* must be a list: .*--data.sources.0.KEY"),
        (["--job.config_file", "configs"], "configs is a folder: name a .toml file"),
    ],
)
def test_options_that_are_nearly_right(options, message):
    with pytest.raises(ConfigError, match=message):
        load_config(options)


def test_keys_of_files_are_not_taken_for_flags():
    with pytest.raises(ConfigError, match="no option dryrun") as error:
        build_config({"dryrun": True})
    assert "dry-run" not in str(error.value)
