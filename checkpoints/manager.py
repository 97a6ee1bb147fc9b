"""Saves and finds a run's checkpoints: torchtitan's manager, with these additions.

- Every checkpoint has `farsight.json`, with the resolved config.
- An interrupted first save does not hide the weights that the run starts from.
- Files have checksums. A damaged checkpoint is named and set aside, and the newest intact one is used.
- Reading a checkpoint runs no code from it, and non-finite weights are not saved.
- A run refuses to resume with other positions or another optimizer unless told to.
- A run can start from a model directory or a checkpoint; the format is detected.
- Only complete checkpoints count in `keep_latest_k`, and a failed save is reported at once.
"""

import logging
import shutil
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchtitan.components.checkpoint import MODEL, AsyncMode, CheckpointManager
from torchtitan.tools.utils import GarbageCollection

from farsight.checkpoints.cards.model import CONFIG, read_history, training_entry
from farsight.checkpoints.checksums import MANIFEST, altered
from farsight.checkpoints.dcp import COMPLETE, Writer, load
from farsight.checkpoints.finite import refuse_non_finite
from farsight.checkpoints.intact.check import is_complete, look
from farsight.checkpoints.load import read_model_config
from farsight.checkpoints.model_dir.api import check_tensors
from farsight.checkpoints.model_dir.names import from_hf_name, to_hf_name
from farsight.checkpoints.resume import (
    refuse_another_model,
    refuse_other_layers,
    refuse_other_optimizer,
    refuse_other_settings,
    saved_order,
)
from farsight.checkpoints.steps import (
    complete_steps,
    delete,
    discard_incomplete,
    earlier_set_aside,
    holds_only_ours,
    retire,
    set_aside,
)
from farsight.configs.schema import JobConfig
from farsight.configs.typed import to_toml
from farsight.errors import ConfigError, SaveError
from farsight.model.build import ModelConfig
from farsight.parallel.ranks import on_every_rank, on_rank_zero
from farsight.units import GIB

logger = logging.getLogger("farsight")


