"""Recipes fitted to the GPUs at hand: every shipped stage on 1 to 256 of them, what is kept, what is refused, and equal losses."""

import dataclasses
import functools
import math
import re

import pytest

from farsight.configs.load import build_config
from farsight.configs.shipped import shipped_configs
from farsight.configs.typed import to_toml
from farsight.errors import ConfigError
from farsight.launch.plan.fit import LAYOUT, fit
from farsight.launch.plan.hardware import GPUS, Machine
from farsight.launch.plan.memory import memory_of
from farsight.launch.plan.run import Run
from farsight.launch.plan.suggest import as_options
from farsight.launch.recipe.__main__ import main as recipe_main
from farsight.launch.recipe.gpus import fit_stages, machine_of, ranks_of
from farsight.launch.recipe.run import _learns_otherwise
from farsight.training.stages import load_recipe
from tests.running import metrics, train

CONFIGS = {name: path for name, path in shipped_configs().items() if "recipes" in path.parts}
COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256)
H100 = Machine("h100-80g", GPUS["h100-80g"])


@functools.cache
def recipe_of(name):
    return load_recipe(CONFIGS[name], {})


def without_layout(config):
    """The settings that a fit must not touch, with the number of sequences in a step filled in."""
    values = dataclasses.asdict(config)
    for name in (*LAYOUT, "training.global_batch_size"):
        section, key = name.split(".")
        values[section].pop(key)
    return values


def sizes(config):
    """Everything that a layout depends on."""
    p = dataclasses.astuple(config.parallelism)
    return p, config.architecture, config.training.local_batch_size, config.training.global_batch_size, config.training.seq_len, config.training.layers  # fmt: skip


DIFFERENT = {sizes(stage.config): (name, number) for name in CONFIGS for number, stage in enumerate(recipe_of(name)[1])}
"""A recipe and a stage for each set of sizes."""


