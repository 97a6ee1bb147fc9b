"""The trainer, from top to bottom: what it builds, a step, the loop, what it saves and measures, and how it stops.

The host waits for the device once in a step, for the step's figures. On GPUs it reads them after it has launched the next
step, so that the device never waits for the host: until then the device itself keeps an optimizer step with non-finite figures
from changing anything.
"""

import gc
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from farsight import process
from farsight.checkpoints.convert.to_hf import checkpoint_to_model_dir
from farsight.checkpoints.manager import MODEL, ModelWeights, RunCheckpoints
from farsight.checkpoints.model_dir.api import TOKENIZER_FILES, check_model_out
from farsight.configs.schema import JobConfig
from farsight.configs.typed import to_toml
from farsight.data.loader import build_loader, build_validation_loader
from farsight.data.packing import IGNORE
from farsight.data.read_ahead import shared_loader
from farsight.errors import ConfigError, Interrupted, NonFiniteError, SaveError
from farsight.files import write_text
from farsight.model.build import ModelConfig, build_model, freeze_all_but, trained_layers
from farsight.model.flops import Adapters, batch_flops
from farsight.model.llama import Llama
from farsight.new_folder import holds_only, new_folder
from farsight.parallel.balance import PairBalance
from farsight.parallel.batch import model_inputs, to_device
from farsight.parallel.device import prepare_device
from farsight.parallel.float8 import after_step, convert_to_float8
from farsight.parallel.gather import gathered
from farsight.parallel.gradients import clip_gradients, squared_norm
from farsight.parallel.halo import Context
from farsight.parallel.meshes import ParallelDims, connect
from farsight.parallel.parallelize import parallelize, wrapper
from farsight.parallel.pipeline import LossShare, Pipeline, pipeline
from farsight.parallel.ranks import on_rank_zero
from farsight.parallel.replica import replica_of
from farsight.parallel.zero import ZeroOptimizer, ZeroWeights
from farsight.training.evaluations import Evaluator, RunEvaluations, Training
from farsight.training.figures import READ, SAVE, STOP, OnTheWay, StepFigures
from farsight.training.hangs.watch import Watch, set_aside
from farsight.training.memory_recorder import Phase
from farsight.training.metrics import RunMetrics
from farsight.training.optimizers.build import build_optimizers
from farsight.training.optimizers.container import set_rates
from farsight.training.profiling import profiling
from farsight.training.tokenizer import build_tokenizer
from farsight.training.validation import Validator

logger = logging.getLogger("farsight")

Batch = tuple[dict[str, Tensor], Tensor]
"""A micro-batch: token ids, positions and document starts; and the next token's id at each place, IGNORE where none is
trained on."""


class LiveMeasure(Protocol):
    """Measures the model between training steps."""

    def measure(
        self, model_parts: Sequence[nn.Module], around: Callable[[], AbstractContextManager[Any]]
    ) -> dict[str, float | None]:
        """Returns figures by name; all ranks call it.

        Args:
            around: makes the context that a forward pass runs in.
        """
        ...


