"""Saving and finding a run's checkpoints: torchtitan's manager, with what it lacks.

- `farsight.json` and the resolved config lie beside every checkpoint.
- A first save that was interrupted does not hide the weights the run was to start from.
- A damaged checkpoint is named and set aside, and the newest intact one is used.
- What to start from may be a model directory or a checkpoint, told apart by looking.
- Only complete checkpoints count in `keep_latest_k`, and a save that failed is reported when it fails.
"""

import dataclasses
import logging
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.checkpoint import AsyncMode, CheckpointManager
from torchtitan.tools.utils import GarbageCollection

from checkpoints.card import CONFIG, adapter_entry, read_history, training_entry
from checkpoints.intact import COMPLETE, faults, is_complete
from checkpoints.model_dir import check_tensors, read_model_config
from checkpoints.names import from_hf_name, to_hf_name
from configs.finetuning import FinetuneConfig
from configs.load import ConfigError, to_toml
from configs.schema import JobConfig
from model.build import ModelConfig, trained_layers
from model.layers import select_layers
from parallel.device import GIB, wait_for_rank_zero

logger = logging.getLogger("farsight")

T = TypeVar("T")


class SaveError(RuntimeError):
    """A checkpoint could not be written."""


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
    async_mode: AsyncMode
    save_future: Future[Any] | None
    base: str | None = None
    """In fine-tuning the fingerprint of the base, which checkpoints do not hold."""

    def __init__(self, config: JobConfig, **parts: Any) -> None:
        self.config, self.model_config = config, ModelConfig.from_job(config)
        # The runs that trained the weights before this one, and how far it was when its settings were last changed.
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
        """Loads this run's newest intact checkpoint, or what `checkpoint.initial_load_path` names.

        Raises:
            ConfigError: a start that does not exist or does not fit the model, or checkpoints of which none is intact.
        """
        if not self.enable:
            return False
        newest = on_rank_zero(lambda: self._step_to_resume(step), for_hours=True)
        if newest is not None:
            checkpoint = Path(self._create_checkpoint_id(newest))
            self._check_resumable(checkpoint)
            # Both are for the start from another run; a run that resumes itself needs all of its state.
            self.exclude_from_loading, self.initial_load_path = [], None
            settings = self._optimizer_settings()
            self._read(checkpoint)
            self._take_settings(settings)
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
        self._take_settings(settings)
        return True

    def _optimizer_settings(self) -> list[dict[str, Any]]:
        groups = [group for optimizer in self.states["optimizer"] for group in optimizer.param_groups]
        return [{k: v for k, v in group.items() if k != "params"} for group in groups]

    def _take_settings(self, settings: list[dict[str, Any]]) -> None:
        """Moments come with the learning rate and weight decay that they were saved with: the config's are used."""
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
        """Reads what rank 0 decided on, in place. torchtitan's `load` has each rank ask the file system what is there,
        and on a network's they may be answered differently."""
        states = self._states_to_load(model_only)
        self.dcp_load(states, checkpoint_id=str(checkpoint), from_hf=from_hf, from_quantized=False)
        GarbageCollection.collect("GC collection for checkpoint loading.")

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
        """An optimizer's state goes on only where all that trains now was trained before."""
        entry = (read_history(checkpoint) or [{}])[-1]
        if isinstance(self.config, FinetuneConfig) and entry.get("adapter") != (now := adapter_entry(self.config)):
            raise ConfigError(
                f"{checkpoint} holds other adapters:\n  there: {entry.get('adapter')}\n  here:  {now}\n"
                "Set them back, or start a new run (job.dump_folder)."
            )
        if self.base is not None and entry.get("base") != self.base:
            raise ConfigError(
                f"{checkpoint} was trained beside {entry.get('start')}, and base_model.path = {self.config.base_model.path!r} "  # type: ignore[attr-defined]  # fine-tuning's
                "holds other weights: name the former, or start a new run (job.dump_folder)."
            )
        before = entry.get("layers", "all")
        ours, n_layers = trained_layers(self.config), self.model_config.architecture.n_layers
        if before != "all" and not (ours is not None and {*ours} <= select_layers(before, n_layers)):
            raise ConfigError(
                f"{checkpoint} holds optimizer state of layers {before} alone, and training.layers = "
                f"{self.config.training.layers!r} asks for others: set it to {before!r}, or start a new run from the "
                "model directory."
            )

    def _step_to_resume(self, asked: int) -> int | None:
        """The step to go on from, or None where the run has saved nothing; newer ones that are damaged are set aside.

        It has to be the newest: a run does not write over its own later steps. Rank 0 alone calls it.
        """
        folder = Path(self.folder)
        damaged: dict[Path, str] = {}
        try:
            steps = complete_steps(folder)
            for step in reversed(steps):
                checkpoint = Path(self._create_checkpoint_id(step))
                if not (found := faults(checkpoint)):
                    break
                damaged[checkpoint] = "; ".join(found)
        except (OSError, MemoryError) as error:
            raise ConfigError(f"{folder} can't be read ({error!r}); nothing was changed.") from error
        discard_incomplete(folder)
        if not folder.is_dir():
            if asked != -1:
                raise ConfigError(f"checkpoint.load_step = {asked}: {folder} holds no checkpoint.")
            return None
        if steps and asked not in (-1, *steps):
            raise ConfigError(
                f"checkpoint.load_step = {asked}: {self.folder} holds steps {', '.join(map(str, steps))}."
            )
        if steps and asked not in (-1, steps[-1]):
            raise ConfigError(
                f"checkpoint.load_step = {asked}, but {self.folder} goes on to step {steps[-1]}. "
                "To go back, name the earlier step in checkpoint.initial_load_path of a run in another job.dump_folder, "
                "or remove the later steps."
            )
        if len(damaged) == len(steps) or (damaged and asked != -1):
            wrong = [f"{checkpoint}: {found}" for checkpoint, found in damaged.items()]
            raise ConfigError(
                f"{folder} holds no intact checkpoint{f' of step {asked}' * (asked != -1)}, and the run does not start "
                "again from its first weights by itself:\n  "
                + "\n  ".join(wrong or sorted(path.name for path in folder.iterdir()))
                + "\nRestore the files, or set another job.dump_folder to begin anew."
            )
        for checkpoint, wrong_files in damaged.items():
            kept = set_aside(checkpoint)
            logger.warning(f"{checkpoint} is damaged: {wrong_files}. It is kept as {kept.name}; step {step} is used.")
        return step

    def _check_resumable(self, checkpoint: Path) -> None:
        """Raises unless model, trained layers and data order are those that the checkpoint was saved with."""
        self._refuse_another_model(ModelConfig.load(checkpoint / CONFIG), str(checkpoint))
        self._refuse_other_layers(checkpoint)
        self.states["dataloader"].check_checkpoint(checkpoint)

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
        self.initial_load_in_hf = not (start / COMPLETE).is_file() and not any(start.glob("*.distcp"))
        if self.initial_load_in_hf and not self.initial_load_model_only:
            raise ConfigError(
                f"checkpoint.initial_load_path = {start} is no checkpoint: a model directory holds weights alone. "
                "Set checkpoint.initial_load_model_only = true."
            )
        if not self.initial_load_in_hf:
            on_rank_zero(lambda: _refuse_damaged(start))
        source = read_model_config(start)
        self._refuse_another_model(source, f"checkpoint.initial_load_path = {start}")
        if self.initial_load_in_hf:
            check_tensors(start, source)
        elif not self.initial_load_model_only:
            self._refuse_other_layers(start)

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Saves when the step is due, or always with `last_step`; the config goes first, so that a complete
        checkpoint always has it.

        With asynchronous saving it waits for the save before, and returns when the state is copied; the last step's
        is complete when it returns. After an asynchronous save that failed, the next one is waited for.

        Raises:
            SaveError: on all ranks.
        """
        if not self._should_save(curr_step, last_step):
            return
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
        self.model_config.save(folder / CONFIG, job=to_toml(self.config), training=self.training_so_far(step))

    def training_so_far(self, step: int) -> list[dict[str, Any]]:
        """The runs that trained the weights, this one's entry last."""
        entry = training_entry(self.config, step - self.done[0], self._tokens_seen() - self.done[1])
        if self.done[0]:
            entry["start"] = "the run above, with other settings"
        if self.base is not None:
            entry["base"] = self.base
        return [*self.history, entry]

    def _finish_saving(self) -> bool:
        """Waits for the save that is under way; returns whether it succeeded, on all ranks the same."""
        future, self.save_future = self.save_future, None
        if future is None or future.exception() is None:
            return True
        self._discard_failed(self.saving)
        return False

    def _report(self, step: int, future: Future[Any]) -> None:
        """Called by the thread that saves: an hour may pass until the next save asks."""
        if (error := future.exception()) is not None:
            logger.error(f"{self._failure(step, error)} The run goes on, and stops if the next save fails too.")

    def _failure(self, step: int, error: BaseException) -> str:
        if isinstance(error, CheckpointException):
            causes = [f"rank {rank}: {cause!r}" for rank, (cause, _) in sorted(error.failures.items())]
        else:
            causes = [repr(error)]
        steps, free = complete_steps(Path(self.folder)), shutil.disk_usage(self.config.job.dump_folder).free
        return (
            f"step {step} could not be saved in {self.folder} ({free / GIB:.1f} GiB free there; a quota may allow less): "
            f"{'; '.join(causes)}. "
            f"The newest complete checkpoint is {f'step {steps[-1]}' if steps else 'none'}."
        )

    def _discard_failed(self, step: int) -> None:
        """A disk that is full has room again for the next."""
        if dist.get_rank() == 0:
            shutil.rmtree(self._create_checkpoint_id(step), ignore_errors=True)

    def _purge_stale_checkpoints(self) -> None:
        """Deletes all but the newest `keep_latest_k` complete checkpoints; one that is being saved does not count.

        torchtitan counts it, and what is damaged or was interrupted. It also leaves a folder with `.metadata` and
        without the rest when a run is killed while it deletes: here `.metadata` goes first.
        """
        if self.keep_latest_k == 0 or dist.get_rank() != 0:
            return
        # The new one is complete: what goes wrong here, on this rank alone, is no failure to save it.
        try:
            stale = complete_steps(Path(self.folder))[: -self.keep_latest_k]
        except OSError as error:
            logger.warning(f"{self.folder} can't be read ({error}); no older checkpoint is deleted.")
            return
        for step in stale:
            checkpoint = Path(self._create_checkpoint_id(step))
            try:
                (checkpoint / COMPLETE).unlink(missing_ok=True)
            except OSError as error:
                logger.warning(f"{checkpoint} can't be deleted ({error}); it is kept.")
                continue
            self.purge_queue.put(str(checkpoint))

    def saved(self, step: int) -> Path | None:
        """The complete checkpoint of a step, if there is one."""
        folder = Path(self._create_checkpoint_id(step)) if self.enable else None
        return folder if folder is not None and is_complete(folder) else None

    def close(self) -> None:
        """Waits for a save that is under way, then ends the threads."""
        if getattr(self, "save_future", None) is not None:
            self._finish_saving()
        super().close()


