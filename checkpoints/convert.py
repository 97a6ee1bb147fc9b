"""Checkpoint ↔ model directory.

    python -m checkpoints.convert to-hf   runs/my_run/checkpoint/step-1000  OUT
    python -m checkpoints.convert from-hf MODEL_DIR                         OUT

`to-hf` writes a Hugging Face model directory from a training checkpoint of any parallel layout. `from-hf` writes a
checkpoint that a run can start from (`--checkpoint.initial_load_path OUT`); a run can also start from MODEL_DIR itself.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from tqdm import tqdm

from checkpoints.manager import COMPLETE
from checkpoints.model_dir import CONFIG, SHARD_BYTES, load_model, write_model_dir
from configs.load import ConfigError
from model.build import ModelConfig, build_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def checkpoint_to_model_dir(
    checkpoint: Path, out: Path, dtype: torch.dtype | None = None, shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes a model directory from a DCP checkpoint, holding one output shard's tensors at a time.

    Args:
        checkpoint: a `step-N` folder with `farsight.json`; the tokenizer is looked for in the run folder above it.
        dtype: of the weights written; None keeps the checkpoint's.

    Raises:
        ConfigError: not a complete checkpoint of ours.
    """
    for name in (COMPLETE, CONFIG):
        if not (checkpoint / name).is_file():
            raise ConfigError(f"{checkpoint} has no {name}: it is not a complete checkpoint folder (step-N).")
    config = ModelConfig.load(checkpoint / CONFIG)
    tokenizer = checkpoint.parent.parent / "tokenizer"
    write_model_dir(
        out,
        config,
        _read_tensors(checkpoint, config, shard_bytes),
        tokenizer_dir=tokenizer if tokenizer.is_dir() else None,
        dtype=dtype,
        shard_bytes=shard_bytes,
    )


def _read_tensors(checkpoint: Path, config: ModelConfig, batch_bytes: int) -> Iterator[tuple[str, Tensor]]:
    """The model's tensors in the model's order, read in batches of about `batch_bytes`."""
    metadata: dict[str, Any] = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    with torch.device("meta"):
        names = [name for name, _ in build_model(config).named_parameters()]
    if missing := [name for name in names if name not in metadata]:
        raise ConfigError(f"{checkpoint} lacks {len(missing)} of the model's tensors, among them {missing[0]}.")
    batch: dict[str, Tensor] = {}
    size = 0
    for name in tqdm(names, unit="tensor", desc="convert", disable=not sys.stderr.isatty()):
        tensor = torch.empty(metadata[name].size, dtype=metadata[name].properties.dtype)
        nbytes = tensor.numel() * tensor.element_size()
        if batch and size + nbytes > batch_bytes:
            yield from _load(batch, checkpoint)
            batch, size = {}, 0
        batch[name], size = tensor, size + nbytes
    yield from _load(batch, checkpoint)


def _load(batch: dict[str, Tensor], checkpoint: Path) -> Iterable[tuple[str, Tensor]]:
    dcp.load(batch, checkpoint_id=checkpoint, no_dist=True)
    return batch.items()


def model_dir_to_checkpoint(model_dir: Path, out: Path, dtype: torch.dtype = torch.float32) -> None:
    """Writes a weights-only DCP checkpoint from a model directory.

    Raises:
        ConfigError: not a model directory, or one of a model that can't be built here.
    """
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} exists and is not empty; name a new folder.")
    model, config = load_model(model_dir, dtype=dtype)
    out.mkdir(parents=True, exist_ok=True)
    config.save(out / CONFIG)
    dcp.save(dict(model.state_dict()), checkpoint_id=out, no_dist=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m checkpoints.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
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
    try:
        if options.direction == "to-hf":
            if options.out.exists() and not (options.out / CONFIG).is_file() and any(options.out.iterdir()):
                raise ConfigError(f"{options.out} exists and is no model directory of ours; name a new folder.")
            checkpoint_to_model_dir(options.source, options.out, dtype)
        else:
            model_dir_to_checkpoint(options.source, options.out, dtype or torch.float32)
    except ValueError as error:  # ConfigError, and the tokenizer's
        sys.exit(str(error))
    print(options.out)


if __name__ == "__main__":
    main()
