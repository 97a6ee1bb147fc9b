"""Exports models, and runs `by_transformers.py` on them in processes that cannot import our packages.

A process has one version of `transformers`: the newest, that of this Python, or the oldest that exports are tested with,
which `make setup` puts into a folder of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.checkpoints.model_dir.hf_config import TRANSFORMERS
from farsight.configs.schema import Architecture, Position
from farsight.model.build import ModelConfig, build_model

ROOT = Path(__file__).parents[2]
SHAPE = {"vocab_size": 96, "dim": 64, "n_layers": 4, "n_heads": 8, "n_kv_heads": 4, "head_dim": 8, "ffn_dim": 96}
TRAINED = 48
OLDEST = Path(sys.prefix) / f"transformers-{TRANSFORMERS[0]}"
VERSIONS = [
    pytest.param(
        "oldest", marks=pytest.mark.skipif(not OLDEST.is_dir(), reason=f"{OLDEST} is not there; make setup installs it")
    ),
    "newest",
]

Results = dict[str, dict[str, torch.Tensor]]

# The checkout and its editable install are hidden from the process.
START = f"""
import runpy, sys
sys.meta_path = [f for f in sys.meta_path if "editable" not in f"{{f}} {{getattr(f, '__module__', '')}}"]
older, script, *sys.argv[1:] = sys.argv[1:]
if older:  # whose hub client is too old for today's datasets
    sys.modules["datasets"] = None
sys.path = [older] * bool(older) + [p for p in sys.path if p != {str(ROOT)!r}]
runpy.run_path(script, run_name="__main__")
"""


def export(folder: Path, position: Position, tokenizer_dir: Path | None = None, **shape) -> ModelConfig:
    """Writes a model with random weights and returns its config."""
    config = ModelConfig(Architecture(**{**SHAPE, **shape}), position, trained_length=TRAINED)
    model = build_model(config)
    model.init_weights()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # At initialisation attention is almost uniform, and positions hardly matter.
            if parameter.dim() > 1:
                parameter.normal_(std=0.15, generator=generator)
            else:  # biases and norms, each in its usual range
                centre = 1.0 if name.endswith("norm.weight") and not config.architecture.zero_centered_norms else 0.0
                parameter.normal_(centre, 0.2, generator=generator)
    write_model_dir(folder, config, model.state_dict(), tokenizer_dir=tokenizer_dir)
    return config


def run_elsewhere(jobs: dict[Path, str], version: str) -> Results:
    """Runs a function of `by_transformers.py` on each folder and returns the tensors that it saved, by folder name.

    One process serves all folders, because importing transformers takes several seconds.
    """
    (parent,) = {folder.parent for folder in jobs}
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    environment |= {"HF_HOME": str(parent / f"hf-{version}"), "HF_HUB_OFFLINE": "1"}
    older, script = str(OLDEST) * (version == "oldest"), Path(__file__).with_name("by_transformers.py")
    outs = {folder: folder.with_name(f"{folder.name}-{version}.safetensors") for folder in jobs}
    tasks = [f"{function}:{folder}:{outs[folder]}" for folder, function in jobs.items()]
    # -P and another folder: modules come neither from the script's folder nor from here; -S would hide pip's packages.
    done = subprocess.run(
        [sys.executable, "-P", "-c", START, older, str(script), version, *tasks],
        cwd=parent, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return {folder.name: load_file(out) for folder, out in outs.items()}
