"""Small bases to fine-tune, and adapted models as the trainer builds them, in one process."""

from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor

from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.configs.finetuning import Base, FinetuneConfig, FinetuneTraining, GarfaTraining, Lora
from farsight.configs.schema import Architecture, Llama3Rope, Position, Tokenizer
from farsight.model.build import ModelConfig, build_model
from farsight.model.llama import Llama
from farsight.training.finetune.model import build_adapted, with_base

ARCHITECTURE = Architecture(vocab_size=320, dim=64, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=96)


def write_base(
    directory: Path,
    position: Position | None = None,
    architecture: Architecture = ARCHITECTURE,
    length: int = 128,
    shard_bytes: int = 10**9,
    scale: float = 4.0,
    seed: int = 0,
) -> Llama:
    """A model directory of random weights, larger than initial ones so that layers (at 16 positions too) matter; returns
    its model."""
    config = ModelConfig(
        architecture, position or Position(rotary=Llama3Rope(original_length=64)), length, init_seed=seed
    )
    model = build_model(config)
    model.init_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("layers") and parameter.dim() == 2:
                parameter.mul_(scale)
    write_model_dir(directory, config, dict(model.named_parameters()), shard_bytes=shard_bytes)
    return model


def finetune_config(base: Path, quantization: str = "nf4", dtype: str = "bfloat16", **parts) -> FinetuneConfig:
    """A config of that base; `parts` replace LoRA of rank 4 without dropout, GARFA, and other sections."""
    own = {
        "lora": Lora(rank=4, alpha=8.0, dropout=0.0),
        "garfa": GarfaTraining(),
        "training": FinetuneTraining(seq_len=64),
    }
    config = FinetuneConfig(
        base_model=Base(str(base), quantization, dtype=dtype), tokenizer=Tokenizer(kind="bytes"), **(own | parts)
    )
    return with_base(config)


def adapted_model(config: FinetuneConfig, trained: bool = True) -> Llama:
    """The model that the trainer builds; with `trained`, LoRA's B and GARFA's w have left where they start."""
    with torch.device("meta"):
        model = build_adapted(config)
    model.to_empty(device="cpu")
    model.init_weights(torch.device("cpu"))
    if trained:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B." in name:
                    parameter.normal_(std=0.05, generator=generator)
                elif name.endswith("garfa.raw"):
                    parameter.add_(torch.randn(parameter.shape, generator=generator))
    return model


def precision(config: FinetuneConfig):
    """The context of forward passes, as the trainer has it."""
    return torch.autocast("cpu", torch.bfloat16) if config.base_model.dtype == "bfloat16" else nullcontext()


def tokens(rows: int = 2, length: int = 48, seed: int = 0) -> Tensor:
    return torch.randint(0, ARCHITECTURE.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))
