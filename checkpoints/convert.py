"""Checkpoint ↔ model directory.

    farsight convert to-hf   runs/my_run/checkpoint/step-1000  OUT
    farsight convert from-hf MODEL_DIR                         OUT

`to-hf` writes a Hugging Face model directory from a training checkpoint of any parallel layout. `from-hf` writes a
checkpoint that a run can start from (`--checkpoint.initial_load_path OUT`); a run can also start from MODEL_DIR itself.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from farsight.checkpoints.cards.model import CONFIG, read_history
from farsight.checkpoints.checkpoint_tensors import checkpoint_tensors, parameter_shapes, read_tensor
from farsight.checkpoints.checksums import MANIFEST
from farsight.checkpoints.dcp import Writer
from farsight.checkpoints.intact import refuse_damaged
from farsight.checkpoints.model_dir.api import (
    SHARD_BYTES,
    TensorReader,
    check_tensors,
    read_model_config,
    write_model_dir,
)
from farsight.checkpoints.model_dir.safetensors_files import refuse_non_finite
from farsight.cli import command
from farsight.data.tokenizers.tokenizer import find_tokenizer_dir, load_tokenizer_dir
from farsight.files import check_new_folder
from farsight.model.build import ModelConfig
from farsight.new_folder import new_folder
from farsight.progress import progress

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def checkpoint_to_model_dir(
    checkpoint: Path,
    out: Path,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    verify: bool = True,
) -> None:
    """Writes a model directory from a DCP checkpoint, holding one tensor at a time.

    Args:
        checkpoint: a `step-N` folder with `farsight.json`; the tokenizer is its own or that of the run folder above it.
        dtype: of the weights written; None keeps the checkpoint's.
        verify: compare the checkpoint with its checksums first.

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


def model_dir_to_checkpoint(model_dir: Path, out: Path, dtype: torch.dtype = torch.float32) -> None:
    """Writes a weights-only DCP checkpoint from a model directory, holding one tensor at a time.

    Raises:
        ConfigError: not a model directory, or one of a model that can't be built here.
    """
    check_new_folder(out)
    config = read_model_config(model_dir)
    files = check_tensors(model_dir, config)
    read = TensorReader(files)
    # Stand-ins without storage, in the order of the files: they tell the planner shapes and dtypes.
    tensors: dict[str, Any] = {
        name: torch.empty((), dtype=dtype).expand(shape)
        for name, shape in sorted(parameter_shapes(config).items(), key=lambda item: files[item[0]])
    }
    total = sum(tensor.nbytes for tensor in tensors.values())
    with (
        new_folder(out, lambda there: False) as part,
        progress(total=total, unit="B", unit_scale=True, desc="convert") as bar,
    ):
        config.save(part / CONFIG, training=read_history(model_dir), checksums=MANIFEST)
        if find_tokenizer_dir(model_dir) == model_dir:
            load_tokenizer_dir(model_dir).save(part / "tokenizer")
        planner = _StreamingPlanner(read, tensors, bar.update)
        # A file a tensor: the writer keeps all of a file's tensors until the file is done.
        dcp.save(tensors, storage_writer=Writer(part, single_file_per_rank=False), planner=planner, no_dist=True)
    read.close()


class _StreamingPlanner(dcp.DefaultSavePlanner):
    """Reads each tensor when it is written; the writer asks for one after the other."""

    def __init__(self, read: TensorReader, tensors: dict[str, Tensor], progress: Callable[[int], Any]) -> None:
        super().__init__()
        self.read, self.tensors, self.progress = read, tensors, progress

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        tensor = self.read(index.fqn).to(self.tensors[index.fqn].dtype)
        refuse_non_finite(index.fqn, tensor)
        self.progress(tensor.nbytes)
        return tensor


@command
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="farsight convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("direction", choices=["to-hf", "from-hf"])
    parser.add_argument("source", type=Path, help="a step-N checkpoint folder (to-hf) or a model directory (from-hf)")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="dtype of the weights written (default: to-hf keeps the checkpoint's, from-hf float32)",
    )
    options = parser.parse_args(arguments)
    dtype = DTYPES.get(options.dtype)
    check_new_folder(options.out)
    if options.direction == "to-hf":
        checkpoint_to_model_dir(options.source, options.out, dtype)
    else:
        model_dir_to_checkpoint(options.source, options.out, dtype or torch.float32)
    print(options.out)


if __name__ == "__main__":
    main()
