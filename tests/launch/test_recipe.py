"""Recipes: the shipped ones against their papers, and whole runs of their tiny forms."""

import json
import math
import re
import shutil
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from farsight.benchmarks.forked import Forked
from farsight.checkpoints.load import load_model, read_model_config
from farsight.configs.check import check_processes
from farsight.configs.load import load_config
from farsight.configs.schema import (
    Alibi,
    Bias,
    Heads,
    Lasp,
    LayerRule,
    NoRotary,
    Position,
    Rope,
    Rotary,
    Scope,
    SlidingWindow,
    YarnRope,
)
from farsight.configs.shipped import shipped_configs
from farsight.evals.perplexity.__main__ import main as perplexity
from farsight.launch.recipe.__main__ import main
from farsight.launch.recipe.check import check_stages
from farsight.model.build import ModelConfig, count_parameters, trained_layers
from farsight.training.stages import load_recipe
from tests.running import ROOT, forked, metrics, run

CONFIGS = shipped_configs()


def test_scope_llama3_8b_is_table_5():
    _, stages = load_recipe(CONFIGS["scope_llama3_8b"], {})
    training = [stage.config.training for stage in stages]
    assert [t.seq_len for t in training] == [4096, 32768, 131072]
    assert [s.config.optimizer.lr for s in stages] == [3e-4, 3e-5, 1e-5]
    tokens = [t.global_batch_size * t.seq_len * t.steps for t in training]
    assert tokens[0] == pytest.approx(50e9, rel=1e-4)
    assert tokens[1] == pytest.approx(2e9, rel=1e-3)
    assert training[2].steps == 50
    batches = [t.global_batch_size * t.seq_len for t in training]
    assert batches == [pytest.approx(b, rel=0.05) for b in (500e3, 2e6, 4e6)]
    assert all(s.config.optimizer.kind == "adamw" and s.config.optimizer.weight_decay == 0.1 for s in stages)
    for stage in stages:
        config = ModelConfig.from_job(stage.config)
        assert isinstance(config.position.rotary, NoRotary)
        assert isinstance(config.position.heads, Scope)
        for layer in config.layers():
            assert max(layer.scopes) == stage.config.training.seq_len
        assert count_parameters(config) == 8_030_261_248


def test_its_data_is_table_4():
    _, stages = load_recipe(CONFIGS["scope_llama3_8b"], {})
    first, *extensions = [stage.config.data.sources for stage in stages]
    assert [(s.name, s.weight) for s in first] == [
        ("tiiuae/falcon-refinedweb", 0.7), ("allenai/c4", 0.2), ("bigcode/starcoderdata", 0.1),
    ]  # fmt: skip
    for sources in extensions:
        assert [s.weight for s in sources] == [0.3, 0.2, 0.1, 0.4]
        assert (sources[3].name, sources[3].min_tokens) == ("cerebras/SlimPajama-627B", 16384)


def test_scope_lasp_differs_in_rotation_alone():
    _, plain = load_recipe(CONFIGS["scope_llama3_8b"], {})
    _, lasp = load_recipe(CONFIGS["scope_lasp_llama3_8b"], {})
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