class Trainer:
    """Trains a model from scratch or from existing weights, in any parallel layout.

    Losses and gradients are shares of the global batch's mean over the tokens that are trained on, so that they are the same
    in every layout; a non-finite loss stops the run before the optimizer changes anything; a run that is told to stop saves
    first. Fine-tuning (`training.finetune.trainer`) replaces the model, the data and what is written at the end.

    Args:
        config: the checked config; the tokenizer's size and the number of steps are filled in.
        live_plasticity: builds the measurement for `metrics.plasticity_freq`; `train.py` passes
            `analysis.plasticity.live.PlasticityMetrics`, which `training/` must not import.
        evaluator: measures for `[[evaluations]]`; `evals.live.LiveEvaluations`, likewise.
    """

    adapters: Adapters | None = None
    """Adapters on frozen layers, in fine-tuning; FLOPs depend on them."""
    enough = False
    """Set to end a run before its last step."""
    leaves: ClassVar[dict[str, Callable[[Path], None]]] = {"model": check_model_out}
    """Folders that a run writes at its end, each with the check that refuses to replace one that is not ours."""

    # Building ────────────────────────────────────────────────────────────────────────────────────

    def __init__(
        self,
        config: JobConfig,
        live_plasticity: Callable[..., LiveMeasure] | None = None,
        evaluator: Evaluator | None = None,
    ) -> None:
        self.config, self.folder = config, Path(config.job.dump_folder)
        self.copy_up: Callable[[], None] = lambda: None
        """On rank 0, copies the run folder's files to the run's object store, if it has one."""
        self.device = prepare_device()
        if process.ranks().rank == 0:
            set_aside(config)
        connect(config)
        self.watch = Watch(config, self.device)
        self.dims = dims = ParallelDims.of(config, dist.get_world_size())
        self.context = Context.of(dims, config)
        batch = dims.mesh("batch")
        self.data_rank = batch.get_local_rank() if batch is not None else 0
        self._make_deterministic()
        gc.disable()  # ranks collect at the same steps, so that none waits for another's collection
        gc.collect()

        self.tokenizer = build_tokenizer(config)
        self.replica = replica_of(dims)
        self.layers, self.trained_layers = ModelConfig.from_job(config).layers(), trained_layers(config)
        self.balance = PairBalance(
            (scope for layer in self.layers for scope in layer.scopes),
            config.training.seq_len,
            dims.cp,
            config.parallelism.context_parallel_load_balancer,
        )
        self.loader = self._build_loader()
        if config.data.mask_documents and dims.loss > 1:
            self.loader.arrange = self.balance
        self.validator = None
        self.metrics = RunMetrics(config, dims, self.device)

        self.loss_fn = LossShare()
        self.pipeline: Pipeline | None = None
        self.model_parts = self._build_model()
        self.trained_parameters = sum(
            p.numel() for part in self.model_parts for p in part.parameters() if p.requires_grad
        )
        self.optimizers = build_optimizers(config, self.model_parts, dims)
        # DeepSpeed's engine; None if the model is called directly.
        self.zero = self.optimizers if isinstance(self.optimizers, ZeroOptimizer) else None
        # DDP and DeepSpeed average gradients over their ranks, but the loss is already a share of the global batch's: undo it.
        self.wrapper = wrapper(config, dims)
        self.loss_copies = dims.batch if self.wrapper in ("ddp", "zero") else 1
        self.skip: Tensor | None = None
        """1 on the device from the first step on whose figures are not finite, which the optimizers then leave out, and 0
        before; None where the host reads the figures first."""
        if self.device.type != "cpu" and self.optimizers.can_skip and not config.training.enable_cpu_offload:
            self.skip = torch.zeros((), device=self.device)
        self.launched: StepFigures | None = None
        self.copies = None if self.device.type == "cpu" else torch.get_device_module(self.device).Stream()

        self.step = 0
        self.tokens_seen = 0
        """Tokens of all ranks, without padding; up to the last step whose figures were wanted."""
        self.checkpoints = RunCheckpoints(
            config,
            {
                "model": self._weights(),
                "optimizer": self.optimizers,
                "dataloader": self.loader,
                "train_state": self,
            },
            self.metrics.log_checkpoint,
        )
        self.stop_signal: int | None = None
        self.stop_asked_at = 0.0
        self.evaluations = RunEvaluations(
            config,
            evaluator,
            self.tokenizer,
            self.checkpoints,
            self.metrics,
            self._evaluated,
            lambda: self.stop_signal is not None,
        )
        if config.validation.enable:
            batches = self._build_validation_loader()
            self.validator = Validator(
                config, dims, batches, self.loss_fn, self.pipeline, self.around_forward, self.device
            )
        self.plasticity = None
        if config.metrics.plasticity_freq:
            assert live_plasticity is not None
            self.plasticity = live_plasticity(config, dims, self.tokenizer, self.device, self.context, self.pipeline)
        self.stopping = False
        """True once the figures of a step have said that a rank was told to stop; the same on all ranks."""
        self.tokens_logged, self.flops = 0, 0.0
        self.tokens, self.padding, self.cut = 0, 0, 0
        """Tokens of this rank's rows since the last report, without padding; and what packing did to them: see `Packed`."""
        self.pairs: list[np.ndarray] = []
        """Visible pairs of the context-parallel ranks in each micro-batch of the newest step, if it is logged."""

    def _make_deterministic(self) -> None:
        """Seeds torch, with another seed on each pipeline stage, and asks for deterministic algorithms if `[debug]` does."""
        debug, stages = self.config.debug, self.dims.mesh("pp")
        if debug.seed is not None:
            torch.manual_seed(debug.seed + (stages.get_local_rank() if stages is not None else 0))
        if debug.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=debug.deterministic_warn_only)
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what cuBLAS needs to be deterministic

    def _build_loader(self) -> Any:
        build = partial(build_loader, self.config, self.tokenizer, self.data_rank, self.dims.batch)
        return shared_loader(build, self.replica)

    def _build_validation_loader(self) -> Any:
        return build_validation_loader(self.config, self.tokenizer, self.data_rank, self.dims.batch, self.replica)

    def _untrained(self) -> Llama:
        """The model on the meta device, without weights."""
        model = build_model(ModelConfig.from_job(self.config))
        freeze_all_but(model, self.trained_layers)
        return model

    def _parameters(self, model: Llama) -> int:
        """The number of a model's parameters."""
        return sum(p.numel() for p in model.parameters())

    def _weights(self) -> Any:
        """The part of the state that holds weights."""
        return ModelWeights(self.model_parts) if self.zero is None else ZeroWeights(self.zero)

    def _build_model(self) -> list[Llama]:
        """The model, or this rank's stages of it, in the run's layout and with its first weights."""
        config, dims, default = self.config, self.dims, torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, config.training.dtype))
        try:
            with torch.device("meta"):
                model = self._untrained()
        finally:
            torch.set_default_dtype(default)
        convert_to_float8(model, config, sharded=dims.fsdp > 1)
        if config.model.print_after_conversion:
            logger.info(model)
        logger.info(f"model: {self._parameters(model):,} parameters")
        if dims.pp > 1:
            self.pipeline, parts = pipeline(model, dims, config, self.device, self.loss_fn)
        else:
            parallelize(model, dims, config)
            parts = [model]
        offloaded = config.training.enable_cpu_offload
        for part in parts:
            part.to_empty(device="cpu" if offloaded else self.device)
            part.init_weights(buffer_device=self.device if offloaded else None)
            part.train()
        return parts

    def around_forward(self) -> AbstractContextManager[Any]:
        """The context of a forward pass; in pre-training the weights themselves are cast."""
        return nullcontext()

    # A step ──────────────────────────────────────────────────────────────────────────────────────

    def micro_batches(self) -> Iterator[Batch]:
        """This rank's micro-batches, without end; counts the time spent waiting for them."""
        batches = iter(self.loader)
        while True:
            started = time.perf_counter()
            self.watch.at(self.step, "waiting for data")
            inputs, labels = next(batches)
            self.watch.at(self.step, "training")
            self.metrics.waited(time.perf_counter() - started)
            yield inputs, labels

    def train_step(self, batches: Iterator[Batch]) -> None:
        """Runs one optimizer step over the global batch, or launches it.

        Args:
            batches: yields this rank's micro-batches.

        Raises:
            NonFiniteError: the loss or the gradient norm of this step or of the one before is not finite; the weights have
                not changed in either.
        """
        micro_batches = [next(batches) for _ in range(self.loader.micro_batches_per_step)]
        valid = sum(int((labels != IGNORE).sum()) for _, labels in micro_batches)
        global_valid_tokens = self._sum_over_data_ranks(self._number(valid))
        packed = self.loader.packed
        self.tokens += sum(labels.numel() for _, labels in micro_batches) - packed.padding
        self.padding, self.cut = self.padding + packed.padding, self.cut + packed.cut
        if self.dims.loss > 1 and self.metrics.should_log(self.step):
            self.pairs = [self._pairs(inputs["document_starts"]) for inputs, _ in micro_batches]

        lr = set_rates(self.optimizers.optimizers, self.step - 1)
        self.optimizers.zero_grad()
        losses = []
        on_device = [self._to_device(batch) for batch in micro_batches]
        for number, (inputs, labels) in enumerate(on_device):
            self._expect_step(last=number == len(micro_batches) - 1)
            losses.append(self.forward_backward(inputs, labels, global_valid_tokens))
            self.flops += batch_flops(
                self.config.architecture,
                self.layers,
                micro_batches[number][0]["positions"].expand(labels.shape),
                self.trained_layers,
                self.adapters,
            )

        exchanged = self._exchange(losses)
        former, now = self.launched, StepFigures(self.step, lr, losses, on_device, OnTheWay(exchanged))
        self.launched = now
        if self.skip is None:
            self._read(now)
        self._clip_and_step(exchanged)
        if self.skip is not None and former is not None:
            self._read(former)
        self.metrics.advance()

    def _to_device(self, batch: Batch) -> Batch:
        """Copies a micro-batch to the device, beside what is still running there.

        Its memory is the copying stream's, so it has to be kept until the step is known to have ended: `StepFigures` does.
        """
        if self.copies is None:
            return batch
        inputs, labels = batch
        streams = torch.get_device_module(self.device)
        with streams.stream(self.copies):
            inputs = to_device(inputs, self.device)
            labels = labels.to(self.device, non_blocking=True)
        streams.current_stream().wait_stream(self.copies)
        return inputs, labels

    def _exchange(self, losses: list[Tensor]) -> Tensor:
        """The step's figures on the device, the sums over all ranks: see `StepFigures.exchanged`; fp64."""
        # Ranks of tensor parallelism have the same loss.
        loss = torch.stack(losses).double().sum() / self.dims.tp
        squares = [] if self.zero else [squared_norm(group, self.dims) for group in self._clipped_together()]
        asked = self._number(
            STOP * (self.stop_signal is not None)
            + SAVE * self.checkpoints.minutes_passed()
            + READ * self.evaluations.beside.poll()
        )
        figures = torch.stack([loss, asked, *(square.to(self.device) for square in squares)])
        if self.dims.world_size > 1:
            dist.all_reduce(figures)
        return figures

    def _read(self, figures: StepFigures) -> None:
        """Reads a step's figures, the step's only wait for the device.

        Raises:
            NonFiniteError: one of them is not finite.
        """
        self.stopping = self.stopping or figures.stopping
        self.checkpoints.overdue = self.checkpoints.overdue or figures.saving
        self.evaluations.arrived = self.evaluations.arrived or figures.reading
        if not (math.isfinite(figures.loss) and math.isfinite(figures.grad_norm)):
            self._report_non_finite(figures)

    def _pairs(self, document_starts: Tensor) -> np.ndarray:
        """Visible pairs of each context-parallel rank in a micro-batch, from its document starts on the host."""
        starts = document_starts.numpy()
        return self.balance.of_ranks(starts if self.config.data.mask_documents else np.zeros_like(starts))

    def _imbalance(self) -> float:
        """Visible pairs of the rank that has most, over the mean, in the newest step. Ranks wait for each other in every
        micro-batch, so it is the sum over micro-batches of the most, over the sum of the means."""
        pairs = np.stack(self.pairs)
        most, total = (torch.tensor(x, dtype=torch.float64, device=self.device) for x in (pairs.max(1), pairs.sum()))
        if (mesh := self.dims.mesh("batch")) is not None:
            dist.all_reduce(most, dist.ReduceOp.MAX, mesh.get_group())
        return float(most.sum() / self._sum_over_data_ranks(total)) * self.dims.loss

    def _settle(self) -> None:
        """Reads the figures of the newest step, so that nothing is left to go wrong with it, and logs it if that is due."""
        figures = self.launched
        if figures is None:
            return
        self._read(figures)
        # Ranks hold different documents, so the numbers of visible pairs and of tokens without padding differ.
        own = torch.tensor([self.flops, self.tokens, self.padding, self.cut], dtype=torch.float64, device=self.device)
        flops, tokens, padding, cut = self._sum_over_data_ranks(own).tolist()
        self.tokens_seen = self.tokens_logged + round(tokens)
        if self.metrics.should_log(figures.step):
            packing = {"padding": padding / max(1, tokens + padding), "cut_documents": round(cut)}
            if self.dims.loss > 1:
                packing["imbalance"] = self._imbalance()
            self.metrics.log_step(
                figures.step,
                figures.loss,
                figures.grad_norm,
                figures.lr,
                self.tokens_seen,
                round(tokens),
                flops,
                packing,
            )
            self.tokens_logged, self.flops, self.tokens, self.padding, self.cut = self.tokens_seen, 0.0, 0, 0, 0
        self.launched = None

    def forward_backward(self, inputs: dict[str, Tensor], labels: Tensor, global_valid_tokens: Tensor) -> Tensor:
        """Runs a micro-batch forward and backward; returns its share of the global batch's mean loss in nats.

        Args:
            inputs, labels: a micro-batch on the device.
            global_valid_tokens: trained-on tokens of the global batch.
        """
        arguments = model_inputs(self.config, self.context, inputs, labels)
        self.loss_fn.denominator = global_valid_tokens / self.loss_copies
        if self.pipeline is not None:
            return self.pipeline.train(arguments).detach()
        with self._during("forward"), self.around_forward():
            loss = self.loss_fn((self.zero.engine if self.zero else self.model_parts[0])(**arguments))
        with self._during("backward"):
            loss.backward()
        return loss.detach() / self.loss_copies

    def _clip_and_step(self, exchanged: Tensor) -> None:
        """Clips gradients and steps; if a figure of the step is not finite, nothing changes."""
        with self._during("optimizer"):
            if isinstance(self.optimizers, ZeroOptimizer):
                assert self.launched is not None
                self.launched.engine_norm = self.optimizers.clip_and_step()
                self._read(self.launched)
                return
            if self.skip is not None:
                self.skip = torch.maximum(self.skip, 1 - exchanged.isfinite().all().float())
            for group, norm in zip(self._clipped_together(), exchanged[2:].sqrt(), strict=True):
                clip_gradients(group, self.config.training.max_norm, norm)
            self.checkpoints.wait_for_staging()
            self.optimizers.step(self.skip)
            after_step(self.model_parts, self.config, sharded=self.dims.fsdp > 1)

    def _during(self, phase: Phase) -> AbstractContextManager[None]:
        """Marks a phase of the step, so that an out-of-memory error can name it."""
        return nullcontext()

    def _clipped_together(self) -> list[list[nn.Parameter]]:
        """Groups of parameters whose gradients are clipped to a common norm."""
        return [[p for part in self.model_parts for p in part.parameters()]]

    def _number(self, value: float) -> Tensor:
        """An fp64 scalar on the device, filled there: a copy from the host would wait for the device."""
        return torch.full((), float(value), dtype=torch.float64, device=self.device)

    def _sum_over_data_ranks(self, value: Tensor) -> Tensor:
        if (mesh := self.dims.mesh("batch")) is not None:
            dist.all_reduce(value, group=mesh.get_group())
        return value

    def _expect_step(self, last: bool) -> None:
        """Leaves to the last micro-batch of a step what it needs once: the exchange of gradients between copies of the weights, and
        freeing weights that were only cast."""
        if self.zero is not None:
            self.zero.expect_step(last)
        parts: list[Any] = [*self.model_parts]
        for part in parts:
            if self.wrapper == "ddp":
                part.set_requires_gradient_sync(last)
            elif self.wrapper == "fsdp":
                part.set_requires_all_reduce(last)
                if self.dims.fsdp == 1 and self.config.parallelism.fsdp_reshard_after_forward != "always":
                    part.set_reshard_after_backward(last)

    def _report_non_finite(self, figures: StepFigures) -> None:
        """Logs the step and the micro-batch, saves the batch for inspection, and stops every rank.

        Raises:
            NonFiniteError: always.
        """
        rank, step, losses = dist.get_rank(), figures.step, figures.losses
        bad = [i for i, value in enumerate(losses) if not torch.isfinite(value)]
        where = f"micro-batch {', '.join(map(str, bad))} of {len(losses)} on rank {rank}" if bad else "no single loss"
        meshes = (self.dims.mesh(name) for name in ("tp", "cp"))
        alike = any(mesh is not None and mesh.get_local_rank() for mesh in meshes)  # another rank saves the same batch
        if (bad and not alike) or rank == 0:
            inputs, labels = figures.micro_batches[bad[0] if bad else 0]
            path = self.folder / "non_finite" / f"step-{step}-rank-{rank}.safetensors"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                save_file({k: v.contiguous().cpu() for k, v in {**inputs, "labels": labels}.items()}, path)
                kept = f"is saved to {path}"
            except (OSError, SafetensorError) as error:
                kept = f"can't be saved to {path}: {error}"
            logger.error(f"step {step}: not finite in {where}; the batch {kept}")
        raise NonFiniteError(
            f"step {step}: loss {figures.loss}, gradient norm {figures.grad_norm}: stopped before the optimizer step. "
            "Lower optimizer.lr, lengthen lr_scheduler.warmup_steps, or inspect the saved batch."
        )

    # The loop ────────────────────────────────────────────────────────────────────────────────────

    def train(self) -> None:
        """Trains from the newest checkpoint, or from the start, to the last step.

        Raises:
            Interrupted: a signal asked the run to stop; a checkpoint has been saved.
            NonFiniteError: a loss or a gradient norm is not finite.
            GateError: a figure of an evaluation met its `stop_if`; a checkpoint has been saved.
            SaveError: a checkpoint or the model directory can't be written.
        """
        config, metrics = self.config, self.metrics
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        process.hand_over()
        if config.job.print_config:
            logger.info(to_toml(config))
        self.watch.at(0, "loading")
        self.checkpoints.load(step=config.checkpoint.load_step)
        self.tokens_logged = self.tokens_seen
        self._save_run_files()
        self._copy_up()
        metrics.start(self.step)
        self.evaluations.resume(self.step)
        if self.step == 0 and not self._told_to_stop():
            self._validate()
            self._measure_plasticity()
        if self._told_to_stop():  # loading and validating may take long
            raise Interrupted(process.BEFORE_TRAINING)
        if self.step >= config.training.steps:
            logger.info(f"step {self.step} of {config.training.steps} is already done: nothing is left to train")
        batches, first = self.micro_batches(), True
        with profiling(config, self.step) as profiled:
            while self.step < config.training.steps and not self.enough:
                self.step += 1
                if self.step % config.training.gc_freq == 0:
                    gc.collect(1)
                self.train_step(batches)
                last = self.step == config.training.steps
                validating = last or self.step % config.validation.freq == 0
                measuring = self.plasticity is not None and self.step % config.metrics.plasticity_freq == 0
                if (
                    validating
                    or measuring
                    or self.stopping
                    or self.checkpoints.due(self.step)
                    or self.evaluations.due(self.step, last)
                    or metrics.should_log(self.step)
                ):
                    self._settle()
                if validating:
                    self._validate()
                    last = last or self.enough
                if last or measuring:
                    self._measure_plasticity()
                if last or not self.stopping:
                    self.evaluations.after_step(self.step, last)
                ending = last or self.stopping or bool(self.evaluations.gate)
                if ending or self.checkpoints.due(self.step):
                    self.watch.at(self.step, "saving")
                    with metrics.paused():
                        self._copy_up()  # first, so that a checkpoint's figures are there with it
                        self.checkpoints.save(self.step, last_step=ending)
                profiled()
                self.evaluations.stop_at_gate()
                if self.stopping and not last:
                    raise Interrupted(self._where_it_stopped())
                if first and dist.get_world_size() > 1:
                    # The first step also compiles and connects; from here on a shorter timeout finds lost ranks sooner.
                    first = False
                    self.dims.set_timeout(config.comm.train_timeout_seconds)
                    self.watch.limit = float(config.comm.train_timeout_seconds)
        self.watch.at(self.step, "finishing")
        for source, reasons in self.loader.skipped.items():
            logger.warning(f"{source}: rows skipped on rank {dist.get_rank()}: {reasons}")
        self.checkpoints.finish()
        self.evaluations.finish()
        self._export()
        metrics.finish(self.step)
        self._copy_up()

    # Measuring and saving ────────────────────────────────────────────────────────────────────────

    def _validate(self) -> float:
        """Returns the loss on held-out data; NaN if validation is off."""
        if self.validator is None:
            return math.nan
        self.watch.at(self.step, "validating")
        with self.metrics.paused():
            loss, tokens = self.validator.loss(self.model_parts)
        self.metrics.log_validation(self.step, loss, tokens)
        self.evaluations.validated(self.step, loss)
        return loss

    def _measure_plasticity(self) -> None:
        """Measures positional bias and plasticity of heads on held-out data, if `metrics.plasticity_freq` is set."""
        if self.plasticity is None:
            return
        started = time.perf_counter()
        self.watch.at(self.step, "measuring plasticity")
        with self.metrics.paused():
            figures = self.plasticity.measure(self.model_parts, self.around_forward)
        self.metrics.log_plasticity(self.step, time.perf_counter() - started, figures)

    def _evaluated(self, step: int) -> tuple[Path, Training | None]:
        """The model of a step for `[[evaluations]]`: its checkpoint, which may be still to come, and its gathered weights."""
        self.watch.at(step, "evaluating")
        weights = gathered(self.checkpoints.states[MODEL].state_dict())
        return self.checkpoints.folder / f"step-{step}", (self.checkpoints.model_config, weights)

    def state_dict(self) -> dict[str, Any]:
        """The step, and the tokens of all ranks together, so that a run can resume on a different number of ranks."""
        return {"step": self.step, "tokens_seen": self.tokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]
        self.tokens_seen = state_dict["tokens_seen"]

    def _save_run_files(self) -> None:
        def write() -> None:
            for name, check in self.leaves.items():
                check(self.folder / name)
            write_text(self.folder / "config.toml", to_toml(self.config))
            tokenizer = self.folder / "tokenizer"
            if tokenizer != Path(self.config.tokenizer.path):
                with new_folder(tokenizer, lambda there: holds_only(there, (), TOKENIZER_FILES)) as part:
                    self.tokenizer.save(part)

        try:
            on_rank_zero(write)
        except OSError as error:
            raise ConfigError(f"The run folder {self.folder} can't be written: {error}.") from error

    def _export(self) -> None:
        """Writes the run's model directory from its last checkpoint, which is the same under every layout."""

        def write() -> None:
            saved, out = self.checkpoints.saved(self.step), self.folder / "model"
            if saved is None:
                logger.warning(
                    f"step {self.step} has no checkpoint, so no model directory is written (see [checkpoint])"
                )
                return
            checkpoint_to_model_dir(saved, out, verify=False)  # it was verified when it was saved or loaded
            logger.info(f"model directory: {out}")

        self._on_rank_zero(write)

    def _copy_up(self) -> None:
        if self.config.job.store:
            self._on_rank_zero(self.copy_up)

    def _on_rank_zero(self, work: Callable[[], None]) -> None:
        """Writes files on rank 0 while the others wait, for hours if needed.

        Raises:
            SaveError: on all ranks, if they can't be written.
        """

        def write() -> None:
            try:
                work()
            except (OSError, SafetensorError) as error:
                raise SaveError(
                    f"{self.folder} can't be written: {error}. Make room there; the same command continues from the newest checkpoint."
                ) from error

        on_rank_zero(write)

    # Stopping ────────────────────────────────────────────────────────────────────────────────────

    def _on_signal(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self.stop_signal is None:
            self.stop_signal, self.stop_asked_at = number, now
            logger.info(
                f"{signal.Signals(number).name}: stopping after this step; Ctrl-C once more stops at once, without saving"
            )
            self.evaluations.signalled()
        elif number == signal.SIGINT and now - self.stop_asked_at > 1:
            # Launchers often send a signal twice at once; a later one is a person pressing Ctrl-C again.
            raise KeyboardInterrupt

    def _told_to_stop(self) -> bool:
        """True if any rank was told to stop before the first step: a scheduler's signal may reach only some of them."""
        told = self._number(self.stop_signal is not None)
        if dist.get_world_size() > 1:
            dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return bool(told)

    def _where_it_stopped(self) -> str:
        saved = self.checkpoints.saved(self.step) is not None
        rest = "the same command continues from there" if saved else "nothing was saved (see [checkpoint])"
        return f"stopped after step {self.step}; {rest}"

    def close(self) -> None:
        """Ends an evaluation beside the run, and the threads: reading ahead, saving and deleting checkpoints, writing metrics."""
        self.evaluations.close()
        self.loader.close()
        self.checkpoints.close()
        self.metrics.close()
        self.watch.close()
