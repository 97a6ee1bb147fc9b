"""Checks of recipes before they run: the plan, refusals, missing files, and what stages inherit from one another."""

from collections import Counter
from pathlib import Path

import pytest

from farsight.benchmarks.tiny import MODEL, SETTINGS
from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.configs.load import load_config, parse_options
from farsight.configs.schema import Architecture, Position, Rope
from farsight.configs.shipped import shipped_configs
from farsight.errors import ConfigError
from farsight.launch.plan.memory import memory_of
from farsight.launch.plan.run import Run
from farsight.launch.recipe import run as recipes
from farsight.launch.recipe.__main__ import main
from farsight.launch.recipe.run import run_recipe
from farsight.launch.recipe.text import checkpoint_bytes
from farsight.model.build import ModelConfig, build_model
from farsight.training.stages import load_recipe
from farsight.units import GIB
from tests.running import forked, train

CONFIGS = shipped_configs()


def started(capsys, *arguments):
    """Status of `farsight recipe`, and what it printed to stdout and stderr."""
    try:
        status = main([*map(str, arguments)])
    except SystemExit as stop:
        status = stop.code
    return status, *capsys.readouterr()


def test_a_plan_states_tokens_steps_and_gpus(capsys):
    path = str(CONFIGS["yarn_500k_first8_llama3_8b"])
    status, plan, wrong = started(capsys, path, "--dry-run")
    for part in ("1,622", "5e+09 tokens, 64 GPUs", "dp 2 × tp 8 × cp 4", "only layers 0:8", "yarn    500000"):
        assert part in plan
    # Weights that nobody can ship: the plan is printed, and says that it can't run yet.
    assert status == 2
    assert "recipe.start = 'assets/llama3' does not exist" in wrong
    # On other numbers of GPUs the layout is another.
    status, _, wrong = started(capsys, path)
    assert (status, "recipe.start = 'assets/llama3' does not exist" in wrong) == (2, True)
    says = "stage extend-96k fitted to 16 GPUs by --parallelism.tensor_parallel_degree 1 --parallelism.context_parallel_degree 2:"
    assert says in started(capsys, path, "--dry-run", "--nproc", "16")[1]
    pipeline = ["--parallelism.pipeline_parallel_degree", "4", "--training.local_batch_size", "4"]
    status, plan, wrong = started(capsys, path, "--dry-run", *pipeline)
    assert (status, plan) == (2, "")
    assert "training.layers = '0:8' would leave stages with nothing to train" in wrong
    data_parallel = ["--parallelism.tensor_parallel_degree", "1", "--parallelism.context_parallel_degree", "1"]
    assert "dp 32 " in started(capsys, path, "--dry-run", "--nproc", "32", *data_parallel)[1]
    for refused in (
        ["--nproc", "64", *data_parallel],  # 32 sequences over 64 ranks
        ["--nproc", "-32"],
        ["--gpus", "8"],  # which is farsight plan's
        ["--parallelism.data_parallel_shard_degree", "3"],  # of two data-parallel ranks
    ):
        assert started(capsys, path, "--dry-run", *refused)[:2] == (2, "")
    layers = ["--torchrun", "--nnodes 2", *data_parallel, "--training.layers", "0:99"]
    assert "0:99" in started(capsys, path, *layers)[2]
    batch = ["--training.tokens", "0", "--training.steps", "100", "--training.global_batch_size", "-1"]
    assert f"{2 * 96384 * 100:.3g} tokens" in started(capsys, path, "--dry-run", *batch)[1]


def test_attention_is_recomputed_only_where_keeping_it_fills_the_gpu():
    """Stages of the large models keep it if the plan leaves 10 % of 80 GiB free."""
    kept, modes = parse_options(["--activation_checkpoint.mode", "selective"]), Counter()

    def full(config, gpus):
        return max(memory.peak for memory in memory_of(Run.of(config, gpus))) > 0.9 * 80 * GIB

    for path in CONFIGS.values():
        if path.parent.name not in ("llama3_8b", "qwen3_2b", "recipes"):
            continue
        (recipe, stages), (_, keeping) = load_recipe(path, {}), load_recipe(path, kept)
        for stage, other in zip(stages, keeping, strict=True):
            mode = stage.config.activation_checkpoint.mode
            assert other.config.activation_checkpoint.selective_ac_option == "attention"
            assert not full(stage.config, recipe.gpus), (path, stage.name)
            assert mode == "selective" or full(other.config, recipe.gpus), (path, stage.name)
            modes[mode] += 1
    assert modes == {"selective": 24, "full": 7}


