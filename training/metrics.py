"""What a run reports while it goes: a line or a progress bar, TensorBoard, and `metrics.jsonl`."""

import json
import logging
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.distributed import ParallelDims
from torchtitan.tools.utils import NoColor
from tqdm import tqdm

from farsight.configs.check import ConfigError
from farsight.configs.schema import JobConfig
from farsight.parallel.device import peak_flops, peak_memory_gib, prepare_device
from farsight.training.metrics_file import row_of
from farsight.training.records import Records, scalar_event, scalars
from farsight.units import duration

logger = logging.getLogger("farsight")


class RunMetrics:
    """Collects a run's figures and writes them on the rank that is told to.

    `metrics.jsonl` holds one object a logged step (`loss`, `perplexity`, `grad_norm`, `lr`, `tokens`,
    `tokens_per_second`, `tflops`, `mfu`, `memory_gib`, `data_seconds`) and one a validation (`val_loss`,
    `val_perplexity`), where GARFA trains one with its `alpha.<layer>.<head>`, and with `metrics.plasticity_freq` one a
    measurement: `bias_strength`, `bias_context`, `ap_overall`, `ap_first`, `ap_last` and `ap_drop` of the model, each again
    as `<name>.<layer>`, and `plasticity_seconds`. FLOPs are those of the visible query-key pairs of each batch, not of full
    attention.

    The attributes are those that torchtitan's Trainer reads and sets.
    """

    # Set by torchtitan's Trainer.
    num_flops_per_token: float = 0.0
    optimizers: Any = None
    model_parts: Any = None

    def __init__(self, config: JobConfig, dims: ParallelDims, model_args: Any = None) -> None:
        self.config, self.device = config, prepare_device()
        self.color = NoColor()
        self.device_memory_monitor = _MemoryMonitor(self.device)
        self.peak_flops = peak_flops(self.device)
        self.world_size = dims.world_size
        self.data_loading_times: list[float] = []
        self.ntokens_since_last_log = 0
        self.writes = torch.distributed.get_rank() == 0
        self.folder = Path(config.job.dump_folder)
        self._paused, self._since = 0.0, time.perf_counter()
        self._bar: tqdm | None = None
        self._tensorboard: Records | None = None
        self._jsonl: Records | None = None
        self._paced_from: tuple[float, int] | None = None

    def start(self, step: int) -> None:
        """Opens the files; what an interrupted run wrote after `step` is cut off, since those steps run again."""
        self._since = time.perf_counter()
        if not self.writes:
            return
        self._jsonl = Records(self.folder / "metrics.jsonl")
        _cut_after(self._jsonl.path, step)
        if self.config.metrics.enable_tensorboard:
            self._tensorboard = scalars(self.folder / self.config.metrics.save_tb_folder, step)
        if sys.stderr.isatty():
            total = self.config.training.steps
            self._bar = tqdm(total=total, initial=step, unit="step", desc=self.folder.name, dynamic_ncols=True)

    def should_log(self, step: int) -> bool:
        return step == 1 or step % self.config.metrics.log_freq == 0 or step == self.config.training.steps

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.update()

    def pause(self, seconds: float) -> None:
        """Takes time spent on validation or saving out of the speed figures."""
        self._paused += seconds

    def log_step(
        self, step: int, loss: float, grad_norm: float, lr: float, tokens_seen: int, step_tokens: int, flops: float
    ) -> None:
        """Reports a step; all ranks call it.

        Args:
            loss: mean over the global batch's tokens.
            tokens_seen: tokens of all ranks since the run began.
            step_tokens: tokens of all ranks since the last report.
            flops: what they took, of all ranks.
        """
        seconds = max(time.perf_counter() - self._since - self._paused, 1e-9)
        tflops = flops / seconds / 1e12
        figures: dict[str, Any] = {
            "step": step,
            "loss": loss,
            "perplexity": perplexity(loss),
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens": tokens_seen,
            "tokens_per_second": step_tokens / seconds,
            "tflops": tflops,
            "memory_gib": self._most(peak_memory_gib(self.device)),
            "data_seconds": sum(self.data_loading_times),
        }
        if self.peak_flops:
            figures["mfu"] = tflops * 1e12 / (self.peak_flops * self.world_size)
        self._paused, self._since = 0.0, time.perf_counter()
        self.data_loading_times.clear()
        self.ntokens_since_last_log = 0
        self._write("train", step, figures)
        speed = f"{tflops:.1f} TFLOP/s" if tflops >= 1 else f"{tflops * 1000:.1f} GFLOP/s"
        mfu = f"  mfu {figures['mfu']:.1%}" if "mfu" in figures else ""
        self._say(
            f"step {step}/{self.config.training.steps}  loss {loss:.4f}  ppl {figures['perplexity']:.1f}  "
            f"grad {grad_norm:.3f}  lr {lr:.2e}  {figures['tokens_per_second']:,.0f} tok/s  "
            f"{speed}{mfu}  mem {figures['memory_gib']:.2f} GiB{self._left(step)}"
        )

    def log_validation(self, step: int, loss: float, tokens: int) -> None:
        """Reports the mean loss over the held-out batches."""
        figures = {"step": step, "val_loss": loss, "val_perplexity": perplexity(loss), "val_tokens": tokens}
        self._write("validation", step, figures)
        self._say(f"step {step}/{self.config.training.steps}  validation loss {loss:.4f}  ppl {perplexity(loss):.1f}")

    def log_garfa(self, step: int, lr: float, alpha: dict[str, float]) -> None:
        """Writes GARFA's learning rate and alpha of each "layer.head"."""
        self._write("garfa", step, {"step": step, "lr_garfa": lr, **{f"alpha.{k}": a for k, a in alpha.items()}})

    def log_plasticity(self, step: int, seconds: float, figures: dict[str, float | None]) -> None:
        """Reports what `launch.plasticity_metrics` measured, and the seconds that it took."""
        self._write("plasticity", step, {"step": step, **figures, "plasticity_seconds": seconds})
        names = ("bias_context", "ap_overall", "ap_drop")
        shown = {name: "–" if figures[name] is None else f"{figures[name]:.3f}" for name in names}
        self._say(
            f"step {step}/{self.config.training.steps}  bias × length {shown['bias_context']}  "
            f"plasticity {shown['ap_overall']}  drop {shown['ap_drop']}  in {seconds:.1f} s"
        )

    def close(self) -> None:
        for part in (self._bar, self._tensorboard, self._jsonl):
            if part is not None:
                part.close()
        self._bar = self._tensorboard = self._jsonl = None

    def _most(self, value: float) -> float:
        """The largest of all ranks' values: the rank that runs out first is the one to know about."""
        values = torch.tensor(value, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return float(values)

    def _write(self, group: str, step: int, figures: dict[str, Any]) -> None:
        if self._jsonl is not None:
            self._jsonl.append((json.dumps(figures) + "\n").encode())
        if self._tensorboard is not None:
            shown = {name: value for name, value in figures.items() if name != "step" and value is not None}
            self._tensorboard.append(scalar_event(group, step, shown))

    def _left(self, step: int) -> str:
        """The time until the last step at the pace since the first report, validations and saves included. The progress bar
        has its own."""
        now, left = time.monotonic(), self.config.training.steps - step
        if self._paced_from is None:  # the step before it compiled and connected
            self._paced_from = now, step
            return ""
        then, first = self._paced_from
        return "" if self._bar is not None or not left else f"  {duration((now - then) / (step - first) * left)} left"

    def _say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        elif self.writes:
            logger.info(line)


@dataclass(frozen=True)
class _Peak:
    max_reserved_gib: float
    max_reserved_pct: float


class _MemoryMonitor:
    """The part of torchtitan's memory monitor that its Trainer asks for while it builds."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.device_name = device, device.type.upper()
        if device.type != "cpu":
            self.device_name = torch.get_device_module(device).get_device_name(device)

    def get_peak_stats(self) -> _Peak:
        total = 0.0
        if self.device.type != "cpu":
            total = torch.get_device_module(self.device).get_device_properties(self.device).total_memory / 1024**3
        held = peak_memory_gib(self.device)
        return _Peak(held, 100 * held / total if total else 0.0)


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def _cut_after(path: Path, step: int) -> None:
    """Cuts off the rows of steps that run again, and a row that was being written when the process was killed."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
        end = 0
        for line in lines:
            # A validation comes before the checkpoint of its step, so it is kept; but step 0 runs its own again.
            if not line.endswith(b"\n") or not 0 < step >= row_of(line).get("step", 0):
                break
            end += len(line)
        if end < path.stat().st_size:
            os.truncate(path, end)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}.") from error
