"""The trainer: the training step, the loop, and the files a run leaves. `training/spec.py` builds its parts."""

import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torchtitan.components.checkpoint import MODEL
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.profiling import maybe_enable_memory_snapshot, maybe_enable_profiling
from torchtitan.train import Trainer as TitanTrainer

from farsight import process
from farsight.checkpoints.convert.to_hf import checkpoint_to_model_dir
from farsight.checkpoints.manager import RunCheckpoints
from farsight.checkpoints.model_dir.api import TOKENIZER_FILES, check_model_out
from farsight.configs.schema import JobConfig
from farsight.configs.typed import to_toml
from farsight.errors import ConfigError, Interrupted, NonFiniteError, SaveError
from farsight.files import write_text
from farsight.model.build import ModelConfig, trained_layers
from farsight.model.flops import Adapters, batch_flops
from farsight.new_folder import holds_only, new_folder
from farsight.parallel.batch import model_inputs, sum_of_losses
from farsight.parallel.device import prepare_device
from farsight.parallel.gradients import clip_gradients
from farsight.parallel.halo import Context
from farsight.parallel.pipeline import LossShare, Pipeline
from farsight.parallel.ranks import on_rank_zero
from farsight.parallel.zero import ZeroOptimizer, ZeroWeights
from farsight.training.memory_recorder import Phase
from farsight.training.metrics import RunMetrics
from farsight.training.spec import register

logger = logging.getLogger("farsight")


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