SMALL = {
    "scope": Position(rotary=NoRotary(), heads=Scope()),
    "rope": Position(rotary=Rope(theta=10000.0)),
    "nope": Position(rotary=NoRotary()),
    "alibi": Position(rotary=NoRotary(), bias=Alibi()),
    "uniform_alibi": Position(rotary=NoRotary(), bias=Alibi(uniform=True)),
}
"""Recipes that are small enough to need no --tiny: passkey_*, inside_* and probe_*."""
SMALL_NAMES = [
    *(f"{group}_{name}" for group in ("passkey", "inside") for name in ("scope", "rope", "nope", "alibi")),
    *(f"probe_{name}" for name in SMALL),
]
NAMES = sorted({name for name, path in CONFIGS.items() if "recipes" in path.parts} - set(SMALL_NAMES))
PARAMETERS = {"llama3_8b": 8_030_261_248, "qwen3_2b": 2_010_261_504, "smollm3_3b": 3_075_098_624}
"""Llama-3-8B's and SmolLM3's as published; Qwen3-2B's with the KV heads and feed-forward that the paper leaves open."""


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_builds_and_its_tiny_form_differs_in_size_alone(name):
    expected = next((n for model, n in PARAMETERS.items() if name.endswith(model)), None)
    recipe, stages = load_recipe(CONFIGS[name], {})
    assert recipe.name == name
    check_stages(stages)
    for stage in stages:
        check_processes(stage.config, recipe.gpus)
    for stage in stages:
        counted = count_parameters(ModelConfig.from_job(stage.config))
        if name.startswith("nano_"):
            assert round(counted / 1e6) == pytest.approx(212, abs=1)  # Table 3; 212,755,200
        else:
            assert counted == expected
    small_recipe, small = load_recipe(CONFIGS[name], {"tiny": True})
    assert small_recipe.name == name
    check_stages(small)
    for stage in small:
        check_processes(stage.config, 1)
    for stage, twin in zip(stages, small, strict=True):
        ours, theirs = stage.config, twin.config
        assert twin.name == stage.name
        assert theirs.optimizer == ours.optimizer
        assert theirs.lr_scheduler.decay_type == ours.lr_scheduler.decay_type
        assert bool(theirs.training.layers) == bool(ours.training.layers)
        for part in ("rotary", "heads", "bias", "lasp"):
            assert type(getattr(theirs.position, part)) is type(getattr(ours.position, part))
        assert theirs.position.embedding == ours.position.embedding
        assert theirs.position.rules == ours.position.rules
        assert theirs.architecture.qk_norm == ours.architecture.qk_norm
        assert theirs.architecture.tie_embeddings == ours.architecture.tie_embeddings
        assert count_parameters(ModelConfig.from_job(theirs)) < 1e6


@pytest.mark.parametrize(
    ("group", "parameters"),
    # Of the last, without the embedding: its tokenizer says how large it is.
    [("passkey", 574_432), ("inside", 1_837_184), ("probe", 4 * (4 * 64**2 + 3 * 64 * 192 + 2 * 64 + 2 * 8) + 64)],
    ids=lambda value: str(value),
)
def test_the_small_recipes_of_a_comparison_differ_in_position_alone(group, parameters):
    compared = []
    for full in (name for name in SMALL_NAMES if name.startswith(group)):
        recipe, stages = load_recipe(CONFIGS[full], {})
        assert recipe.name == full
        check_stages(stages)
        for number, stage in enumerate(stages):
            c = stage.config
            # RoPE's base grows with the context, where that is what is looked at.
            theta = 100_000.0 if full == "inside_rope" and number else 10_000.0
            position = SMALL[full.removeprefix(f"{group}_")]
            assert c.position == (Position(rotary=Rope(theta=theta)) if full.endswith("rope") else position)
            assert count_parameters(ModelConfig.from_job(c)) == pytest.approx(parameters, rel=2e-4)
            if group == "passkey":
                assert c.tokenizer.path == "runs/passkey/tokenizer"
                # With bos and eos a document is a row.
                assert [(s.min_tokens, s.max_tokens) for s in c.data.sources] == [(c.training.seq_len - 2,) * 2]
        compared.append([(s.config.training, s.config.optimizer, s.config.lr_scheduler, s.config.data) for s in stages])
    assert len(compared) >= 4
    assert all(stages == compared[0] for stages in compared)


def test_no_config_stands_unused():
    configs = ROOT / "configs"
    bases, seen = set(), [configs / "quickstart.toml", *(CONFIGS[name] for name in NAMES)]
    seen += [CONFIGS[name] for name in SMALL_NAMES]
    left = [*seen]
    while left:
        path = left.pop()
        values = tomllib.loads(path.read_text())
        for named in (values.get("base", []), values.get("tiny", {}).get("base", [])):
            for base in [named] if isinstance(named, str) else named:
                base = (path.parent / base).resolve()
                if base not in bases:
                    bases.add(base)
                    left.append(base)
    # These are built, and planned, by tests of their own.
    alone = {
        configs / "tiny.toml",
        configs / "corpora" / "long100.toml",
        *(configs / "sizes").glob("*.toml"),
        *(configs / "finetune").rglob("*.toml"),
    }
    assert set(configs.rglob("*.toml")) == {*seen, *bases, *alone}
    quickstart = [stage.config for stage in load_recipe(configs / "quickstart.toml", {})[1]]
    for config in [*quickstart, load_config(["--job.config_file", str(configs / "tiny.toml")])]:
        assert 5e5 < count_parameters(ModelConfig.from_job(config)) < 2e6


