"""The fine-tuning trainer."""

import json
import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torchtitan.components.checkpoint import MODEL

from farsight.checkpoints.adapter.config import FILES
from farsight.checkpoints.adapter.write import check_adapter_out, write_adapter
from farsight.checkpoints.cards.model import read_history
from farsight.checkpoints.merge.build import merge_adapter
from farsight.checkpoints.model_dir.api import ADAPTER_MARKER, check_model_out
from farsight.checkpoints.model_dir.fingerprint import base_entry
from farsight.configs.finetuning import FinetuneConfig
from farsight.errors import NonFiniteError
from farsight.model.adapt.garfa import garfa_of
from farsight.model.llama import name_seed
from farsight.model.position.garfa import alphas, garfa_of_tensors
from farsight.parallel.ranks import on_rank_zero
from farsight.training.finetune.garfa_picture import draw_alphas
from farsight.training.finetune.optimizer import parameter_groups
from farsight.training.finetune.spec import TrainedWeights, adapters_of, register_finetuning, whole_weights
from farsight.training.memory_recorder import MemoryRecorder, Phase
from farsight.training.trainer import Trainer

logger = logging.getLogger("farsight")


STOPPING = ("best", "best_step", "to_beat", "no_better")
"""Attributes on early stopping that a checkpoint keeps."""


class Finetuner(Trainer):
    """Trains adapters on a frozen base, keeps the best adapter, and stops when validation stops improving."""

    job_config: FinetuneConfig  # type: ignore[assignment]  # narrower than the base class's
    register = staticmethod(register_finetuning)
    leaves: ClassVar = {"adapter": check_adapter_out, "model": check_model_out}

    def __init__(self, config: FinetuneConfig) -> None:
        super().__init__(config)
        (model,) = self.model_parts
        if self.zero is None:
            self.checkpointer.states[MODEL] = TrainedWeights(model)
        base = Path(config.base_model.path).expanduser()
        self.base, self.checkpointer.history = on_rank_zero(
            lambda: (base_entry(base), read_history(base)), may_take_hours=True
        )
        self.checkpointer.base = self.base["fingerprint"]
        self.before = len(self.checkpointer.history)
        """Training runs in the base's history."""
        self.adapters = adapters_of(config, model)
        self.best, self.best_step = math.inf, 0
        """Validation loss of the adapter that is kept, and its step."""
        self.to_beat, self.no_better = math.inf, 0
        """The loss that early stopping compares with, and the validations since that did not improve on it by min_delta."""
        self.memory = MemoryRecorder(self.device)
        self.memory.loaded()

    def _during(self, phase: Phase) -> AbstractContextManager[None]:
        return self.memory.during(phase)

    def _precision(self) -> Any:
        if self.job_config.base_model.dtype == "float32":
            return nullcontext()
        # Each weight is used once per pass, so cached casts would only hold memory until its end.
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **{key: getattr(self, key) for key in STOPPING}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for key in STOPPING:
            setattr(self, key, state_dict[key])
        self.enough = self._patience_spent()
        if self.best_step and on_rank_zero(self._step_of_adapter) != self.best_step:
            # It was written after this checkpoint, by steps that run again: have the next validation rewrite it.
            self.best = math.inf

    def _step_of_adapter(self) -> int | None:
        marker = self._folder() / "adapter" / ADAPTER_MARKER
        if not marker.is_file():
            return None
        entries = json.loads(marker.read_text(encoding="utf-8"))["training"]
        return sum(entry["steps"] for entry in entries[self.before :])

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Tensor], Tensor]]) -> None:
        # Dropout depends only on the step and the rank, so that a resumed run is the same as an uninterrupted one.
        torch.manual_seed(name_seed(self.job_config.debug.seed or 0, f"step {self.step}, rank {dist.get_rank()}"))
        lr_garfa = self.lr_schedulers.schedulers[0].get_last_lr()[-1]
        super().train_step(data_iterator)
        self.memory.stepped()
        if self.job_config.garfa.enable and self.metrics_processor.should_log(self.step):
            by_head = {f"{layer}.{head}": a for layer, row in self._alphas().items() for head, a in enumerate(row)}
            self.metrics_processor.log_garfa(self.step, lr_garfa, by_head)

    def _clipped_together(self) -> list[list[nn.Parameter]]:
        groups = list(parameter_groups(self.model_parts[0]).values())
        return groups if self.job_config.training.clip == "group" else [[p for group in groups for p in group]]

    def _validate(self) -> float:
        loss = super()._validate()
        if self.step == 0 or not self.job_config.validation.enable:
            return loss
        if not math.isfinite(loss):
            raise NonFiniteError(f"step {self.step}: validation loss {loss}. Lower optimizer.lr or garfa.lr.")
        if loss < self.best:
            self.best, self.best_step = loss, self.step
            self._write_adapter()
        if loss < self.to_beat - self.job_config.early_stopping.min_delta:
            self.to_beat, self.no_better = loss, 0
        else:
            self.no_better += 1
        self.enough = self._patience_spent()
        if self.enough:
            logger.info(f"{self.no_better} validations no better than {self.to_beat:.4f}: stopping early")
        return loss

    def _patience_spent(self) -> bool:
        patience = self.job_config.early_stopping.patience
        return 0 < patience <= self.no_better

    def _write_adapter(self) -> None:
        """Writes `adapter/` from the current weights."""
        weights = whole_weights(self.model_parts[0])
        history = self.checkpointer.training_so_far(self.step)
        adapter = self._folder() / "adapter"
        self._on_rank_zero(lambda: write_adapter(adapter, self.job_config, weights, self.base, history))

    def _export(self) -> None:
        """Finishes the run; `adapter/` holds the step with the best validation loss, or the last step without validation."""
        if not self.job_config.validation.enable:
            self.best_step = self.step
            self._write_adapter()
        logger.info(f"adapter of step {self.best_step}: {self._folder() / 'adapter'}")
        self._on_rank_zero(self._finish)

    def _finish(self) -> None:
        """Draws alpha of the adapter that was kept, and merges it if `merge` is set."""
        out = self._folder() / "adapter"
        learned = out / FILES["garfa"]
        garfa = garfa_of_tensors(load_file(learned)) if learned.is_file() else None
        if garfa is not None:
            draw_alphas(self._folder() / "garfa.png", alphas(garfa))
        if self.job_config.merge:
            # On the device that trained: bitsandbytes may round weights differently on another.
            merge_adapter(out, self._folder() / "model", device=self.device)
            logger.info(f"merged: {self._folder() / 'model'}")

    def _alphas(self) -> dict[int, list[float]]:
        garfa = garfa_of(self.model_parts[0])  # type: ignore[arg-type]  # a Llama
        return alphas(garfa) if garfa else {}

    def _folder(self) -> Path:
        return Path(self.job_config.job.dump_folder)