@pytest.mark.parametrize("layers", ["", "0:1"], ids=["all layers", "one layer"])
def test_the_size_of_a_checkpoint_is_that_on_disk(tmp_path, layers):
    options = [
        "--training.steps=3",
        f"--training.layers={layers}",
        "--architecture.vocab_size=8192",
        "--architecture.dim=128",
    ]
    train(tmp_path / "run", *options)
    size = sum(file.stat().st_size for file in (tmp_path / "run" / "checkpoint" / "step-3").glob("*.distcp"))
    config = load_config(["--job.config_file", str(tmp_path / "run.toml"), *options])
    expected = checkpoint_bytes(config)
    assert expected == pytest.approx(size, rel=0.02)
    # By hand: fp32 weights, and two moments of those that train.
    model = build_model(ModelConfig.from_job(config))
    trained = sum(p.numel() for name, p in model.named_parameters() if not layers or name.startswith("layers.0."))
    assert expected == pytest.approx(4 * sum(p.numel() for p in model.parameters()) + 8 * trained, rel=1e-3)


def test_a_disk_without_room_for_a_checkpoint_is_named(capsys, monkeypatch):
    path, warning = (
        str(CONFIGS["yarn_500k_first8_llama3_8b"]),
        "Warning: a checkpoint of 42.92 GiB does not fit in the 40.00 GiB free at",
    )
    for gibs in (40, 50):
        monkeypatch.setattr("farsight.launch.recipe.text.free_bytes", lambda folder, free=gibs: free * GIB)
        shown = started(capsys, path, "--dry-run")[1]
        assert f"checkpoints of 42.92 GiB, up to 3 of them in each stage ({gibs}.00 GiB free there)" in shown
        assert (warning in shown) == (gibs == 40)


STAGES = """
[tokenizer]
kind = "bytes"
[lr_scheduler]
warmup_steps = 1
[training]
steps = 2
[position]
rotary = { kind = "rope", theta = 500000.0 }
[[stages]]
name = "short"
[[stages]]
name = "long"
position.rotary = { kind = "yarn", factor = 8.0 }
"""