def test_lasp_is_table_4_with_five_arms():
    yarn = YarnRope(theta=5e5, factor=16.0, original_length=8192)
    arms = {
        "yarn_500k": Position(rotary=yarn),
        "yarn_2m": Position(rotary=replace(yarn, theta=2e6)),
        "lasp_base": Position(rotary=yarn, lasp=Lasp("base", 1.0, 16.0, 5e5, 2e6)),
        "lasp_scale": Position(rotary=yarn, lasp=Lasp("scale", 1.0, 16.0, 5e5, 2e6)),
        "lasp": Position(rotary=yarn, lasp=Lasp("both", 1.0, 16.0, 5e5, 2e6)),
        "yarn_500k_first8": Position(rotary=yarn),
        "yarn_500k_last8": Position(rotary=yarn),
    }
    trained = {"yarn_500k_first8": tuple(range(8)), "yarn_500k_last8": tuple(range(24, 32))}
    for name, position in arms.items():
        recipe, (stage,) = load_recipe(CONFIGS[f"{name}_llama3_8b"], {})
        c = stage.config
        assert recipe.gpus == 64
        assert c.checkpoint.initial_load_path == "assets/llama3"
        p, partial = c.parallelism, name in trained
        degrees = p.tensor_parallel_degree, p.pipeline_parallel_degree, p.context_parallel_degree
        assert degrees == ((8, 1, 4) if partial else (8, 4, 1))
        assert (c.training.seq_len, c.training.global_batch_size) == (96384, 32)
        assert 96384 * 32 * c.training.steps == pytest.approx(5e9, rel=1e-3)
        o = c.optimizer
        assert (o.kind, o.lr, o.beta1, o.beta2) == ("adamw", 3.6e-5, 0.9, 0.95)
        assert c.lr_scheduler.decay_type == "cosine"
        assert [s.min_tokens for s in c.data.sources] == [131072]
        assert c.position == position
        assert trained_layers(c) == trained.get(name)


def test_the_2b_models_are_appendix_d():
    positions = {
        "nope": Position(rotary=NoRotary()),
        "rope": Position(rotary=Rope(theta=10000.0)),
        "scope": Position(rotary=NoRotary(), heads=Scope(layout="group_balanced")),
    }
    for name, position in positions.items():
        _, (stage,) = load_recipe(CONFIGS[f"{name}_qwen3_2b"], {})
        t = stage.config.training
        assert (t.seq_len, t.steps, t.global_batch_size) == (4096, 100_000, 96)
        assert [s.name for s in stage.config.data.sources] == ["tiiuae/falcon-refinedweb"]
        assert stage.config.position == position
        assert stage.config.architecture.qk_norm


def test_nano_recipes_are_table_3_or_extend_it_and_cover_every_mechanism():
    used = set()
    for name in (name for name in NAMES if name.startswith("nano_")):
        recipe, (stage,) = load_recipe(CONFIGS[name], {})
        c, t = stage.config, stage.config.training
        if recipe.start:
            assert recipe.start == "runs/nano_rope/pretrain-1k/model"
            assert (t.seq_len, t.global_batch_size * t.seq_len) == (4096, 96 * 1024)
        else:
            assert (t.seq_len, t.steps, t.global_batch_size, c.optimizer.lr) == (1024, 40_000, 96, 3e-4)
        assert (c.optimizer.kind, c.optimizer.beta1, c.optimizer.beta2) == ("adamw", 0.9, 0.999)
        assert t.mixed_precision_param == "bfloat16"
        p = c.position
        used |= {type(p.rotary), type(p.heads), type(p.bias), type(p.lasp), p.embedding}
        used |= {LayerRule} if p.rules else set()
    mechanisms = {*get_args(Rotary), *get_args(Heads), *get_args(Bias), Lasp, LayerRule, "sinusoidal"}
    assert mechanisms <= used