def on_rank_zero(work: Callable[[], T], for_hours: bool = False) -> T:
    """Does work on rank 0 alone; what it returns or raises is returned or raised on every rank.

    Args:
        for_hours: the work may take longer than a collective waits.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except Exception as error:
            outcome[1] = error
    if for_hours:
        wait_for_rank_zero()
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _refuse_damaged(start: Path) -> None:
    try:
        found = faults(start)
    except (OSError, MemoryError) as error:
        raise ConfigError(f"checkpoint.initial_load_path = {start} can't be read ({error!r}).") from error
    if found:
        raise ConfigError(f"checkpoint.initial_load_path = {start} is damaged: {'; '.join(found)}.")


def complete_steps(folder: Path) -> list[int]:
    """The steps with a complete checkpoint, in order.

    Raises:
        OSError: that can't be told now.
    """
    names = ((path, re.fullmatch(r"step-(\d+)", path.name)) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for path, match in names if match and is_complete(path))


def discard_incomplete(folder: Path) -> None:
    """Removes step folders whose save was interrupted, and the folder itself if none is left."""
    if not folder.is_dir():
        return
    for step in folder.glob("step-*"):
        if not is_complete(step):
            shutil.rmtree(step)
    if not any(folder.iterdir()):
        folder.rmdir()


def set_aside(checkpoint: Path) -> Path:
    """Renames step-N to damaged-N, or to damaged-N.2 and so on, a name that torchtitan takes for no checkpoint."""
    number, kept = 1, checkpoint.with_name(checkpoint.name.replace("step", "damaged"))
    while kept.exists():
        number += 1
        kept = kept.with_name(f"{kept.name.split('.')[0]}.{number}")
    return checkpoint.rename(kept)