def test_a_dry_run_finds_what_a_run_would_fail_on_later(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe, data = tmp_path / "story.toml", tmp_path / "text.txt"
    recipe.write_text(STAGES)
    data.write_text("text")
    good = [
        recipe, "--dry-run", "--recipe.folder", tmp_path / "runs", "--recipe.perplexity_data", data,
        "--data.sources", "[{kind='text', path='text.txt'}]",
    ]  # fmt: skip
    status, plan, wrong = started(capsys, *good)
    assert (status, wrong) == (0, "")
    assert f"run folder {tmp_path}/runs/story" in plan
    assert "long: rotary rope → yarn, factor - → 8\n" in plan
    assert {*tmp_path.iterdir()} == {recipe, data}  # it wrote nothing
    write_base(tmp_path / "base")
    (tmp_path / "folder").mkdir()
    for options, says in {
        ("--recipe.start", "base"): "architecture.dim = 16 there, 128 here",
        ("--recipe.start", "folder"): "folder is not a model directory: it has no config.json",
        ("--recipe.perplexity_data", "none.txt"): "recipe.perplexity_data = 'none.txt' is not a file",
        ("--data.sources", "[{kind='jsonl', path='x/*.jsonl'}]"): "short, long: jsonl source 'x/*.jsonl': no such file",
        ("--tokenizer.kind", "auto", "--tokenizer.path", "nowhere"): "tokenizer.path = nowhere: no such file",
        ("--recipe.start", "nowhere"): "recipe.start = 'nowhere' does not exist",
        ("--recipe.start", "runs/rope_llama3_8b/adapt-128k/model"):
            "run farsight recipe rope_llama3_8b first",
        ("--recipe.start", "runs/tiny/nano_rope/pretrain-1k/model"): "run farsight recipe nano_rope --tiny first",
        ("--recipe.name", "../../x"): "recipe.name = '../../x'",
        ("--recipe.name", "/x"): "recipe.name = '/x'",
        ("--recipe.names", "x"): "recipe.names",
    }.items():  # fmt: skip
        status, _, wrong = started(capsys, *good, *options)
        assert (status, says in wrong) == (2, True), wrong
    (tmp_path / "runs" / "story").mkdir(parents=True)
    (tmp_path / "runs" / "story" / "metrics.jsonl").touch()
    assert "runs/story is itself a run" in started(capsys, *good)[2]


def write_base(folder):
    shape = Architecture(vocab_size=320, dim=16, n_layers=1, n_heads=2, n_kv_heads=2, head_dim=8, ffn_dim=16)
    config = ModelConfig(shape, Position(rotary=Rope(theta=250000.0)), 64)
    model = build_model(config)
    model.init_weights()
    write_model_dir(folder, config, dict(model.named_parameters()))


def rotaries(tmp_path, text, **options):
    (tmp_path / "r.toml").write_text(text)
    return [stage.config.position.rotary for stage in load_recipe(tmp_path / "r.toml", options)[1]]


def test_theta_stays_unless_a_stage_names_another(tmp_path):
    after = '[[stages]]\nname = "last"\nposition.rotary = { kind = "llama3", factor = 4.0 }\n'
    assert [r.theta for r in rotaries(tmp_path, STAGES + after)] == [5e5] * 3
    # What the weights were trained with counts, and not what the stages share.
    named = STAGES.replace('kind = "yarn"', 'kind = "yarn", theta = 1e6')
    assert [r.theta for r in rotaries(tmp_path, named + after)] == [5e5, 1e6, 1e6]
    # Neither do other defaults: llama3's own is 500,000.
    assert [r.theta for r in rotaries(tmp_path, STAGES.replace(", theta = 500000.0", "") + after)] == [1e4] * 3
    # Of a kind that the stages do not share, too, and where a stage says nothing.
    again = named + '[[stages]]\nname = "same"\nposition.rotary = { kind = "yarn", factor = 4.0 }\n'
    assert [(r.theta, r.factor) for r in rotaries(tmp_path, again)[1:]] == [(1e6, 8.0), (1e6, 4.0)]
    silent = named.replace('rotary = { kind = "rope", theta = 500000.0 }', "") + '[[stages]]\nname = "silent"\n'
    assert [(r.kind, r.theta) for r in rotaries(tmp_path, silent)] == [("rope", 1e4), ("yarn", 1e6), ("rope", 1e6)]
    for given, theta in (("{kind = 'yarn', factor = 2.0}", 5e5), ("{kind = 'yarn', theta = 3e4}", 3e4)):
        inline = parse_options(["--position.rotary", given])
        assert [(r.kind, r.theta) for r in rotaries(tmp_path, STAGES, **inline)] == [("yarn", theta)] * 2
    none = STAGES.replace('kind = "rope", theta = 500000.0', 'kind = "none"')
    assert rotaries(tmp_path, none)[1].theta == 1e4
    option = {"position": {"rotary": {"kind": "linear", "factor": 2.0}}}
    assert [(r.kind, r.theta) for r in rotaries(tmp_path, STAGES, **option)] == [("linear", 5e5)] * 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[training]\nsteps = 3\n", "has no [[stages]]"),
        ('[[stages]]\noptimizer_state = "carry"\n', "first stage"),
        ('[[stages]]\noptimizer_state = "keep"\n', "'keep'"),
        (
            '[[stages]]\n[stages.training]\nlayers = "0:1"\n[[stages]]\noptimizer_state = "carry"\n',
            "the optimizer of the stage before only has layers 0:1,",
        ),
        ("[[stages]]\n[stages.training]\nseq_len = 'x'\n", "stage 0 (unnamed): training.seq_len = 'x'"),
        ('[[stages]]\nname = "a/b"\n', "'a/b'"),
        ('[[stages]]\nname = "a"\n[[stages]]\nname = "a"\n', "need distinct names"),
        ("[recipe]\nlengths = [1]\n[[stages]]\n", "recipe.lengths"),
        ('[[stages]]\nname = ".."\n', "name = '..'"),
        ('[recipe]\nname = "../x"\n[[stages]]\n', "recipe.name = '../x'"),
        ("stages = [1]\n", "stage 0 = 1 must be a table"),
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


def test_a_start_with_another_theta_is_said_unless_the_recipe_names_one(tmp_path, caplog):
    write_base(tmp_path / "base")
    says = "position.rotary.theta = 10000 by default, but the weights of"
    for rotary, loud in (
        ('kind = "yarn", factor = 2.0', True),
        ('kind = "yarn", theta = 1e4', False),
        ('kind = "none"', False),
    ):
        caplog.clear()
        text = f'[recipe]\nstart = "{tmp_path}/base"\n[tokenizer]\nkind = "bytes"\n[[stages]]\n'
        rotaries(tmp_path, text + f"position.rotary = {{ {rotary} }}\n")
        assert (says in caplog.text) == loud


def test_a_stage_that_dies_is_named(tmp_path, monkeypatch, caplog):
    (tmp_path / "r.toml").write_text(STAGES)
    options = ["--recipe.folder", str(tmp_path / "runs"), "--recipe.perplexity_lengths", "[]"]
    stage = tmp_path / "runs" / "r" / "short" / "checkpoint" / "step-40"
    stage.mkdir(parents=True)
    monkeypatch.setattr(recipes, "complete_steps", lambda folder: [20, 40] if folder == stage.parent else [])
    for ended, status, says in (
        (-9, 137, "stage 1/2: short was killed by SIGKILL (possibly by the kernel's out-of-memory killer"),
        (-15, 75, "stage 1/2: short was killed by SIGTERM"),
        (4, 4, "stage 1/2: short ended with status 4, for the reason above"),
    ):
        caplog.clear()
        monkeypatch.setattr(recipes, "wait_for", lambda command, ended=ended: ended)
        assert main([str(tmp_path / "r.toml"), *options]) == status
        assert says in caplog.text
        assert "the same command continues from step 40" in caplog.text

    def unreachable(folder):
        raise OSError("no connection to the store")

    monkeypatch.setattr(recipes, "complete_steps", unreachable)
    for ended in (4, 75):
        monkeypatch.setattr(recipes, "wait_for", lambda command, ended=ended: ended)
        assert main([str(tmp_path / "r.toml"), *options]) == ended


def test_a_stage_is_not_trained_under_finished_ones(tmp_path):
    """The later stages started from weights that it would replace."""
    (tmp_path / "r.toml").write_text(
        '[tokenizer]\nkind = "bytes"\n[[stages]]\nname = "a"\n[[stages]]\nname = "b"\n[[stages]]\nname = "c"\n'
    )
    recipe, stages = load_recipe(tmp_path / "r.toml", {"recipe": {"folder": str(tmp_path)}})
    for stage in stages[1:]:
        stage.model_dir.mkdir(parents=True)
        (stage.model_dir / "config.json").touch()
    with pytest.raises(
        ConfigError, match=r"stage a is not finished, but later ones are \(b, c\), from weights that are gone"
    ):
        run_recipe(recipe, stages, ["no-launcher"])


GATED = """
[[stages]]
name = "first"

[[stages]]
name = "second"

[[stages.evaluations]]
kind = "needle"
lengths = [192]
depths = 1
trials = 1
stop_if = "needle.mean <= 1"
"""


def test_a_recipe_refuses_evaluations_that_can_not_be_and_stops_at_a_gate(tmp_path, monkeypatch, capsys, caplog):
    path = tmp_path / "gated.toml"
    path.write_text(MODEL + SETTINGS + GATED)
    options = [
        str(path), "--recipe.folder", str(tmp_path), "--recipe.perplexity_lengths", "[]", "--training.steps", "2",
        "--lr_scheduler.warmup_steps", "1", "--training.seq_len", "64", "--training.mixed_precision_param", "float32",
    ]  # fmt: skip
    text = path.read_text()
    path.write_text(text.replace("needle.mean", "needle.maen"))
    status, _, wrong = started(capsys, *options, "--dry-run")
    assert (status, "stage second: stop_if of the evaluation needle: it has no figure 'needle.maen'." in wrong) == (
        2,
        True,
    )
    path.write_text(text.replace("trials = 1", 'haystack = "nowhere.txt"'))
    status, _, wrong = started(capsys, *options, "--dry-run")
    assert (status, "second: evaluation needle: nowhere.txt does not exist." in wrong) == (2, True)
    path.write_text(text)
    monkeypatch.setattr(recipes, "wait_for", lambda command: forked(command[2:], tmp_path / "printed").returncode)
    assert started(capsys, *options)[0] == 6
    assert "stage 2/2: second ended with status 6" in caplog.text
    assert (tmp_path / "gated" / "first" / "model").is_dir()
    assert not (tmp_path / "gated" / "second" / "model").exists()
    path.write_text(text.replace('stop_if = "needle.mean <= 1"', ""))
    status, printed, _ = started(capsys, *options)
    assert (status, f"{'second':<16}needle.mean: 0" in printed) == (0, True)
    # Other evaluations of a finished stage are no reason to train it again.
    path.write_text(text.replace("trials = 1", "trials = 2"))
    caplog.set_level("INFO", "farsight")
    assert started(capsys, *options)[0] == 0
    assert "second is finished" in caplog.text
    assert "settings have changed" not in caplog.text