def test_recipes_of_others_are_configs_alone():
    _, stages = load_recipe(CONFIGS["smollm3_3b"], {})
    assert [s.config.training.seq_len for s in stages] == [4096, 32768, 65536]
    for stage, theta in zip(stages, (5e4, 2e6, 5e6), strict=True):
        layers = ModelConfig.from_job(stage.config).layers()
        assert [n for n, layer in enumerate(layers) if layer.rotary == NoRotary()] == [3, 7, 11, 15, 19, 23, 27, 31, 35]
        assert {layer.rotary for layer in layers} == {NoRotary(), Rope(theta=theta)}
    _, stages = load_recipe(CONFIGS["prolong_llama3_8b"], {})
    assert [s.config.training.seq_len for s in stages] == [2**16, 2**19]
    assert [s.config.position for s in stages] == [Position(rotary=Rope(theta=theta)) for theta in (8e6, 1.28e8)]


@pytest.mark.parametrize(
    ("name", "position"),
    [
        ("rope", Position(rotary=Rope(theta=10000.0))),
        ("nope", Position(rotary=NoRotary())),
        ("alibi", Position(rotary=NoRotary(), bias=Alibi())),
    ],
)
def test_scopes_baselines_differ_in_position_alone(name, position):
    _, scope = load_recipe(CONFIGS["scope_llama3_8b"], {})
    _, baseline = load_recipe(CONFIGS[f"{name}_llama3_8b"], {})
    for ours, theirs in zip(scope, baseline, strict=True):
        assert theirs.config.position == position
        for section in ("training", "data", "optimizer", "lr_scheduler", "architecture"):
            assert getattr(ours.config, section) == getattr(theirs.config, section)


def test_the_window_baseline_goes_on_from_the_128k_rope_model():
    _, rope = load_recipe(CONFIGS["rope_llama3_8b"], {})
    recipe, (stage,) = load_recipe(CONFIGS["swa_llama3_8b"], {})
    assert recipe.start == str(rope[-1].model_dir)
    assert stage.config.position == Position(rotary=Rope(theta=10000.0), heads=SlidingWindow(window=8192))
    assert stage.config.data == rope[-1].config.data
    assert stage.config.training == rope[-1].config.training


EXTENSIONS = ["linear", "ntk", "dynamic", "yarn", "llama3", "longrope", "lasp"]
CHAINS = {"rope_llama3_8b": ["swa_llama3_8b"], "nano_rope": [f"nano_{name}" for name in EXTENSIONS]}
"""Recipe → the ones that start from its model."""


WHOLE = ["scope_llama3_8b", "scope_lasp_llama3_8b"]
"""Recipes whose tiny form another test runs with all of its steps."""


def test_the_command_runs_a_stage_in_a_process_of_its_own(tmp_path):
    options = ["--tiny", "--recipe.folder", str(tmp_path), "--training.steps", "2"]
    done = run([sys.executable, "-m", "launch.recipe", "nano_scope", *options])
    summary = json.loads((tmp_path / "nano_scope" / "summary.json").read_text())
    assert [stage["steps"] for stage in summary["stages"]] == [2]
    assert done.stdout.rstrip().endswith(f"model directory: {summary['model_dir']}")


@pytest.mark.parametrize("first", sorted({*NAMES} - {*WHOLE, *(name for chain in CHAINS.values() for name in chain)}))
def test_every_tiny_form_trains(first, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "farsight.launch.recipe.run.wait_for", lambda command: forked(command[2:], tmp_path / "printed").returncode
    )
    start = ""
    for name in [first, *CHAINS.get(first, [])]:
        options = ["--tiny", "--recipe.folder", str(tmp_path), "--recipe.perplexity_lengths", "1"]
        options += ["--recipe.start", start] if start else []
        # Weights of another seed than those it should start from: had it not loaded them, it would show.
        steps = ["--training.steps", "2", "--lr_scheduler.warmup_steps", "1", "--debug.seed", "1" if start else "0"]
        assert main([name, *options, *steps]) == 0
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        for stage in summary["stages"]:
            assert stage["steps"] == 2
            assert all(map(math.isfinite, [*stage["train_loss"], *stage["perplexity"].values()]))
        model = Path(summary["model_dir"])
        assert read_model_config(model).trained_length == summary["stages"][-1]["seq_len"]
        if start:
            # It went on from the other recipe's weights: two steps change a weight little.
            assert f'initial_load_path = "{start}"' in (model.parent / "stage.toml").read_text()
            before, after = (load_file(Path(d) / "model.safetensors")["lm_head.weight"] for d in (start, model))
            assert 0 < (before - after).abs().max() < 1e-2
        else:
            start = str(model)