class HuggingFaceAdapter:
    """Renames a state dict for torchtitan, so that it reads each rank's part of every tensor from safetensors."""

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
        config: the job's config; saved with each checkpoint.
        parts: further arguments of torchtitan's manager (`dataloader`, `model_parts`, `optimizers`, `lr_schedulers`, `states`).
    """

    initial_load_path: str | None
    exclude_from_loading: list[str]
    async_mode: AsyncMode
    save_future: Future[Any] | None
    base: str | None = None
    """In fine-tuning, the fingerprint of the base, which checkpoints don't contain."""

    def __init__(self, config: JobConfig, **parts: Any) -> None:
        self.config, self.model_config = config, ModelConfig.from_job(config)
        # Earlier runs that trained the weights; steps and tokens of this one when its settings last changed.
        self.history: list[dict[str, Any]] = []
        self.done = (0, 0)
        if config.checkpoint.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM and not torch.cuda.is_available():
            raise ConfigError('checkpoint.async_mode = "async_with_pinned_mem" needs a GPU; set "async".')
        super().__init__(
            **parts,
            checkpoint_config=config.checkpoint,
            sd_adapter=HuggingFaceAdapter(None, None),  # type: ignore[arg-type]  # has the methods that are called
            base_folder=config.job.dump_folder,
        )

    def load(self, step: int = -1) -> bool:
        """Loads this run's newest intact checkpoint, otherwise the weights in `checkpoint.initial_load_path`, if set.

        Raises:
            ConfigError: the start does not exist or does not fit the model, or there are checkpoints but none is intact.
        """
        if not self.enable:
            return False
        newest = self._step_to_resume(step)
        if newest is not None:
            checkpoint = Path(self._create_checkpoint_id(newest))
            on_every_rank(lambda: self._check_resumable(checkpoint))
            # Both only apply to starts from another run; a resuming run needs all of its state.
            self.exclude_from_loading, self.initial_load_path = [], None
            settings = self._optimizer_settings()
            self._read(checkpoint)
            self._restore_settings(settings)
            self._continue_history(checkpoint, newest)
            logger.info(f"resuming from {checkpoint}")
            return True
        if not self.initial_load_path:
            return False
        start = Path(self.initial_load_path)
        self._prepare_initial_load(start)
        self.history = read_history(start)
        settings = self._optimizer_settings()
        self._read(start, model_only=self.initial_load_model_only, from_hf=self.initial_load_in_hf)
        self._restore_settings(settings)
        return True

    def _optimizer_settings(self) -> list[dict[str, Any]]:
        groups = [group for optimizer in self.states["optimizer"] for group in optimizer.param_groups]
        return [{k: v for k, v in group.items() if k != "params"} for group in groups]

    def _restore_settings(self, settings: list[dict[str, Any]]) -> None:
        """Restores the config's learning rate, weight decay etc., which loading replaced by those of the save."""
        groups = [group for optimizer in self.states["optimizer"] for group in optimizer.param_groups]
        for group, own in zip(groups, settings, strict=True):
            group.update(own)
        for scheduler in self.states["lr_scheduler"]:
            scheduler.base_lrs = [group["initial_lr"] for group in scheduler.optimizer.param_groups]
            parts = zip(scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            for group, base, rate in parts:
                group["lr"] = base * rate(scheduler.last_epoch)
            scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]

    @torch.no_grad()
    def _read(self, checkpoint: Path, model_only: bool = False, from_hf: bool = False) -> None:
        """Loads what rank 0 decided on, in place. In torchtitan's `load` each rank asks the file system what is there, and on
        a network file system they may get different answers."""
        states = self._states_to_load(model_only)
        self.dcp_load(states, checkpoint_id=str(checkpoint), from_hf=from_hf, from_quantized=False)
        GarbageCollection.collect("GC collection for checkpoint loading.")

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """torchtitan's, but with a reader that runs no code from the checkpoint."""
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        load(state_dict, Path(checkpoint_id))
        self.states[MODEL].load_state_dict(state_dict)

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """torchtitan's, but with a writer that records checksums."""
        writer: Any = Writer(checkpoint_id)
        match async_mode:
            case AsyncMode.ASYNC:
                return dcp.async_save(state_dict, storage_writer=writer, process_group=self.pg)
            case AsyncMode.ASYNC_WITH_PINNED_MEM:
                return dcp.async_save(
                    state_dict,
                    storage_writer=writer,
                    process_group=self.pg,
                    async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                    async_stager=self.stager,
                )
        dcp.save(state_dict, storage_writer=writer)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return None

    def _continue_history(self, checkpoint: Path, step: int) -> None:
        """Continues the run's own entry, or starts a new one if its settings have changed since."""
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

    def _step_to_resume(self, asked: int) -> int | None:
        """The step to resume from, or None if the run has saved nothing; newer, damaged ones are set aside.

        It has to be the newest: a run does not overwrite its own later steps.
        """
        folder = Path(self.folder)
        damaged: dict[int, str] = {}
        try:
            steps = on_rank_zero(lambda: complete_steps(folder))
            for step in reversed(steps):
                if not (found := self._faults(Path(self._create_checkpoint_id(step)))):
                    break
                damaged[step] = "; ".join(found)
        except (OSError, MemoryError) as error:
            raise ConfigError(f"{folder} can't be read ({error!r}); nothing was changed.") from error
        return on_rank_zero(lambda: self._settle(asked, steps, damaged), may_take_hours=True)

    def _faults(self, checkpoint: Path) -> list[str]:
        """The faults of a checkpoint, the same on all ranks; each rank reads its share of the files."""
        verify = self.config.checkpoint.verify
        found, manifest = on_rank_zero(lambda: look(checkpoint, verify))
        if found or manifest is None or not verify:
            return found
        rank, ranks = dist.get_rank(), dist.get_world_size()
        by_rank = on_every_rank(lambda: altered(checkpoint, manifest, rank, ranks), may_take_hours=True)
        return [line for lines in by_rank for line in lines]

    def _settle(self, asked: int, steps: list[int], damaged: dict[int, str]) -> int | None:
        """On rank 0: removes interrupted saves, sets damaged checkpoints aside and returns the newest intact step.

        Args:
            asked: `checkpoint.load_step`; -1 is the newest.
            steps: steps with a complete checkpoint, in order.
            damaged: the faults of the newest ones, as far as they are damaged.
        """
        folder = Path(self.folder)
        try:
            discard_incomplete(folder)
            renamed = earlier_set_aside(folder)
        except OSError as error:
            raise ConfigError(f"what an interrupted save left in {folder} can't be removed ({error}).") from error
        if not steps and not renamed:
            if asked != -1:
                raise ConfigError(f"checkpoint.load_step = {asked}: {folder} holds no checkpoint.")
            return None
        if steps and asked not in (-1, *steps):
            raise ConfigError(f"checkpoint.load_step = {asked}: {folder} holds steps {', '.join(map(str, steps))}.")
        if steps and asked not in (-1, steps[-1]):
            raise ConfigError(
                f"checkpoint.load_step = {asked}, but {folder} goes on to step {steps[-1]}. "
                "To go back, name the earlier step in checkpoint.initial_load_path of a run in another job.dump_folder, "
                "or remove the later steps."
            )
        if len(damaged) == len(steps) or (damaged and asked != -1):
            wrong = [f"{self._create_checkpoint_id(step)}: {found}" for step, found in damaged.items()]
            raise ConfigError(
                f"{folder} holds no intact checkpoint{f' of step {asked}' * (asked != -1)}, and the run does not start "
                "again from its first weights by itself:\n  "
                + "\n  ".join(wrong or renamed)
                + "\nRestore the files, or set another job.dump_folder to start from the beginning."
            )
        intact = steps[-1 - len(damaged)]
        for step, wrong_files in damaged.items():
            checkpoint = Path(self._create_checkpoint_id(step))
            try:
                kept = set_aside(checkpoint)
            except OSError as error:
                raise ConfigError(
                    f"{checkpoint} is damaged: {wrong_files}. It can't be renamed ({error}): move it elsewhere."
                ) from error
            logger.warning(f"{checkpoint} is damaged: {wrong_files}. It is kept as {kept.name}; step {intact} is used.")
        return intact

    def _check_resumable(self, checkpoint: Path) -> None:
        """Raises unless model, trained layers, settings and order of data allow resuming from a checkpoint."""
        saved = ModelConfig.load(checkpoint / CONFIG)
        refuse_another_model(saved, self.model_config, str(checkpoint))
        refuse_other_layers(checkpoint, self.config, self.base)
        refuse_other_settings(checkpoint, self.config, saved)
        self.states["dataloader"].check_order(saved_order(checkpoint))

    def _prepare_initial_load(self, start: Path) -> None:
        self.initial_load_in_hf = not on_rank_zero(lambda: self._is_checkpoint(start))
        if not self.initial_load_in_hf:
            try:
                found = self._faults(start)
            except (OSError, MemoryError) as error:
                raise ConfigError(f"checkpoint.initial_load_path = {start} can't be read ({error!r}).") from error
            if found:
                raise ConfigError(f"checkpoint.initial_load_path = {start} is damaged: {'; '.join(found)}.")
        on_every_rank(lambda: self._check_start(start))

    def _is_checkpoint(self, start: Path) -> bool:
        """Whether the start is a checkpoint (intact or not) rather than a model directory."""
        if not start.is_dir():
            raise ConfigError(f"checkpoint.initial_load_path = {start} does not exist.")
        if (start / COMPLETE).is_file() or any(start.glob("*.distcp")):
            return True
        if not self.initial_load_model_only:
            raise ConfigError(
                f"checkpoint.initial_load_path = {start} is not a checkpoint: a model directory holds weights alone. "
                "Set checkpoint.initial_load_model_only = true."
            )
        return False

    def _check_start(self, start: Path) -> None:
        source = read_model_config(start)
        refuse_another_model(source, self.model_config, f"checkpoint.initial_load_path = {start}")
        if self.initial_load_in_hf:
            check_tensors(start, source)
        elif not self.initial_load_model_only:
            refuse_other_layers(start, self.config, self.base)
            refuse_other_optimizer(start, self.config)

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Saves if the step is due, or always with `last_step`. The config is written first, so that a complete
        checkpoint always has it.

        An asynchronous save waits for the previous one and returns when the state is copied; that of the last step
        returns when it is complete. After a failed asynchronous save, the next one is synchronous.

        Raises:
            SaveError: on all ranks.
        """
        if not self._should_save(curr_step, last_step):
            return
        refuse_non_finite(self.states[MODEL].state_dict(), f"step {curr_step}")
        mode = self.async_mode
        if not self._finish_saving():
            self.async_mode = AsyncMode.DISABLED
        try:
            on_rank_zero(lambda: self._write_config(curr_step))
            super().save(curr_step, last_step)
        except (CheckpointException, OSError) as error:
            self._discard_failed(curr_step)
            raise SaveError(self._failure(curr_step, error)) from error
        finally:
            self.async_mode = mode
        if self.save_future is not None:
            self.saving = curr_step
            if dist.get_rank() == 0:
                self.save_future.add_done_callback(lambda future: self._report(curr_step, future))
        if last_step:
            self._purge_stale_checkpoints()

    def _write_config(self, step: int) -> None:
        folder = Path(self._create_checkpoint_id(step))
        folder.mkdir(parents=True, exist_ok=True)
        self.model_config.save(
            folder / CONFIG, job=to_toml(self.config), training=self.training_so_far(step), checksums=MANIFEST
        )

    def training_so_far(self, step: int) -> list[dict[str, Any]]:
        """The history of runs that trained the weights, this one last."""
        entry = training_entry(self.config, step - self.done[0], self._tokens_seen() - self.done[1])
        if self.done[0]:
            entry["start"] = "the run above, with other settings"
        if self.base is not None:
            entry["base"] = self.base
        return [*self.history, entry]

    def _finish_saving(self) -> bool:
        """Waits for a save in progress; returns whether it succeeded, the same on all ranks."""
        future, self.save_future = self.save_future, None
        if future is None or future.exception() is None:
            return True
        self._discard_failed(self.saving)
        return False

    def _report(self, step: int, future: Future[Any]) -> None:
        """Logs a failed save, from the saving thread: the next save may be an hour away."""
        if (error := future.exception()) is not None:
            logger.error(f"{self._failure(step, error)} The run goes on, and stops if the next save fails too.")

    def _failure(self, step: int, error: BaseException) -> str:
        if isinstance(error, CheckpointException):
            causes = [f"rank {rank}: {cause!r}" for rank, (cause, _) in sorted(error.failures.items())]
        else:
            causes = [repr(error)]
        room = newest = ""
        with suppress(OSError):  # the disk can't be queried
            free = shutil.disk_usage(self.config.job.dump_folder).free
            room = f" ({free / GIB:.1f} GiB free there; a quota may allow less)"
            steps = complete_steps(Path(self.folder))
            newest = f" The newest complete checkpoint is {f'step {steps[-1]}' if steps else 'none'}."
        return f"step {step} could not be saved in {self.folder}{room}: {'; '.join(causes)}.{newest}"

    def _discard_failed(self, step: int) -> None:
        """Deletes a failed save, so that a full disk has room for the next."""
        checkpoint = Path(self._create_checkpoint_id(step))
        if dist.get_rank() == 0:
            with suppress(OSError):
                if not is_complete(checkpoint) and holds_only_ours(checkpoint):
                    delete(checkpoint)

    def _purge_stale_checkpoints(self) -> None:
        """Deletes all but the newest `keep_latest_k` complete checkpoints; a save in progress does not count.

        torchtitan counts it, as well as damaged and interrupted ones. If a run is killed while torchtitan deletes, the folder
        keeps `.metadata` but not the rest; here it first becomes an interrupted save.
        """
        if self.keep_latest_k == 0 or dist.get_rank() != 0:
            return
        # The new checkpoint is complete: an error here, on this rank alone, does not make the save fail.
        try:
            stale = complete_steps(Path(self.folder))[: -self.keep_latest_k]
        except OSError as error:
            logger.warning(f"{self.folder} can't be read ({error}); no older checkpoint is deleted.")
            return
        for step in stale:
            checkpoint = Path(self._create_checkpoint_id(step))
            try:
                if not holds_only_ours(checkpoint):
                    continue
                retire(checkpoint)
            except OSError as error:
                logger.warning(f"{checkpoint} can't be deleted ({error}); it is kept.")
                continue
            self.purge_queue.put(str(checkpoint))

    def saved(self, step: int) -> Path | None:
        """The complete checkpoint of a step, if there is one."""
        folder = Path(self._create_checkpoint_id(step)) if self.enable else None
        return folder if folder is not None and is_complete(folder) else None

    def close(self) -> None:
        """Waits for a save in progress, then ends the threads."""
        if getattr(self, "save_future", None) is not None:
            self._finish_saving()
        super().close()
