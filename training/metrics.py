"""Metrics of a run while it trains: log lines or a progress bar, trackers, and `metrics.jsonl`."""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from farsight.configs.finetuning import FinetuneConfig
from farsight.configs.schema import JobConfig
from farsight.data.loader import global_batch_size
from farsight.errors import ConfigError
from farsight.parallel.device import device_name, peak_flops, peak_memory_gib
from farsight.parallel.meshes import ParallelDims
from farsight.training.metrics_file import row_of
from farsight.training.records import Records
from farsight.training.slow_ranks import SlowRanks, busy_seconds
from farsight.training.trackers.trackers import Trackers, open_trackers
from farsight.units import duration

logger = logging.getLogger("farsight")


class RunMetrics:
    """Collects a run's figures and writes them on rank 0.

    Every row of `metrics.jsonl` has its `step` and `time` (Unix seconds). There is one at each start (`run`, `kind`, `steps`,
    `ranks`, `seq_len`, `tokens_per_step`, `device`), one per complete checkpoint (`checkpoint`), and one when the run ends
    (`ended`, its exit status, and `sentence`), which a killed run lacks. Of figures there is one row per logged step (`loss`,
    `perplexity`, `grad_norm`, `lr`, `tokens`, `tokens_per_second`, `tflops`, `mfu`, `memory_gib`, `data_seconds`, and of the rows
    since the last one the share of `padding` and the `cut_documents`; with several ranks the step's `imbalance`, visible query-key
    pairs of the rank that has most over the mean) and one per validation (`val_loss`, `val_perplexity`, `val_tokens`). Padding is
    not counted as tokens. If GARFA trains, one more per logged step has `lr_garfa` and `alpha.<layer>.<head>`. With
    `metrics.plasticity_freq`, there is one per measurement: `bias_strength`, `bias_context`, `ap_overall`, `ap_first`,
    `ap_last` and `ap_drop` of the model, each also per layer as `<name>.<layer>`, and `plasticity_seconds`. Each of
    `[[evaluations]]` has its name as `evaluation`, figures `<name>.<figure>`, and `evaluation_seconds`. FLOPs count the
    visible query-key pairs of each batch, not full attention. While ranks are slow, one per measurement has them as `slow`, which is
    empty in the last: see `training.slow_ranks`.
    """

    def __init__(self, config: JobConfig, dims: ParallelDims, device: torch.device) -> None:
        self.config, self.device = config, device
        self.peak_flops = peak_flops(self.device)
        self.world_size = dims.world_size
        self.writes = torch.distributed.get_rank() == 0
        self.folder = Path(config.job.dump_folder)
        self.tokens_per_step = global_batch_size(config, dims.batch) * config.training.seq_len
        self._paused, self._waited, self._since = 0.0, 0.0, time.perf_counter()
        self._bar: tqdm | None = None
        self._trackers: Trackers | None = None
        self._jsonl: Records | None = None
        self.describe: Callable[[], Mapping[str, Mapping[str, Any]]] = dict
        """Describes the run to trackers beside its config, by group; may write pictures into the run folder."""
        self._pictures: set[tuple[Path, int]] = set()
        """Pictures that trackers have been given, with the time at which each was written."""
        self._finished = False
        self._paced_from: tuple[float, int] | None = None
        self.slow = SlowRanks(self.folder, config.metrics.slow_ranks_freq, dims, device)

    def start(self, step: int) -> None:
        """Opens the files; cuts off what an interrupted run wrote after `step`, since those steps run again.

        Raises:
            ConfigError: `metrics.jsonl` can't be written.
        """
        self._since = time.perf_counter()
        if not self.writes:
            return
        self._jsonl = Records(self.folder / "metrics.jsonl")
        cut = _cut_after(self._jsonl.path, step)
        folder, training = self.folder.resolve(), self.config.training
        self._row(
            {
                "step": step,
                "run": f"{folder.parent.name}/{folder.name}" if (folder / "stage.toml").is_file() else folder.name,
                "kind": "fine-tuning" if isinstance(self.config, FinetuneConfig) else "pre-training",
                "steps": training.steps,
                "ranks": self.world_size,
                "seq_len": training.seq_len,
                "tokens_per_step": self.tokens_per_step,
                "device": device_name(self.device),
            }
        )
        if self.config.metrics.trackers:
            self._trackers = open_trackers(self.config, step, self._description(), frozenset(cut))
            self._give_pictures(step, known=step > 0)
            self._since = time.perf_counter()  # the first step is not slow because of trackers
        if sys.stderr.isatty():
            total = self.config.training.steps
            self._bar = tqdm(total=total, initial=step, unit="step", desc=self.folder.name, dynamic_ncols=True)

    def should_log(self, step: int) -> bool:
        """Whether this step is logged: the first, the last, and every `metrics.log_freq`-th."""
        return step == 1 or step % self.config.metrics.log_freq == 0 or step == self.config.training.steps

    def advance(self) -> None:
        """Moves the progress bar by one step."""
        if self._bar is not None:
            self._bar.update()

    def waited(self, seconds: float) -> None:
        """Counts time spent waiting for data."""
        self._waited += seconds
        self.slow.waited(seconds)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes time spent on validations, evaluations or saves from the speed figures and from what makes a rank slow."""
        started, busy = time.perf_counter(), busy_seconds()
        yield
        seconds = time.perf_counter() - started
        self._paused += seconds
        self.slow.left_out(seconds, busy_seconds() - busy)

    def log_step(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        lr: float,
        tokens_seen: int,
        step_tokens: int,
        flops: float,
        packing: dict[str, float],
    ) -> None:
        """Reports a step; all ranks call it.

        Args:
            loss: mean over the global batch's tokens, in nats.
            grad_norm: norm of all gradients before clipping.
            lr: the step's learning rate.
            tokens_seen: tokens of all ranks since the run began, without padding.
            step_tokens: those since the last report.
            flops: FLOPs of all ranks since the last report.
            packing: figures of the rows since the last report, by name.
        """
        seconds = max(time.perf_counter() - self._since - self._paused, 1e-9)
        tflops = flops / seconds / 1e12
        measured = self.slow.measure(step)
        memory, *by_rank = zip(*self._of_ranks([peak_memory_gib(self.device), *(measured or ())]), strict=True)
        figures: dict[str, Any] = {
            "step": step,
            "loss": loss,
            "perplexity": perplexity(loss),
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens": tokens_seen,
            "tokens_per_second": step_tokens / seconds,
            "tflops": tflops,
            "memory_gib": max(memory),  # memory runs out first on the rank that uses most
            "data_seconds": self._waited,
            **packing,
        }
        if self.peak_flops:
            figures["mfu"] = tflops * 1e12 / (self.peak_flops * self.world_size)
        self._paused, self._waited, self._since = 0.0, 0.0, time.perf_counter()
        self._write("train", step, figures)
        if self.writes and measured:
            slow = self.slow.find(step, [[*row] for row in zip(*by_rank, strict=True)])
            if slow is not None:
                self._write("slow", step, {"step": step, "slow": slow})
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.4f}, {figures['tokens_per_second']:,.0f} tok/s", refresh=False)
        speed = f"{tflops:.1f} TFLOP/s" if tflops >= 1 else f"{tflops * 1000:.1f} GFLOP/s"
        mfu = f"  mfu {figures['mfu']:.1%}" if "mfu" in figures else ""
        self._say(
            f"step {step}/{self.config.training.steps}  loss {loss:.4f}  ppl {figures['perplexity']:.1f}  "
            f"grad {grad_norm:.3f}  lr {lr:.2e}  {figures['tokens_per_second']:,.0f} tok/s  "
            f"{speed}{mfu}  mem {figures['memory_gib']:.2f} GiB{self._left(step)}"
        )

    def log_validation(self, step: int, loss: float, tokens: int) -> None:
        """Reports the mean loss over the held-out batches, in nats, and their number of tokens."""
        figures = {"step": step, "val_loss": loss, "val_perplexity": perplexity(loss), "val_tokens": tokens}
        self._write("validation", step, figures)
        self._say(f"step {step}/{self.config.training.steps}  validation loss {loss:.4f}  ppl {perplexity(loss):.1f}")

    def log_garfa(self, step: int, lr: float, alpha: dict[str, float]) -> None:
        """Writes GARFA's learning rate and its alpha by "layer.head"."""
        self._write("garfa", step, {"step": step, "lr_garfa": lr, **{f"alpha.{k}": a for k, a in alpha.items()}})

    def log_plasticity(self, step: int, seconds: float, figures: dict[str, float | None]) -> None:
        """Reports what `analysis.plasticity.live` measured, and how many seconds it took."""
        self._write("plasticity", step, {"step": step, **figures, "plasticity_seconds": seconds})
        names = ("bias_context", "ap_overall", "ap_drop")
        shown = {name: "–" if figures[name] is None else f"{figures[name]:.3f}" for name in names}
        self._say(
            f"step {step}/{self.config.training.steps}  bias × length {shown['bias_context']}  "
            f"plasticity {shown['ap_overall']}  drop {shown['ap_drop']}  in {seconds:.1f} s"
        )

    def log_evaluation(self, step: int, name: str, figures: dict[str, float], seconds: float) -> None:
        """Reports an evaluation's figures, by "NAME.figure", and how many seconds it took.

        Args:
            step: the step whose weights it read; those of an evaluation beside the run are reported later.
        """
        self._write(name, step, {"step": step, "evaluation": name, **figures, "evaluation_seconds": seconds})
        shown = "  ".join(f"{key.removeprefix(f'{name}.')} {value:.4g}" for key, value in figures.items())
        self._say(f"step {step}/{self.config.training.steps}  {name}: {shown} in {seconds:.1f} s")

    def log_checkpoint(self, step: int) -> None:
        """Notes that the checkpoint of a step is complete; the thread of an asynchronous save may call it."""
        self._row({"step": step, "checkpoint": f"step-{step}"})

    def log_end(self, step: int, status: int, sentence: str) -> None:
        """Notes how the run ended. `train.py` calls it after `close`: only then is everything known that can go wrong.

        Args:
            status: the exit status.
            sentence: what is said to the user.
        """
        self._row({"step": step, "ended": status, "sentence": sentence})

    def finish(self, step: int) -> None:
        """Marks the run as finished, and gives trackers the pictures that it has written."""
        self._finished = True
        self._give_pictures(step)

    def close(self) -> None:
        """Closes the progress bar, the files and the trackers."""
        for part in (self._bar, self._jsonl):
            if part is not None:
                part.close()
        trackers, self._bar, self._trackers = self._trackers, None, None
        if trackers is not None:
            trackers.close(self._finished)

    def _description(self) -> Mapping[str, Mapping[str, Any]]:
        """The description of the run that trackers get; nothing if that fails, as they must not stop a run."""
        try:
            return self.describe()
        except Exception as error:
            logger.warning(f"Trackers get no description of the run ({type(error).__name__}: {error}).")
            return {}

    def _give_pictures(self, step: int, known: bool = False) -> None:
        """Gives trackers the pictures in the run folder that are new to them.

        Args:
            known: all that are there now have been given by an earlier start.
        """
        if self._trackers is None:
            return
        for path in sorted(self.folder.glob("*.png")):
            with suppress(OSError):  # a link to nothing
                if (written := (path, path.stat().st_mtime_ns)) not in self._pictures and not known:
                    self._trackers.picture(step, path)
                self._pictures.add(written)

    def _of_ranks(self, own: list[float]) -> list[list[float]]:
        """The figures of all ranks, from each rank's own."""
        figures = torch.zeros(self.world_size, len(own), dtype=torch.float64, device=self.device)
        figures[dist.get_rank()] = torch.tensor(own, dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(figures)
        return figures.tolist()

    def _row(self, row: dict[str, Any]) -> None:
        """Appends a row to metrics.jsonl, if `start` has opened it."""
        if self._jsonl is not None:
            self._jsonl.append((json.dumps({"step": row["step"], "time": time.time(), **row}) + "\n").encode())

    def _write(self, group: str, step: int, figures: dict[str, Any]) -> None:
        self._row(figures)
        if self._trackers is not None:
            self._trackers.log(group, step, figures)

    def _left(self, step: int) -> str:
        """The time left at the pace since the first report, including validations and saves; "" with a progress bar, which
        shows its own."""
        now, left = time.monotonic(), self.config.training.steps - step
        if self._paced_from is None:  # the first step also compiles and connects, so the pace is measured from its end
            self._paced_from = now, step
            return ""
        then, first = self._paced_from
        return "" if self._bar is not None or not left else f"  {duration((now - then) / (step - first) * left)} left"

    def _say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        elif self.writes:
            logger.info(line)


def perplexity(loss: float) -> float:
    """exp(loss) for a loss in nats per token; infinite if that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def _cut_after(path: Path, step: int) -> list[tuple[int, str]]:
    """Cuts out the rows of steps that run again, and an incomplete last row; returns the steps and names of figures cut out."""
    cut: list[tuple[int, str]] = []
    try:
        with path.open("r+b") as file:
            kept, lines = [], file.readlines()
            for line in lines:
                row = row_of(line)
                # A step's validation precedes its checkpoint, so its row is kept. Step 0 is validated again. What is known of a
                # step only later, such as that its checkpoint is complete, may stand behind rows that are cut.
                if line.endswith(b"\n") and 0 < step >= row.get("step", 0):
                    kept.append(line)
                else:
                    cut += [(row["step"], name) for name in row if "step" in row]
            if len(kept) < len(lines):
                file.seek(0)
                file.writelines(kept)
                file.truncate()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}.") from error
    return cut