class Trainer(TitanTrainer):
    """torchtitan's Trainer, with fixes.

    Gradients are normalised by the global batch's tokens under DDP too; a non-finite loss stops the run before the
    optimizer step; a run that is told to stop saves first; and FLOPs count only the pairs that heads see.
    """

    checkpointer: RunCheckpoints
    metrics_processor: RunMetrics  # type: ignore[assignment]  # narrower than torchtitan's
    loss_fn: LossShare
    register: Callable[[Any], None] = staticmethod(register)
    """Registers the TrainSpec that torchtitan builds."""
    adapters: Adapters | None = None
    """Adapters on frozen layers, in fine-tuning; FLOPs depend on them."""
    enough = False
    """Set to end a run before its last step."""
    leaves: ClassVar[dict[str, Callable[[Path], None]]] = {"model": check_model_out}
    """Folders that a run writes at its end, each with the check that refuses to replace one that is not ours."""

    def __init__(self, config: JobConfig, live_plasticity: Callable[..., LiveMeasure] | None = None) -> None:
        """Builds everything that a run needs.

        Args:
            live_plasticity: builds the measurement for `metrics.plasticity_freq`; `train.py` passes
                `analysis.plasticity.live.PlasticityMetrics`, which `training/` must not import.
        """
        prepare_device()
        self.register(config)
        super().__init__(config)  # type: ignore[arg-type]  # our config is a subclass, which its annotation does not name
        self.checkpointer.close()
        self.checkpointer = RunCheckpoints(
            config,
            dataloader=self.dataloader,
            model_parts=self.model_parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
        )
        # DeepSpeed's engine; None if the model is called directly.
        self.zero = self.optimizers if isinstance(self.optimizers, ZeroOptimizer) else None
        if self.zero is not None:
            self.checkpointer.states[MODEL] = ZeroWeights(self.zero)
        self.maybe_enable_amp = self._precision()
        if config.validation.enable:
            self.validator.maybe_enable_amp = self.maybe_enable_amp  # type: ignore[attr-defined]  # our validator's
        self.layers = ModelConfig.from_job(config).layers()
        self.trained_layers = trained_layers(config)
        dims = self.parallel_dims
        trained = sum(p.numel() for part in self.model_parts for p in part.parameters() if p.requires_grad)
        self.trained_parameters = trained  # the whole model's: `training.layers` can't be used with pipelines
        self.pipeline = (
            Pipeline(self.pp_schedule, self.pp_has_first_stage, self.pp_has_last_stage) if dims.pp_enabled else None
        )
        self.context = Context.of(dims, config)
        # DDP averages gradients over its ranks, but the loss is already a share of the global batch's: undo the average.
        self.loss_copies = dims.dp_replicate if dims.world_size == dims.dp_replicate else 1
        if self.zero is not None:
            self.loss_copies = self._data_ranks()  # DeepSpeed averages too
        self.plasticity = None
        if config.metrics.plasticity_freq:
            assert live_plasticity is not None
            self.plasticity = live_plasticity(config, dims, self.tokenizer, self.device, self.context, self.pipeline)
        self.stop_signal: int | None = None
        self.stop_asked_at = 0.0
        self.tokens_logged, self.flops = 0, 0.0

    def init_distributed(self) -> ParallelDims:
        """Sets up torch.distributed as torchtitan does, but without what needs an accelerator where there is none: a second
        backend for CPU offload, and the folder for the flight recorder's traces."""
        training, comm = self.job_config.training, self.job_config.comm
        asked = training.enable_cpu_offload, comm.trace_buf_size
        if self.device.type == "cpu":
            training.enable_cpu_offload, comm.trace_buf_size = False, 0
        try:
            return super().init_distributed()
        finally:
            training.enable_cpu_offload, comm.trace_buf_size = asked

    def _precision(self) -> Any:
        """The context that runs forward passes in mixed precision if the weights themselves are not cast."""
        if self.job_config.training.mixed_precision_param == "float32" or self.zero is not None:
            # Autocast does not support fp32 and would warn at every step; DeepSpeed has cast the weights themselves.
            return nullcontext()
        return self.maybe_enable_amp

    @contextmanager
    def _around_forward(self) -> Iterator[None]:
        with self.train_context(), self.maybe_enable_amp:
            yield

    def state_dict(self) -> dict[str, Any]:
        """The step, and the tokens of all ranks together, so that a run can resume on a different number of ranks."""
        return {"step": self.step, "tokens_seen": self.ntokens_seen * self._data_ranks()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]
        self.ntokens_seen = state_dict["tokens_seen"] // self._data_ranks()

    # The training step ───────────────────────────────────────────────────────────────────────────

    def post_dataloading_process(
        self, input_dict: dict[str, Tensor], labels: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Any]]:
        """Returns tokens, labels, no extra inputs, and keyword arguments for every part of the model.

        Args:
            input_dict: token ids, positions and document starts of a micro-batch.
            labels: the next token's id at each place, `IGNORE_INDEX` where none is trained on.
        """
        extra = model_inputs(self.job_config, self.context, input_dict, labels)
        return extra.pop("tokens"), extra["labels"], {}, extra

    def forward_backward_step(
        self, *, input_dict: dict[str, Tensor], labels: Tensor, global_valid_tokens: Tensor
    ) -> Tensor:
        """Runs a micro-batch forward and backward; returns its share of the global batch's mean loss in nats.

        Args:
            global_valid_tokens: trained-on tokens of the global batch.
        """
        inputs, labels, _, kwargs = self.post_dataloading_process(input_dict, labels)
        self.loss_fn.denominator = global_valid_tokens / self.loss_copies
        if self.pipeline is not None:
            return self.pipeline.train({"tokens": inputs, **kwargs}).detach()
        with self._during("forward"), self.train_context(), self.maybe_enable_amp:
            loss = self.loss_fn((self.zero.engine if self.zero else self.model_parts[0])(inputs, **kwargs))
        with self._during("backward"):
            loss.backward()
        return loss.detach() / self.loss_copies

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Tensor], Tensor]]) -> None:
        """Runs one optimizer step over the global batch.

        Args:
            data_iterator: yields this rank's micro-batches.

        Raises:
            NonFiniteError: the loss or the gradient norm is not finite; the weights have not changed.
        """
        micro_batches = [next(data_iterator) for _ in range(self.gradient_accumulation_steps)]
        valid = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in micro_batches)
        global_valid_tokens = self._sum_over_data_ranks(torch.tensor(float(valid), device=self.device))

        self.optimizers.zero_grad()
        losses = []
        for number, (input_dict, labels) in enumerate(micro_batches):
            self._sync_gradients(last=number == len(micro_batches) - 1)
            on_device = {k: v.to(self.device, non_blocking=True) for k, v in input_dict.items()}
            losses.append(
                self.forward_backward_step(
                    input_dict=on_device,
                    labels=labels.to(self.device, non_blocking=True),
                    global_valid_tokens=global_valid_tokens,
                )
            )
            positions = input_dict["positions"].expand(labels.shape)
            self.flops += batch_flops(
                self.job_config.architecture, self.layers, positions, self.trained_layers, self.adapters
            )

        loss = float(sum_of_losses(self.parallel_dims, torch.stack(losses).sum()))
        lr = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        grad_norm = self._clip_and_step() if math.isfinite(loss) else math.nan
        if not math.isfinite(grad_norm):
            self._report_non_finite(loss, grad_norm, losses, micro_batches)
        self.lr_schedulers.step()

        self.metrics_processor.advance()
        if self.metrics_processor.should_log(self.step):
            tokens = self.ntokens_seen * self._data_ranks()
            # Ranks hold different documents, so the numbers of visible pairs differ.
            flops = float(self._sum_over_data_ranks(torch.tensor(self.flops, dtype=torch.float64, device=self.device)))
            self.metrics_processor.log_step(self.step, loss, grad_norm, lr, tokens, tokens - self.tokens_logged, flops)
            self.tokens_logged, self.flops = tokens, 0.0

    def _clip_and_step(self) -> float:
        """Clips gradients and steps; returns their norm before clipping. If it is not finite, nothing has changed."""
        with self._during("optimizer"):
            return self.zero.clip_and_step() if self.zero is not None else self._clip_and_step_groups()

    def _clip_and_step_groups(self) -> float:
        norms = [
            clip_gradients(parameters, self.job_config.training.max_norm, self.parallel_dims)
            for parameters in self._clipped_together()
        ]
        grad_norm = math.hypot(*norms)
        if math.isfinite(grad_norm):
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
        return grad_norm

    def _during(self, phase: Phase) -> AbstractContextManager[None]:
        """Marks a phase of the step, so that an out-of-memory error can name it."""
        return nullcontext()

    def _clipped_together(self) -> list[list[nn.Parameter]]:
        """Groups of parameters whose gradients are clipped to a common norm."""
        return [[p for part in self.model_parts for p in part.parameters()]]

    def _data_ranks(self) -> int:
        return self.parallel_dims.dp_replicate * self.parallel_dims.dp_shard

    def _sum_over_data_ranks(self, value: Tensor) -> Tensor:
        if self.parallel_dims.dp_enabled:
            dist.all_reduce(value, group=self.parallel_dims.get_mesh("batch").get_group())
        return value

    def _sync_gradients(self, last: bool) -> None:
        """Has DDP exchange gradients only after the last micro-batch of a step."""
        if self.zero is not None:
            self.zero.expect_step(last)
        elif self.loss_copies > 1 and self.gradient_accumulation_steps > 1:
            self.model_parts[0].set_requires_gradient_sync(last)  # type: ignore[operator]  # FSDP and DDP add the method to the module

    def _report_non_finite(
        self, loss: float, grad_norm: float, losses: list[Tensor], micro_batches: list[tuple[dict[str, Tensor], Tensor]]
    ) -> None:
        """Logs the step and the micro-batch, saves the batch for inspection, and stops every rank.

        Raises:
            NonFiniteError: always.
        """
        rank = dist.get_rank()
        bad = [i for i, value in enumerate(losses) if not torch.isfinite(value)]
        where = f"micro-batch {', '.join(map(str, bad))} of {len(losses)} on rank {rank}" if bad else "no single loss"
        meshes = (self.parallel_dims.get_optional_mesh(name) for name in ("tp", "cp"))
        alike = any(mesh is not None and mesh.get_local_rank() for mesh in meshes)  # another rank saves the same batch
        if (bad and not alike) or rank == 0:
            folder = Path(self.job_config.job.dump_folder) / "non_finite"
            inputs, labels = micro_batches[bad[0] if bad else 0]
            path = folder / f"step-{self.step}-rank-{rank}.safetensors"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                save_file({**{k: v.contiguous() for k, v in inputs.items()}, "labels": labels.contiguous()}, path)
                kept = f"is saved to {path}"
            except (OSError, SafetensorError) as error:
                kept = f"can't be saved to {path}: {error}"
            logger.error(f"step {self.step}: not finite in {where}; the batch {kept}")
        raise NonFiniteError(
            f"step {self.step}: loss {loss}, gradient norm {grad_norm}: stopped before the optimizer step. "
            "Lower optimizer.lr, lengthen lr_scheduler.warmup_steps, or inspect the saved batch."
        )

    # The loop ────────────────────────────────────────────────────────────────────────────────────

    def train(self) -> None:
        """Trains from the newest checkpoint, or from the start, to the last step.

        Raises:
            Interrupted: a signal asked the run to stop; a checkpoint has been saved.
            NonFiniteError: a loss or a gradient norm is not finite.
            SaveError: a checkpoint or the model directory can't be written.
        """
        config, metrics = self.job_config, self.metrics_processor
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        process.hand_over()
        self.checkpointer.load(step=config.checkpoint.load_step)
        self.tokens_logged = self.ntokens_seen * self._data_ranks()
        self._save_run_files()
        metrics.start(self.step)
        if self.step == 0 and not self._stopping():
            self._validate()
            self._measure_plasticity()
        if self._stopping():  # loading and validating may take long
            raise Interrupted
        if self.step >= config.training.steps:
            logger.info(f"step {self.step} of {config.training.steps} is already done: nothing is left to train")
        profiling: dict[str, Any] = {"global_step": self.step, "base_folder": config.job.dump_folder}
        with (
            maybe_enable_profiling(config.profiling, **profiling) as torch_profiler,
            maybe_enable_memory_snapshot(config.profiling, **profiling) as memory_profiler,
        ):
            assert self.dataloader is not None
            data_iterator = self.batch_generator(self.dataloader)
            first = True
            while self.step < config.training.steps and not self.enough:
                self.step += 1
                self.gc_handler.run(self.step)
                self.train_step(data_iterator)
                last = self.step == config.training.steps
                if last or self.step % config.validation.freq == 0:
                    self._validate()
                    last = last or self.enough
                if last or (self.plasticity and self.step % config.metrics.plasticity_freq == 0):
                    self._measure_plasticity()
                stopping = self._stopping()
                started = time.perf_counter()
                self.checkpointer.save(self.step, last_step=last or stopping)
                metrics.pause(time.perf_counter() - started)
                for profiler in (torch_profiler, memory_profiler):
                    if profiler:
                        profiler.step()
                if stopping and not last:
                    raise Interrupted(self._where_it_stopped())
                if first and dist.get_world_size() > 1:
                    # The first step also compiles and connects; from here on a shorter timeout finds lost ranks sooner.
                    first, timeout = False, timedelta(seconds=config.comm.train_timeout_seconds)
                    dist_utils.set_pg_timeouts(timeout, self.parallel_dims)
        for source, reasons in self.dataloader.skipped.items():  # type: ignore[attr-defined]  # our loader's, beyond torchtitan's protocol
            logger.warning(f"{source}: rows skipped on rank {dist.get_rank()}: {reasons}")
        self._export()

    def _where_it_stopped(self) -> str:
        saved = self.checkpointer.saved(self.step) is not None
        rest = "the same command continues from there" if saved else "nothing was saved (see [checkpoint])"
        return f"stopped after step {self.step}; {rest}"

    def _validate(self) -> float:
        """Returns the loss on held-out data; NaN if validation is off."""
        if not self.job_config.validation.enable:
            return math.nan
        started = time.perf_counter()
        loss = self.validator.validate(self.model_parts, self.step)
        self.metrics_processor.pause(time.perf_counter() - started)
        return loss

    def _measure_plasticity(self) -> None:
        """Measures positional bias and plasticity of heads on held-out data, if `metrics.plasticity_freq` is set."""
        if self.plasticity is None:
            return
        started = time.perf_counter()
        figures = self.plasticity.measure(self.model_parts, self._around_forward)
        seconds = time.perf_counter() - started
        self.metrics_processor.log_plasticity(self.step, seconds, figures)
        self.metrics_processor.pause(seconds)

    def _on_signal(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        if self.stop_signal is None:
            self.stop_signal, self.stop_asked_at = number, now
            logger.info(
                f"{signal.Signals(number).name}: stopping after this step; Ctrl-C once more stops at once, without saving"
            )
        elif number == signal.SIGINT and now - self.stop_asked_at > 1:
            # Launchers often send a signal twice at once; a later one is a person pressing Ctrl-C again.
            raise KeyboardInterrupt

    def _stopping(self) -> bool:
        """Whether any rank was told to stop: a scheduler's signal may reach only some of them."""
        flag = torch.tensor(float(self.stop_signal is not None), device=self.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def _save_run_files(self) -> None:
        folder = Path(self.job_config.job.dump_folder)

        def write() -> None:
            for name, check in self.leaves.items():
                check(folder / name)
            write_text(folder / "config.toml", to_toml(self.job_config))
            tokenizer = folder / "tokenizer"
            if tokenizer != Path(self.job_config.tokenizer.path):
                with new_folder(tokenizer, lambda there: holds_only(there, (), TOKENIZER_FILES)) as part:
                    self.tokenizer.save(part)  # type: ignore[union-attr]  # None only for specs without a tokenizer

        try:
            on_rank_zero(write)
        except OSError as error:
            raise ConfigError(f"The run folder {folder} can't be written: {error}.") from error

    def _on_rank_zero(self, work: Callable[[], None]) -> None:
        """Writes files on rank 0 while the others wait, for hours if needed.

        Raises:
            SaveError: on all ranks, if they can't be written.
        """

        def write() -> None:
            try:
                work()
            except (OSError, SafetensorError) as error:
                folder = self.job_config.job.dump_folder
                raise SaveError(
                    f"{folder} can't be written: {error}. Make room there; the same command continues from the newest checkpoint."
                ) from error

        on_rank_zero(write, may_take_hours=True)

    def _export(self) -> None:
        """Writes the run's model directory from its last checkpoint, which is the same under every layout."""

        def write() -> None:
            saved, out = self.checkpointer.saved(self.step), Path(self.job_config.job.dump_folder) / "model"
            if saved is None:
                logger.warning(
                    f"step {self.step} has no checkpoint, so no model directory is written (see [checkpoint])"
                )
                return
            checkpoint_to_model_dir(saved, out, verify=self.job_config.checkpoint.verify)
            logger.info(f"model directory: {out}")

        self._on_rank_zero(write)
