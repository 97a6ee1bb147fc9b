"""Saves and finds a run's checkpoints, in PyTorch's distributed format (DCP).

- Every checkpoint has `farsight.json`, with the resolved config.
- An interrupted first save does not hide the weights that the run starts from.
- Files have checksums. A damaged checkpoint is named and set aside, and the newest intact one is used.
- Reading a checkpoint runs no code from it, and non-finite weights are not saved.
- A run refuses to resume with other positions or another optimizer unless told to.
- A run can start from a model directory or a checkpoint; the format is detected.
- A failed save is reported at once. A finished one is read back, and only then are older ones deleted (see `upkeep`).
"""

import gc
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from farsight.checkpoints.cards.model import CONFIG, read_history, training_entry
from farsight.checkpoints.checksums import MANIFEST, altered
from farsight.checkpoints.dcp import COMPLETE, Writer, load
from farsight.checkpoints.finite import refuse_non_finite
from farsight.checkpoints.intact.check import is_complete, look
from farsight.checkpoints.load import read_model_config
from farsight.checkpoints.model_dir.api import check_tensors
from farsight.checkpoints.model_dir.dcp_reader import SafetensorsReader
from farsight.checkpoints.resume import (
    refuse_another_model,
    refuse_other_layers,
    refuse_other_optimizer,
    refuse_other_settings,
    saved_order,
    take_its_settings,
)
from farsight.checkpoints.steps import (
    complete_steps,
    delete,
    discard_incomplete,
    earlier_set_aside,
    holds_only_ours,
    set_aside,
)
from farsight.checkpoints.upkeep import Upkeep
from farsight.configs.schema import JobConfig
from farsight.configs.typed import to_toml
from farsight.errors import ConfigError, SaveError
from farsight.model.build import ModelConfig
from farsight.model.llama import unwrapped
from farsight.parallel.float8 import plain
from farsight.parallel.ranks import file_group, new_file_group, on_every_rank, on_rank_zero
from farsight.remote import local
from farsight.stores import StorePath
from farsight.units import GIB

logger = logging.getLogger("farsight")


MODEL = "model"
"""The part of the state whose tensors are saved under their own names, without a prefix."""


class ModelWeights:
    """The weights of a model, or of a rank's pipeline stages."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        """Tensors by their names in the model as it was built; DTensors where they are sharded."""
        states: Iterator[Any] = (get_model_state_dict(part) for part in self.parts)
        return {unwrapped(name): plain(tensor) for state in states for name, tensor in state.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing: the tensors were loaded in place."""