@pytest.mark.parametrize(("name", "number"), DIFFERENT.values())
@pytest.mark.parametrize("machine", [None, H100], ids=["any GPU", "h100-80g"])
def test_every_shipped_stage_fits_or_says_what_does(name, number, machine):
    """By arithmetic: ranks × rows × passes are the step's sequences, and nothing else of the config differs."""
    recipe, stages = recipe_of(name)
    stage = dataclasses.replace(stages[number])
    t, p = stage.config.training, stage.config.parallelism
    shared = p.tensor_parallel_degree * p.pipeline_parallel_degree * p.context_parallel_degree
    batch = t.global_batch_size if t.global_batch_size > 0 else t.local_batch_size * recipe.gpus // shared
    for gpus in COUNTS:
        try:
            (fitted,), said = fit_stages(recipe, [stage], gpus, machine, ())
        except ConfigError as error:
            text = str(error)
            assert text.startswith(f"stage {stage.name}: as written, ")
            # Pipelines alone divide by three; tied embeddings rule them out, and small batches have too few rows for them.
            three = gpus % 3 == 0 and "divides" in text
            if more := re.search(r"fits the memory of h100-80g either: (\d+) of them do, or", text):
                assert gpus < 4
                fit(stage.config, int(more[1]), machine, planned=recipe.gpus)
            else:
                assert three, text
                assert stage.config.architecture.tie_embeddings or batch < 32, text
            if three:
                assert f"use {gpus * 2 // 3} or {gpus * 4 // 3} GPUs" in text
            continue
        t, p = fitted.config.training, fitted.config.parallelism
        shared = p.tensor_parallel_degree * p.pipeline_parallel_degree * p.context_parallel_degree
        ranks, rest = divmod(gpus, shared)
        rows = batch // ranks
        assert (rest, rows * ranks, rows % t.local_batch_size) == (0, batch, 0)
        assert t.global_batch_size in (batch, -1)
        assert t.global_batch_size == batch or t.local_batch_size * ranks == batch
        assert math.prod((ranks, t.local_batch_size, rows // t.local_batch_size)) == batch
        assert without_layout(fitted.config) == without_layout(stage.config)
        if gpus == recipe.gpus:
            assert fitted.config == stage.config
        assert bool(said) == (fitted.config != stage.config)
        assert not said or f"stage {stage.name} fitted to {gpus} GPU" in said[0]
        if machine is not None and stage.config.architecture.vocab_size:
            peak = max(memory.peak for memory in memory_of(Run.of(fitted.config, gpus)))
            assert peak <= machine.device.usable


def stage_of(name, number):
    recipe, stages = recipe_of(name)
    return stages[number].config, recipe.gpus


@pytest.mark.parametrize(
    ("name", "number", "gpus", "machine", "options"),
    [
        ("scope_llama3_8b", 0, 64, None, "--training.local_batch_size 2"),
        ("scope_llama3_8b", 2, 128, None, "--parallelism.context_parallel_degree 4"),  # rows run out
        ("lasp_llama3_8b", 0, 128, None, "--training.local_batch_size 8"),  # the paper's degrees stay
        ("inside_rope", 0, 4, None, "--training.global_batch_size 16 --training.local_batch_size 4"),
        ("scope_llama3_8b", 2, 32, H100, ""),
        ("scope_llama3_8b", 2, 8, H100, "--parallelism.context_parallel_degree 2"),
        ("scope_llama3_8b", 2, 2, H100, "--training.enable_cpu_offload true"),
    ],
)
def test_what_is_changed(name, number, gpus, machine, options):
    config, planned = stage_of(name, number)
    found = fit(config, gpus, machine, planned=planned)
    assert as_options(found.options) == options
    assert bool(found.why) == bool(options)


def test_sequences_that_context_parallelism_can_not_cut_are_cut_by_tensor_parallelism():
    """A length of 500 tokens is no multiple of 8 spans: four ranks take two spans each."""
    settings = {"training": {"seq_len": 500, "local_batch_size": 1, "global_batch_size": 2}, "model": {"flavor": "8b"}}
    found = fit(build_config(settings), 8, None)
    p = found.config.parallelism
    assert p.tensor_parallel_degree > 1
    assert p.tensor_parallel_degree * p.context_parallel_degree == 4
    with pytest.raises(
        ConfigError,
        match=r"divides 2 sequences of 500 tokens with parallelism\.tensor_parallel_degree as given: use 5 or 10 GPUs",
    ):
        fit(
            build_config({**settings, "architecture": {"tie_embeddings": True}}),
            8,
            None,
            {"parallelism.tensor_parallel_degree"},
        )


def test_what_the_command_line_says_stays():
    config, planned = stage_of("scope_llama3_8b", 2)
    for option, value in (("context_parallel_degree", 1), ("tensor_parallel_degree", 2)):
        config, _ = stage_of("scope_llama3_8b", 2)
        parallelism = dataclasses.replace(config.parallelism, **{option: value})
        given = dataclasses.replace(config, parallelism=parallelism)
        found = fit(given, 128, None, {f"parallelism.{option}"}, planned)
        assert getattr(found.config.parallelism, option) == value
    everything = {
        "parallelism.context_parallel_degree",
        "parallelism.tensor_parallel_degree",
        "parallelism.pipeline_parallel_degree",
    }
    with pytest.raises(ConfigError, match=r"divides 32 sequences of 131,072 tokens with .* as given: use 32 GPUs"):
        fit(config, 64, None, everything, planned)
    with pytest.raises(ConfigError, match=r"fits the memory of h100-80g either: 16 of them do"):
        fit(config, 8, H100, {*everything, "training.enable_cpu_offload"}, planned)


def test_the_number_of_ranks(monkeypatch):
    assert [ranks_of(n, None, None) for n in (None, 3)] == [1, 3]
    nodes = "--nnodes {} --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:29500"
    assert ranks_of(None, nodes.format(4), None) == 32
    assert ranks_of(None, nodes.format("2:4"), None) is None  # as many nodes as come
    assert ranks_of(None, "--standalone --nproc-per-node=2", None) == 2
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    assert ranks_of(None, None, "srun python") is None
    monkeypatch.setenv("SLURM_NTASKS", "48")
    assert ranks_of(None, None, "srun python") == 48


def test_the_kind_of_gpu():
    assert machine_of("any") is None
    assert machine_of("a100-40g").gpu.memory_gib == 40
    with pytest.raises(ConfigError, match="Did you mean 'h100-80g'"):
        machine_of("h100")


def test_a_kind_of_gpu_whose_number_is_not_known_is_refused(capsys):
    """Nothing would be fitted to it."""
    with pytest.raises(SystemExit):
        recipe_main(["scope_llama3_8b", "--dry-run", "--launcher", "srun python", "--gpu", "a100-80g"])
    assert "only the launcher knows the number of GPUs" in capsys.readouterr().err


def test_a_finished_stage_is_not_called_changed_for_its_layout():
    config, planned = stage_of("scope_llama3_8b", 2)
    other = fit(config, 128, None, planned=planned).config
    assert other != config
    assert not _learns_otherwise(to_toml(other), config)
    assert _learns_otherwise(
        to_toml(other), dataclasses.replace(config, training=dataclasses.replace(config.training, seq_len=4096))
    )
    small, planned = stage_of("inside_rope", 0)
    assert not _learns_otherwise(to_toml(fit(small, 4, None, planned=planned).config), small)


@pytest.mark.parametrize("batch", [4, 1], ids=["fewer rows a rank", "rows run out"])
def test_a_fitted_run_on_two_ranks_has_the_losses_of_one(tmp_path, batch):
    given = [
        f"--training.local_batch_size={batch}",
        f"--training.global_batch_size={batch}",
        "--training.steps=4",
        "--validation.freq=2",
    ]
    train(tmp_path / "one", *given)
    config = build_config({"training": {"seq_len": 64, "local_batch_size": batch, "global_batch_size": batch}})
    options = fit(config, 2, None, {"parallelism.tensor_parallel_degree"}, planned=1).options
    assert options == ({"training.local_batch_size": 2} if batch == 4 else {"parallelism.context_parallel_degree": 2})
    train(tmp_path / "two", *given, *(f"--{name}={value}" for name, value in options.items()), ranks=2)
    for key in ("loss", "val_loss"):
        one, two = ([row[key] for row in metrics(tmp_path / run, key)] for run in ("one", "two"))
        assert len(one) >= 3
        assert two == pytest.approx(one, rel=2e-6)
