"""Model directory → checkpoint."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from farsight.checkpoints.cards.model import CONFIG, read_history
from farsight.checkpoints.checkpoint_tensors import parameter_shapes
from farsight.checkpoints.checksums import MANIFEST
from farsight.checkpoints.dcp import Writer
from farsight.checkpoints.model_dir.api import check_tensors, read_config
from farsight.checkpoints.model_dir.safetensors_files import TensorReader, refuse_non_finite
from farsight.data.tokenizers.tokenizer import find_tokenizer_dir, load_tokenizer_dir
from farsight.files import check_new_folder
from farsight.new_folder import new_folder
from farsight.progress import progress


def model_dir_to_checkpoint(model_dir: Path, out: Path, dtype: torch.dtype = torch.float32) -> None:
    """Writes a weights-only DCP checkpoint from a model directory, holding one tensor at a time.

    Raises:
        ConfigError: not a model directory, or one of a model that can't be built here.
    """
    check_new_folder(out)
    config = read_config(model_dir)
    files = check_tensors(model_dir, config)
    read = TensorReader(files)
    # Stand-ins without storage give the planner shapes and dtypes, in the order of the files.
    tensors: dict[str, Any] = {
        name: torch.empty((), dtype=dtype).expand(shape)
        for name, shape in sorted(parameter_shapes(config).items(), key=lambda item: files[item[0]])
    }
    total = sum(tensor.nbytes for tensor in tensors.values())
    with (
        new_folder(out, lambda there: False) as part,
        warnings.catch_warnings(),
        progress(total=total, unit="B", unit_scale=True, desc="convert") as bar,
    ):
        config.save(part / CONFIG, training=read_history(model_dir), checksums=MANIFEST)
        if find_tokenizer_dir(model_dir) == model_dir:
            load_tokenizer_dir(model_dir).save(part / "tokenizer")
        planner = _StreamingPlanner(read, tensors, bar.update)
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # intended
        # One file per tensor: the writer holds all of a file's tensors until the file is complete.
        dcp.save(tensors, storage_writer=Writer(part, single_file_per_rank=False), planner=planner, no_dist=True)
    read.close()


class _StreamingPlanner(dcp.DefaultSavePlanner):
    """Reads each tensor only when the writer asks for it, which it does one at a time."""

    def __init__(self, read: TensorReader, tensors: dict[str, Tensor], progress: Callable[[int], Any]) -> None:
        super().__init__()
        self.read, self.tensors, self.progress = read, tensors, progress

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        tensor = self.read(index.fqn).to(self.tensors[index.fqn].dtype)
        refuse_non_finite(self.read.files[index.fqn].key, tensor)
        self.progress(tensor.nbytes)
        return tensor
