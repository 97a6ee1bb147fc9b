"""Checkpoint → model directory."""

from functools import partial
from pathlib import Path

import torch

from farsight.checkpoints.cards.model import CONFIG, read_history
from farsight.checkpoints.checkpoint_tensors import checkpoint_tensors, read_tensor
from farsight.checkpoints.intact.check import refuse_damaged
from farsight.checkpoints.model_dir.api import SHARD_BYTES, write_model_dir
from farsight.data.tokenizers.tokenizer import find_tokenizer_dir
from farsight.model.build import ModelConfig


def checkpoint_to_model_dir(
    checkpoint: Path,
    out: Path,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    verify: bool = True,
) -> None:
    """Writes a model directory from a DCP checkpoint, holding one tensor at a time.

    Args:
        checkpoint: a `step-N` folder with `farsight.json`; the tokenizer is its own, or that of the run folder above.
        dtype: dtype of the weights written; None keeps the checkpoint's.
        verify: check the checkpoint's checksums first.

    Raises:
        ConfigError: not a complete, undamaged checkpoint of ours.
    """
    refuse_damaged(checkpoint, verify)
    config = ModelConfig.load(checkpoint / CONFIG)
    tensors = checkpoint_tensors(checkpoint, config, verify=False)
    write_model_dir(
        out,
        config,
        tensors,
        partial(read_tensor, checkpoint, tensors),
        find_tokenizer_dir(checkpoint),
        dtype,
        shard_bytes,
        read_history(checkpoint),
    )
