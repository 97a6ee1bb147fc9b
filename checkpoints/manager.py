"""Saving and finding a run's checkpoints: torchtitan's manager, with what it lacks.

- `farsight.json` and the resolved config lie beside every checkpoint.
- A first save that was interrupted does not hide the weights the run was to start from.
- What to start from may be a model directory or a checkpoint, told apart by looking.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.components.checkpoint import CheckpointManager

from checkpoints.card import CONFIG, read_history, training_entry
from checkpoints.model_dir import check_tensors, read_model_config
from checkpoints.names import from_hf_name, to_hf_name
from configs.load import ConfigError, to_toml
from configs.schema import JobConfig
from model.build import ModelConfig, trained_layers
from model.layers import select_layers

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
        # The runs that trained the weights before this one, and how far it was when its settings were last changed.
        self.history: list[dict[str, Any]] = []
        self.done = (0, 0)
        super().__init__(
            **parts,
            checkpoint_config=config.checkpoint,
            sd_adapter=HuggingFaceAdapter(None, None),  # type: ignore[arg-type]  # has the methods that are called
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
            self.history = read_history(Path(self.initial_load_path))
        if resumes:
            step = self._step_to_resume(step)
            self.states["dataloader"].check_checkpoint(self._create_checkpoint_id(step))
            # Both are for the start from another run; a run that resumes itself needs all of its state.
            self.exclude_from_loading, self.initial_load_path = [], None
            loaded = super().load(step)
            self._continue_history(Path(self._create_checkpoint_id(step)), step)
            return loaded
        # Another run's optimizer brings its moments, and with them its learning rate and weight decay: ours stay.
        groups = [group for optimizer in self.states["optimizer"] for group in optimizer.param_groups]
        settings = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        loaded = super().load(step)
        groups = [group for optimizer in self.states["optimizer"] for group in optimizer.param_groups]
        for group, own in zip(groups, settings, strict=True):
            group.update(own)
        return loaded

    def _continue_history(self, checkpoint: Path, step: int) -> None:
        """Goes on with the run's own entry, or starts a further one where its settings have changed since."""
        history, tokens = read_history(checkpoint), self._tokens_seen()
        own = history[-1] if history else None
        new = training_entry(self.config, 0, 0)
        if own is None:  # saved before histories were kept
            self.history, self.done = [], (0, 0)
        elif all(own.get(key) == new[key] for key in new if key not in ("start", "steps", "tokens")):
            self.history, self.done = history[:-1], (step - own["steps"], tokens - own["tokens"])
        else:
            self.history, self.done = history, (step, tokens)

    def _tokens_seen(self) -> int:
        return self.states["train_state"].state_dict()["tokens_seen"]

    def _refuse_other_layers(self, checkpoint: Path) -> None:
        """An optimizer's state goes on only where all layers that train now were trained before."""
        before = (read_history(checkpoint) or [{}])[-1].get("layers", "all")
        ours, n_layers = trained_layers(self.config), self.model_config.architecture.n_layers
        if before != "all" and not (ours is not None and {*ours} <= select_layers(before, n_layers)):
            raise ConfigError(
                f"{checkpoint} holds optimizer state of layers {before} alone, and training.layers = "
                f"{self.config.training.layers!r} asks for others: set it to {before!r}, or start a new run from the "
                "model directory."
            )

    def _step_to_resume(self, asked: int) -> int:
        """The step to go on from, which has to be the newest: a run does not write over its own later steps."""
        steps = sorted(int(path.name.removeprefix("step-")) for path in Path(self.folder).glob("step-*"))
        if asked not in (-1, *steps):
            raise ConfigError(
                f"checkpoint.load_step = {asked}: {self.folder} holds steps {', '.join(map(str, steps))}."
            )
        if not steps or asked not in (-1, steps[-1]):
            raise ConfigError(
                f"checkpoint.load_step = {asked}, but {self.folder} goes on to step {steps[-1] if steps else 'none'}. "
                "To go back, name the earlier step in checkpoint.initial_load_path of a run in another job.dump_folder, "
                "or remove the later steps."
            )
        saved = ModelConfig.load(Path(self._create_checkpoint_id(steps[-1])) / CONFIG)
        self._refuse_another_model(saved, self._create_checkpoint_id(steps[-1]))
        self._refuse_other_layers(Path(self._create_checkpoint_id(steps[-1])))
        return steps[-1]

    def _refuse_another_model(self, saved: ModelConfig, where: str) -> None:
        """What weights depend on may not change: their shapes, and which head has which scope."""
        theirs, ours = saved.architecture, self.model_config.architecture
        if dataclasses.replace(theirs, depth_init=ours.depth_init) != ours:
            raise ConfigError(f"{where} holds another architecture:\n  there: {theirs}\n  here:  {ours}")
        layouts = [getattr(c.position.heads, "layout", None) for c in (saved, self.model_config)]
        if None not in layouts and layouts[0] != layouts[1]:
            raise ConfigError(
                f"{where} was trained with position.heads.layout = {layouts[0]!r}, here it is {layouts[1]!r}: "
                "the heads would change places. Set it back."
            )

    def _prepare_initial_load(self, start: Path) -> None:
        if not start.is_dir():
            raise ConfigError(f"checkpoint.initial_load_path = {start} does not exist.")
        self.initial_load_in_hf = not (start / COMPLETE).is_file()
        source = read_model_config(start)
        self._refuse_another_model(source, f"checkpoint.initial_load_path = {start}")
        if self.initial_load_in_hf:
            check_tensors(start, source)
        elif not self.initial_load_model_only:
            self._refuse_other_layers(start)

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Saves when the step is due, or always with `last_step`; the config goes first, so that a complete
        checkpoint always has it."""
        if self._should_save(curr_step, last_step) and dist.get_rank() == 0:
            folder = Path(self._create_checkpoint_id(curr_step))
            folder.mkdir(parents=True, exist_ok=True)
            steps, tokens = curr_step - self.done[0], self._tokens_seen() - self.done[1]
            entry = training_entry(self.config, steps, tokens)
            if self.done[0]:
                entry["start"] = "the run above, with other settings"
            self.model_config.save(folder / CONFIG, job=to_toml(self.config), training=[*self.history, entry])
        super().save(curr_step, last_step)
        if last_step and self.enable:
            self._purge_stale_checkpoints()

    def saved(self, step: int) -> Path | None:
        """The complete checkpoint of a step, if there is one."""
        folder = Path(self._create_checkpoint_id(step)) if self.enable else None
        return folder if folder is not None and (folder / COMPLETE).is_file() else None

    def close(self) -> None:
        """Waits for a save that is under way, then ends the threads."""
        if getattr(self, "save_future", None) is not None:
            self._async_wait()
        super().close()


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