class RunCheckpoints:
    """The checkpoints of one run folder.

    Args:
        config: the job's config; saved with each checkpoint.
        states: parts of the training state by name: "model" (see `ModelWeights`), "optimizer", "dataloader", "train_state". Each
            has a `state_dict`, whose tensors are loaded in place, and a `load_state_dict` for the rest.
        completed: called on rank 0 with the step of each checkpoint that is complete, by the saving thread if saves are
            asynchronous.
    """

    base: dict[str, str] | None = None
    """In fine-tuning, "base" and "base_checksum": fingerprint and checksum of the base, which checkpoints don't contain."""

    def __init__(
        self, config: JobConfig, states: dict[str, Any], completed: Callable[[int], None] = lambda step: None
    ) -> None:
        self.completed = completed
        self.config, self.model_config, self.states = config, ModelConfig.from_job(config), states
        self.options = config.checkpoint
        self.folder = config.checkpoint_folder
        # Earlier runs that trained the weights; steps and tokens of this one when its settings last changed.
        self.history: list[dict[str, Any]] = []
        self.done = (0, 0)
        self.mode = self.options.async_mode
        if self.mode == "async_with_pinned_mem" and not torch.cuda.is_available():
            raise ConfigError('checkpoint.async_mode = "async_with_pinned_mem" needs a GPU; set "async".')
        asynchronous = self.options.enable and self.mode != "disabled"
        # Threads of their own need a group of their own.
        self.group = new_file_group() if asynchronous else file_group()
        self.stager: DefaultStager | None = None
        self.staging: Future[Any] | None = None
        self.save_future: Future[Any] | None = None
        self.saving = 0
        """The step of `save_future`."""
        self.newest = 0
        """On rank 0, the newest step whose checkpoint is complete, as far as this start has loaded or saved it."""
        self.upkeep = Upkeep(self.folder, self.options.keep_latest_k, self.options.verify)
        self.clock = time.monotonic
        self.saved_at: float | None = None
        """When the last save ended or the first step was taken, by this rank's clock."""
        self.overdue = False
        """Set on all ranks once a step's figures say that `interval_minutes` have passed; the next save clears it."""

    def load(self, step: int = -1) -> bool:
        """Loads this run's newest intact checkpoint, otherwise the weights in `checkpoint.initial_load_path`, if set.

        Raises:
            ConfigError: the start does not exist or does not fit the model, or there are checkpoints but none is intact.
        """
        if not self.options.enable:
            return False
        newest = self._step_to_resume(step)
        if newest is not None:
            checkpoint = self._checkpoint(newest)
            on_every_rank(lambda: self._check_resumable(checkpoint))
            self._read(checkpoint, [*self.states])
            self._continue_history(checkpoint, newest)
            self.newest = newest
            logger.info(f"resuming from {checkpoint}")
            return True
        if not self.options.initial_load_path:
            return False
        start = local(self.options.initial_load_path)
        is_checkpoint = self._prepare_initial_load(start)
        self.history = read_history(start)
        left_out = self.options.exclude_from_loading
        parts = [MODEL] if self.options.initial_load_model_only else [p for p in self.states if p not in left_out]
        self._read(start, parts, from_hf=not is_checkpoint)
        return True

    @torch.no_grad()
    def _read(self, checkpoint: Path, parts: Sequence[str], from_hf: bool = False) -> None:
        """Loads parts of the state, in place.

        Args:
            from_hf: it is a model directory, of which each rank reads its part of every tensor from safetensors.
        """
        state = self._state(parts)
        if from_hf:
            reader = SafetensorsReader(check_tensors(checkpoint, read_model_config(checkpoint)))
            dcp.load(state, storage_reader=reader, process_group=file_group())
        else:
            load(state, checkpoint, file_group())
        for part in parts:
            self.states[part].load_state_dict(state if part == MODEL else state[part])

    def _state(self, parts: Sequence[str]) -> dict[str, Any]:
        """Parts of the state as a checkpoint has them: the model's tensors by name, each other part under its own."""
        state = {part: self.states[part].state_dict() for part in parts if part != MODEL}
        return state | (self.states[MODEL].state_dict() if MODEL in parts else {})

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
        folder = self.folder
        damaged: dict[int, str] = {}
        try:
            steps = on_rank_zero(lambda: complete_steps(folder))
            for step in reversed(steps):
                if not (found := self._faults(self._checkpoint(step))):
                    break
                damaged[step] = "; ".join(found)
        except (OSError, MemoryError) as error:
            raise ConfigError(f"{folder} can't be read ({error!r}); nothing was changed.") from error
        return on_rank_zero(lambda: self._settle(asked, steps, damaged))

    def _faults(self, checkpoint: Path) -> list[str]:
        """The faults of a checkpoint, the same on all ranks; each rank reads its share of the files."""
        verify = self.config.checkpoint.verify
        found, manifest = on_rank_zero(lambda: look(checkpoint, verify))
        if found or manifest is None or not verify:
            return found
        rank, ranks = dist.get_rank(), dist.get_world_size()
        by_rank = on_every_rank(lambda: altered(checkpoint, manifest, rank, ranks))
        return [line for lines in by_rank for line in lines]

    def _settle(self, asked: int, steps: list[int], damaged: dict[int, str]) -> int | None:
        """On rank 0: removes interrupted saves, sets damaged checkpoints aside and returns the newest intact step.

        Args:
            asked: `checkpoint.load_step`; -1 is the newest.
            steps: steps with a complete checkpoint, in order.
            damaged: the faults of the newest ones, as far as they are damaged.
        """
        folder = self.folder
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
            wrong = [f"{self._checkpoint(step)}: {found}" for step, found in damaged.items()]
            raise ConfigError(
                f"{folder} holds no intact checkpoint{f' of step {asked}' * (asked != -1)}, and the run does not start "
                "again from its first weights by itself:\n  "
                + "\n  ".join(wrong or renamed)
                + "\nRestore the files, or set another job.dump_folder to start from the beginning."
            )
        intact = steps[-1 - len(damaged)]
        for step, wrong_files in damaged.items():
            checkpoint = self._checkpoint(step)
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
        fix = "Set them back, or start a new run (job.dump_folder)."
        refuse_another_model(saved, self.model_config, str(checkpoint), fix)
        self._keep_family(saved)
        refuse_other_layers(checkpoint, self.config, self.base)
        refuse_other_settings(checkpoint, self.config, saved)
        self.states["dataloader"].check_order(saved_order(checkpoint))

    def _prepare_initial_load(self, start: Path) -> bool:
        """Checks the start; returns whether it is a checkpoint rather than a model directory."""
        is_checkpoint = on_rank_zero(lambda: self._is_checkpoint(start))
        if is_checkpoint:
            try:
                found = self._faults(start)
            except (OSError, MemoryError) as error:
                raise ConfigError(f"checkpoint.initial_load_path = {start} can't be read ({error!r}).") from error
            if found:
                raise ConfigError(f"checkpoint.initial_load_path = {start} is damaged: {'; '.join(found)}.")
        on_every_rank(lambda: self._check_start(start, is_checkpoint))
        return is_checkpoint

    def _is_checkpoint(self, start: Path) -> bool:
        """Whether the start is a checkpoint (intact or not) rather than a model directory."""
        if not start.is_dir():
            raise ConfigError(f"checkpoint.initial_load_path = {start} does not exist.")
        if (start / COMPLETE).is_file() or any(start.glob("*.distcp")):
            return True
        if not self.options.initial_load_model_only:
            raise ConfigError(
                f"checkpoint.initial_load_path = {start} is not a checkpoint: a model directory holds weights alone. "
                "Set checkpoint.initial_load_model_only = true."
            )
        return False

    def _check_start(self, start: Path, is_checkpoint: bool) -> None:
        source = read_model_config(start)
        where = f"checkpoint.initial_load_path = {start}"
        refuse_another_model(source, self.model_config, where, take_its_settings(start))
        self._keep_family(source)
        if not is_checkpoint:
            check_tensors(start, source)
        elif not self.options.initial_load_model_only:
            refuse_other_layers(start, self.config, self.base)
            refuse_other_optimizer(start, self.config)

    def minutes_passed(self) -> bool:
        """True on rank 0 if `interval_minutes` have passed since the last save. Ranks' clocks differ, so that the others ask rank 0:
        the trainer sends its answer with the step's figures."""
        if self.saved_at is None:
            self.saved_at = self.clock()
        minutes = self.options.interval_minutes
        return dist.get_rank() == 0 and 0 < 60 * minutes <= self.clock() - self.saved_at

    def _keep_family(self, start: ModelConfig) -> None:
        """Remembers where the weights came from, for exports."""
        self.model_config = replace(self.model_config, family=start.family)

    def due(self, step: int, last_step: bool = False) -> bool:
        """True if a step has to be saved."""
        o = self.options
        asked = last_step or self.overdue or step % o.interval == 0 or (step == 1 and o.enable_first_step_checkpoint)
        return o.enable and not o.load_only and asked

    def save(self, step: int, last_step: bool = False) -> None:
        """Saves if the step is due, or always with `last_step`. The config is written first, so that a complete
        checkpoint always has it.

        An asynchronous save waits for the previous one and returns when the state is copied; that of the last step
        returns when it is complete. After a failed asynchronous save, the next one is synchronous.

        Raises:
            SaveError: on all ranks.
        """
        if not self.due(step, last_step):
            return
        refuse_non_finite(self.states[MODEL].state_dict(), f"step {step}")
        in_background = self._finish_saving() and self.mode != "disabled" and not last_step
        try:
            on_rank_zero(lambda: self._write_config(step))
            self._write(step, in_background)
        except (CheckpointException, OSError) as error:
            self._discard_failed(step)
            raise SaveError(self._failure(step, error)) from error
        if self.save_future is not None:
            self.saving = step
        if dist.get_rank() == 0:
            if self.save_future is None:
                self._completed(step)
            else:
                self.save_future.add_done_callback(lambda future: self._report(step, future))
        self.upkeep.follow(step, self.save_future)
        # Not from its beginning: saves that take longer than the interval would follow one another without training between.
        self.saved_at, self.overdue = self.clock(), False

    @torch.no_grad()
    def _write(self, step: int, in_background: bool) -> None:
        state, writer = self._state([*self.states]), Writer(self._checkpoint(step))
        gc.collect(1)  # what refers to an earlier copy of the state in cycles would keep its memory
        if not in_background:
            dcp.save(state, storage_writer=writer, process_group=file_group())
        elif self.mode == "async":
            copied: Any = dcp.async_save(state, storage_writer=writer, process_group=self.group)
            self.save_future = copied
        else:
            self.stager = self.stager or DefaultStager(StagingOptions(True, True, True, True))
            saving: Any = dcp.async_save(
                state,
                storage_writer=writer,
                process_group=self.group,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=self.stager,
            )
            self.save_future, self.staging = saving.upload_completion, saving.staging_completion

    def wait_for_staging(self) -> None:
        """Waits until the state of an asynchronous save is copied: the optimizer's next step changes it."""
        staging, self.staging = self.staging, None
        if staging is not None:
            staging.result()

    def _checkpoint(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def _write_config(self, step: int) -> None:
        folder = self._checkpoint(step)
        folder.mkdir(parents=True, exist_ok=True)
        self.model_config.save(
            folder / CONFIG, job=to_toml(self.config), training=self.training_so_far(step), checksums=MANIFEST
        )

    def training_so_far(self, step: int) -> list[dict[str, Any]]:
        """The history of runs that trained the weights, this one last."""
        entry = training_entry(self.config, step - self.done[0], self._tokens_seen() - self.done[1])
        if self.done[0]:
            entry["start"] = "the run above, with other settings"
        return [*self.history, entry | (self.base or {})]

    def _finish_saving(self) -> bool:
        """Waits for a save in progress; returns whether it succeeded, the same on all ranks."""
        future, self.save_future = self.save_future, None
        if future is None or future.exception() is None:
            return True
        self._discard_failed(self.saving)
        return False

    def _report(self, step: int, future: Future[Any]) -> None:
        """Logs a failed save, from the saving thread: the next save may be an hour away."""
        if (error := future.exception()) is None:
            self._completed(step)
        else:
            logger.error(f"{self._failure(step, error)} The run goes on, and stops if the next save fails too.")

    def _completed(self, step: int) -> None:
        self.newest = step
        self.completed(step)

    def _failure(self, step: int, error: BaseException) -> str:
        if isinstance(error, CheckpointException):
            causes = [f"rank {rank}: {cause!r}" for rank, (cause, _) in sorted(error.failures.items())]
        else:
            causes = [repr(error)]
        room = newest = ""
        with suppress(OSError):  # the disk can't be queried
            if not isinstance(self.folder, StorePath):
                free = shutil.disk_usage(self.config.job.dump_folder).free
                room = f" ({free / GIB:.1f} GiB free there; a quota may allow less)"
            steps = complete_steps(self.folder)
            newest = f" The newest complete checkpoint is {f'step {steps[-1]}' if steps else 'none'}."
        return f"step {step} could not be saved in {self.folder}{room}: {'; '.join(causes)}.{newest}"

    def _discard_failed(self, step: int) -> None:
        """Deletes a failed save, so that a full disk has room for the next."""
        checkpoint = self._checkpoint(step)
        if dist.get_rank() == 0:
            with suppress(OSError):
                if not is_complete(checkpoint) and holds_only_ours(checkpoint):
                    delete(checkpoint)

    def finish(self) -> None:
        """Waits until the last save is verified and older checkpoints are deleted.

        Raises:
            SaveError: on all ranks, if it is damaged or can't be read back.
        """
        if on_rank_zero(self.upkeep.verdict) != "intact":
            raise SaveError(
                f"the last checkpoint in {self.folder} was damaged while it was saved, or can't be read back (see above). "
                "The same command continues from the newest intact one."
            )

    def saved(self, step: int) -> Path | None:
        """The complete checkpoint of a step, if there is one."""
        folder = self._checkpoint(step)
        return folder if self.options.enable and is_complete(folder) else None

    def close(self) -> None:
        """Waits for a save and a deletion in progress, but not until what was saved is verified: the next run does that."""
        if self.save_future is not None:
            self._finish_saving()
        self.upkeep.close()
        if self.stager is not None:
            self.stager.close()
