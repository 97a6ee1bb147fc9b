"""The fine-tuning trainer."""

import json
import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from farsight.checkpoints.adapter.config import FILES
from farsight.checkpoints.adapter.write import check_adapter_out, write_adapter
from farsight.checkpoints.cards.model import read_history
from farsight.checkpoints.merge.build import merge_adapter
from farsight.checkpoints.model_dir.api import ADAPTER_MARKER, check_model_out
from farsight.checkpoints.model_dir.fingerprint import base_entry
from farsight.configs.finetuning import FinetuneConfig
from farsight.data.instructions.loader import build_instruction_loader, build_instruction_validation_loader
from farsight.data.read_ahead import shared_loader
from farsight.errors import ConfigError, NonFiniteError
from farsight.model.adapt.garfa import garfa_of
from farsight.model.adapt.lora import is_lora
from farsight.model.build import ModelConfig, count_parameters
from farsight.model.llama import Llama, name_seed
from farsight.model.position.garfa import alphas, garfa_of_tensors
from farsight.parallel.ranks import on_rank_zero
from farsight.remote import local
from farsight.training.evaluations import FOLDER, Evaluator, Training
from farsight.training.finetune.garfa_picture import draw_alphas
from farsight.training.finetune.model import TrainedWeights, adapters_of, build_adapted, whole_weights
from farsight.training.memory_recorder import MemoryRecorder, Phase
from farsight.training.optimizers.build import GARFA, trained_parameters
from farsight.training.trainer import Batch, Trainer

logger = logging.getLogger("farsight")


def row_multiple(config: FinetuneConfig) -> int:
    """The number that row lengths are padded to a multiple of: 8 for the matrix units, and the context-parallel spans."""
    return math.lcm(8, 2 * config.parallelism.context_parallel_degree)


STOPPING = ("best", "best_step", "to_beat", "no_better")
"""Attributes on early stopping that a checkpoint keeps."""


