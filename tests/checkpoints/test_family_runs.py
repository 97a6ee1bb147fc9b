"""Whole runs that start from a family's directory: the trainer reads it, and writes the class that it came from."""

import json
import shutil

import pytest
import torch

from farsight.benchmarks.families.cells import hf_load, largest
from farsight.benchmarks.families.models import LENGTH, tokens, write_hf
from farsight.checkpoints.load import load_model, read_model_config
from farsight.configs.typed import to_dict
from tests.running import SETTINGS, metrics, train

TRAINING = """
[training]
seq_len = 64
local_batch_size = 2
global_batch_size = 4
steps = 2
mixed_precision_param = "float32"

[checkpoint]
interval = 1
"""


def inline(value):
    """A value of a config as TOML in one line."""
    if isinstance(value, dict):
        return (
            "{ " + ", ".join(f"{name} = {inline(inner)}" for name, inner in value.items() if inner is not None) + " }"
        )
    return "[" + ", ".join(map(inline, value)) + "]" if isinstance(value, list | tuple) else json.dumps(value)


@pytest.mark.parametrize("name", ["phi3", "gemma3"])
def test_a_run_from_a_directory_keeps_its_class(tmp_path, name):
    """Each rank reads its part of each tensor, of fused ones too."""
    write_hf(name, tmp_path / "hf")
    start = read_model_config(tmp_path / "hf")
    parts = [f"{part} = {inline(to_dict(getattr(start, part)))}" for part in ("architecture", "position")]
    config = "\n".join([*parts, SETTINGS, TRAINING, f'initial_load_path = "{tmp_path / "hf"}"'])
    train(tmp_path / "one", config=config)
    train(tmp_path / "two", ranks=2, config=config)
    shutil.rmtree(tmp_path / "two" / "checkpoint" / "step-2")
    train(tmp_path / "two", ranks=2, config=config)  # from step 1
    for one, two in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    rows, theirs = tokens(), hf_load(tmp_path / "two" / "model")
    ours, end = load_model(tmp_path / "two" / "model", length=LENGTH)
    before, _ = load_model(tmp_path / "hf", length=LENGTH)
    assert end.family == theirs.config.model_type == start.family
    with torch.no_grad():
        assert largest(theirs(rows).logits, ours(rows)) < 1e-4
        assert largest(before(rows), ours(rows)) > 0.01
