"""Saving and finding a run's checkpoints: torchtitan's manager, with what it lacks.

- `farsight.json` and the resolved config lie beside every checkpoint.
- A first save that was interrupted does not hide the weights the run was to start from.
- What to start from may be a model directory or a checkpoint, told apart by looking.
"""

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.components.checkpoint import CheckpointManager

from checkpoints.model_dir import CONFIG, check_tensors, read_model_config
from checkpoints.names import from_hf_name, to_hf_name
from configs.load import ConfigError, to_toml
from configs.schema import JobConfig
from model.build import ModelConfig

COMPLETE = ".metadata"
"""DCP writes this file last: a step folder without it was interrupted."""


class HuggingFaceAdapter:
    """Renames a state dict for torchtitan, which then reads each rank's part of every tensor from safetensors."""

    fqn_to_index_mapping = None

    def __init__(self, model_args: Any, hf_assets_path: str | None) -> None:
        self.hf_assets_path = hf_assets_path

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {to_hf_name(name): tensor for name, tensor in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return {str(from_hf_name(name)): tensor for name, tensor in hf_state_dict.items()}

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        from torch.distributed.checkpoint import HuggingFaceStorageReader

        return HuggingFaceStorageReader(path)


class RunCheckpoints(CheckpointManager):
    """torchtitan's checkpoint manager for one run folder.

    Args:
        config: the whole job's config; saved beside each checkpoint.
        parts: what torchtitan's manager takes (`dataloader`, `model_parts`, `optimizers`, `lr_schedulers`, `states`).
    """

    initial_load_path: str | None
    exclude_from_loading: list[str]

    def __init__(self, config: JobConfig, **parts: Any) -> None:
        self.config, self.model_config = config, ModelConfig.from_job(config)
        super().__init__(
            **parts,
            checkpoint_config=config.checkpoint,
            sd_adapter=HuggingFaceAdapter(None, None),  # type: ignore[arg-type]
            base_folder=config.job.dump_folder,
        )

    def load(self, step: int = -1) -> bool:
        """Loads this run's newest complete checkpoint, or what `checkpoint.initial_load_path` names.

        Raises:
            ConfigError: a start that does not exist or does not fit the model.
        """
        if not self.enable:
            return False
        discard_incomplete(Path(self.folder))
        resumes = Path(self.folder).is_dir()
        if not resumes and self.initial_load_path:
            self._prepare_initial_load(Path(self.initial_load_path))
        if resumes:
            found = self._find_load_step() if step == -1 else step
            self.states["dataloader"].check_checkpoint(self._create_checkpoint_id(found))
            # Meant for the start from another run; a run that resumes itself needs all of its state.
            self.exclude_from_loading = []
        # Both are for a start, and torchtitan warns when they are set while resuming, as they always are.
        self.initial_load_path = None if resumes else self.initial_load_path
        return super().load(step)

    def _prepare_initial_load(self, start: Path) -> None:
        if not start.is_dir():
            raise ConfigError(f"checkpoint.initial_load_path = {start} does not exist.")
        self.initial_load_in_hf = not (start / COMPLETE).is_file()
        source = read_model_config(start)
        if source.architecture != self.model_config.architecture:
            raise ConfigError(
                f"checkpoint.initial_load_path = {start} holds another architecture:\n"
                f"  there: {source.architecture}\n  here:  {self.model_config.architecture}"
            )
        if self.initial_load_in_hf:
            check_tensors(start, source)

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Saves when the step is due, or always with `last_step`; the config goes first, so that a complete
        checkpoint always has it."""
        if self._should_save(curr_step, last_step) and dist.get_rank() == 0:
            folder = Path(self._create_checkpoint_id(curr_step))
            folder.mkdir(parents=True, exist_ok=True)
            self.model_config.save(folder / CONFIG, job=to_toml(self.config))
        super().save(curr_step, last_step)
        if last_step:
            self._purge_stale_checkpoints()

    def last_saved(self) -> Path | None:
        """The newest complete checkpoint of the run, if there is one."""
        step = self._find_load_step() if self.enable else -1
        return None if step == -1 else Path(self._create_checkpoint_id(step))


def discard_incomplete(folder: Path) -> None:
    """Removes step folders whose save was interrupted, and the folder itself if none is left. All ranks call it.

    torchtitan takes an existing folder as a sign of checkpoints in it, and would start from random weights.
    """
    if dist.get_rank() == 0 and folder.is_dir():
        for step in folder.glob("step-*"):
            if not (step / COMPLETE).is_file():
                shutil.rmtree(step)
        if not any(folder.iterdir()):
            folder.rmdir()
    if dist.get_world_size() > 1:
        dist.barrier()