class Finetuner(Trainer):
    """Trains adapters on a frozen base, keeps the best adapter, and stops when validation stops improving."""

    config: FinetuneConfig
    leaves: ClassVar = {"adapter": check_adapter_out, "model": check_model_out}

    def __init__(self, config: FinetuneConfig, evaluator: Evaluator | None = None) -> None:
        super().__init__(config, evaluator=evaluator)
        (model,) = self.model_parts
        base = local(config.base_model.path).expanduser()
        self.base, self.checkpoints.history = on_rank_zero(lambda: (base_entry(base), read_history(base)))
        self.checkpoints.base = {"base": self.base["fingerprint"], "base_checksum": self.base["checksum"]}
        self.before = len(self.checkpoints.history)
        """Training runs in the base's history."""
        self.adapters = adapters_of(config, model)
        self.best, self.best_step = math.inf, 0
        """Validation loss of the adapter that is kept, and its step."""
        self.to_beat, self.no_better = math.inf, 0
        """The loss that early stopping compares with, and the validations since that did not improve on it by min_delta."""
        self.memory = MemoryRecorder(self.device)
        self.memory.loaded()

    def _build_loader(self) -> Any:
        """The loader; also sets `training.steps` from the epochs, which the schedules need.

        Raises:
            ConfigError: the warm-up is longer than the run.
        """
        t, multiple = self.config.training, row_multiple(self.config)
        build = partial(
            build_instruction_loader, self.config, self.tokenizer, self.data_rank, self.dims.batch, multiple
        )
        loader: Any = shared_loader(build, self.replica)  # only on the rank that reads does it know epochs
        t.steps = t.steps or self.replica.same(lambda: loader.steps_for(t.epochs))
        if (warmup := self.config.lr_scheduler.warmup_steps) > t.steps:
            raise ConfigError(f"lr_scheduler.warmup_steps = {warmup} exceeds the run's {t.steps} steps.")
        return loader

    def _build_validation_loader(self) -> Any:
        multiple = row_multiple(self.config)
        return build_instruction_validation_loader(
            self.config, self.tokenizer, self.data_rank, self.dims.batch, multiple, self.replica
        )

    def _untrained(self) -> Llama:
        return build_adapted(self.config)

    def _parameters(self, model: Llama) -> int:
        added = (p.numel() for name, p in trained_parameters(model).items() if is_lora(name) or name.endswith(GARFA))
        return count_parameters(ModelConfig.from_job(self.config)) + sum(added)  # quantised weights are packed

    def _weights(self) -> Any:
        return TrainedWeights(self.model_parts[0]) if self.zero is None else super()._weights()

    def _during(self, phase: Phase) -> AbstractContextManager[None]:
        return self.memory.during(phase)

    def around_forward(self) -> AbstractContextManager[Any]:
        if self.config.base_model.dtype == "float32":
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
        marker = self.folder / "adapter" / ADAPTER_MARKER
        if not marker.is_file():
            return None
        entries = json.loads(marker.read_text(encoding="utf-8"))["training"]
        return sum(entry["steps"] for entry in entries[self.before :])

    def train_step(self, batches: Iterator[Batch]) -> None:
        # Dropout depends only on the step and the rank, so that a resumed run is the same as an uninterrupted one.
        torch.manual_seed(name_seed(self.config.debug.seed or 0, f"step {self.step}, rank {dist.get_rank()}"))
        super().train_step(batches)
        self.memory.stepped()
        if self.config.garfa.enable and self.metrics.should_log(self.step):
            by_head = {f"{layer}.{head}": a for layer, row in self._alphas().items() for head, a in enumerate(row)}
            (optimizer,) = self.optimizers.optimizers
            self.metrics.log_garfa(self.step, float(optimizer.param_groups[-1]["lr"]), by_head)

    def _clipped_together(self) -> list[list[nn.Parameter]]:
        groups = [group["params"] for optimizer in self.optimizers.optimizers for group in optimizer.param_groups]
        return groups if self.config.training.clip == "group" else [[p for group in groups for p in group]]

    def _validate(self) -> float:
        loss = super()._validate()
        if self.step == 0 or not self.config.validation.enable:
            return loss
        if not math.isfinite(loss):
            raise NonFiniteError(f"step {self.step}: validation loss {loss}. Lower optimizer.lr or garfa.lr.")
        if loss < self.best:
            self.best, self.best_step = loss, self.step
            self._write_adapter()
        if loss < self.to_beat - self.config.early_stopping.min_delta:
            self.to_beat, self.no_better = loss, 0
        else:
            self.no_better += 1
        self.enough = self._patience_spent()
        if self.enough:
            logger.info(f"{self.no_better} validations no better than {self.to_beat:.4f}: stopping early")
        return loss

    def _patience_spent(self) -> bool:
        patience = self.config.early_stopping.patience
        return 0 < patience <= self.no_better

    def _evaluated(self, step: int) -> tuple[Path, Training | None]:
        """The adapter as it is, in a directory that is deleted once it is evaluated."""
        self.watch.at(step, "evaluating")
        adapter = self.folder / FOLDER / f"step-{step}" / "adapter"
        self._write_adapter(adapter)
        return adapter, None

    def _write_adapter(self, adapter: Path | None = None) -> None:
        """Writes `adapter/`, or another directory, from the current weights."""
        weights = whole_weights(self.model_parts[0])
        history = self.checkpoints.training_so_far(self.step)
        adapter = adapter or self.folder / "adapter"
        self._on_rank_zero(lambda: write_adapter(adapter, self.config, weights, self.base, history))

    def _export(self) -> None:
        """Finishes the run; `adapter/` holds the step with the best validation loss, or the last step without validation."""
        if not self.config.validation.enable:
            self.best_step = self.step
            self._write_adapter()
        logger.info(f"adapter of step {self.best_step}: {self.folder / 'adapter'}")
        self._on_rank_zero(self._finish)

    def _finish(self) -> None:
        """Draws alpha of the adapter that was kept, and merges it if `merge` is set."""
        out = self.folder / "adapter"
        learned = out / FILES["garfa"]
        g = self.config.garfa
        garfa = garfa_of_tensors(load_file(learned), g.equation, g.queries) if learned.is_file() else None
        if garfa is not None:
            draw_alphas(self.folder / "garfa.png", garfa)
        if self.config.merge:
            # On the device that trained: bitsandbytes may round weights differently on another.
            merge_adapter(out, self.folder / "model", device=self.device)
            logger.info(f"merged: {self.folder / 'model'}")

    def _alphas(self) -> dict[int, list[float]]:
        garfa = garfa_of(self.model_parts[0])  # type: ignore[arg-type]  # a Llama
        return alphas(garfa) if garfa else {}
