"""Packages that Farsight needs: the ones that training needs, and those of some features, by extra of pyproject.toml."""

import sys
from pathlib import Path

REQUIRED = {
    "torch", "sentencepiece", "tokenizers", "tensorboard", "safetensors", "numpy", "matplotlib", "tqdm",
    "jinja2", "huggingface_hub", "tomli_w", "xxhash",
}  # fmt: skip
EXTRAS = {
    "datasets": "data",
    "pyarrow": "data",
    "zstandard": "data",
    "bitsandbytes": "finetune",
    "peft": "finetune",
    "deepspeed": "deepspeed",
    "torchao": "float8",
    "lm_eval": "eval",
    "aiohttp": "serve",
    "transformers": "transformers",
    "accelerate": "transformers",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "s3fs": "s3",
    "gcsfs": "gcs",
    "flash_attn": "gpu",
}


def how_to_install(error: ModuleNotFoundError) -> str | None:
    """The sentence for a missing package; None for any other module, whose absence is a fault."""
    package = (error.name or "").partition(".")[0]
    if package in REQUIRED:
        return (
            f"This Python ({sys.executable}) has no {package}, which Farsight needs: in a checkout, run `make setup` and "
            "use .venv/bin/python; otherwise pip install Farsight in this environment."
        )
    if package not in EXTRAS:
        return None
    return f"This needs the package {package}, which is not installed: {install_command(EXTRAS[package])}"


def install_command(extra: str) -> str:
    """The command that adds an extra to this installation or checkout."""
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install --editable '{checkout}[{extra}]'"
    return f"pip install 'farsight[{extra}]'"