@pytest.mark.parametrize("name", WHOLE)
def test_tiny_form_runs_and_is_skipped_once_finished(name, tmp_path, monkeypatch, capsys, caplog):
    command = [name, "--tiny", "--recipe.folder", str(tmp_path)]
    monkeypatch.setattr(
        "farsight.launch.recipe.run.wait_for", lambda command: forked(command[2:], tmp_path / "printed").returncode
    )
    assert main(command) == 0
    printed = capsys.readouterr().out
    root = tmp_path / name
    last = root / "adapt-128k" / "model"
    assert printed.rstrip().endswith(f"model directory: {last}")
    summary = json.loads((root / "summary.json").read_text())
    assert summary["model_dir"] == str(last)
    assert [s["seq_len"] for s in summary["stages"]] == [64, 128, 256]
    for stage in summary["stages"]:
        assert list(stage["perplexity"]) == [str(m * stage["seq_len"]) for m in (1, 2, 4)]
        assert len(stage["train_loss"]) == len(stage["val_loss"]) == 2
        assert stage["tokens_per_second"] > 0
    # Every stage on documents of its own, and the first two on the last one's too: as `farsight perplexity` measures them.
    texts = [Path(stage["perplexity_of"][0]) for stage in summary["stages"]]
    assert [path.parent.name for path in texts] == [stage["name"] for stage in summary["stages"]]
    for stage, own in zip(summary["stages"], texts, strict=True):
        arguments = [str(own.parent / "model"), "--documents", "--lengths", *stage["perplexity"]]
        for key, text in {"perplexity": own, "perplexity_last": texts[-1]}.items():
            perplexity([*arguments, "--data", str(text), "--json", str(tmp_path / "f.json")])
            measured = json.loads((tmp_path / "f.json").read_text())["lengths"]
            assert measured == pytest.approx(stage.get(key, stage["perplexity"]), rel=1e-5)
    assert (root / "loss.png").stat().st_size > 5000
    assert read_model_config(last).trained_length == 256
    model, config = load_model(last)
    assert max(model.layers["0"].attention.scopes_N.tolist()) == 256
    assert (config.position.lasp is not None) == ("lasp" in name)

    # The card tells of all three stages, and its lines of code run as they stand.
    history = json.loads((last / "farsight.json").read_text())["training"]
    assert [(run["seq_len"], run["steps"], run["tokens"]) for run in history] == [
        (64, 4, 4 * 8 * 64), (128, 3, 3 * 4 * 128), (256, 2, 2 * 2 * 256),
    ]  # fmt: skip
    assert [run["start"] for run in history][1:] == [str(root / n / "model") for n in ("pretrain-4k", "finetune-32k")]
    card = (last / "README.md").read_text()
    assert "| 256 | 2 | 512 | 1,024 | all | AdamW (0.9, 0.95)" in card
    assert f"{count_parameters(config):,} parameters" in card
    metadata = ModelCard(card).data.to_dict()
    assert {"farsight", "scope"} <= {*metadata["tags"]}
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    (tmp_path / "card.py").write_text(code)
    assert Forked([], 1, tmp_path / "printed", str(tmp_path / "card.py"), last).wait().returncode == 0

    # A stage begins where the last one ended, and what is finished is not run again.
    names = ["pretrain-4k", "finetune-32k", "adapt-128k"]
    before = [metrics(root / n) for n in names]
    shutil.rmtree(root / names[2])
    caplog.set_level("INFO")
    assert main(command) == 0
    assert caplog.text.count("is finished") == 2
    assert [[row["loss"] for row in metrics(root / n)] for n in names] == [[row["loss"] for row in b] for b in before]
