"""Evaluations of the model on the way: when they run, what they lead to, and the best checkpoint by one of their figures.

An evaluation inside the run reads the weights gathered on rank 0, while the other ranks wait: nothing of the run changes but time.
One beside it is the command itself, on a saved checkpoint, one process at a time.
"""

import gc
import json
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from farsight import cli
from farsight.checkpoints.intact.check import is_complete
from farsight.checkpoints.manager import RunCheckpoints
from farsight.checkpoints.steps import complete_steps
from farsight.configs.evaluations import VALIDATION_LOSS, Evaluation, conditions, name_of
from farsight.configs.schema import JobConfig
from farsight.data.tokenizers.tokenizer import Tokenizer
from farsight.errors import ConfigError, GateError, Interrupted, SaveError
from farsight.files import write_text
from farsight.json_files import read_object
from farsight.model.build import ModelConfig
from farsight.parallel.ranks import on_rank_zero
from farsight.training.metrics import RunMetrics
from farsight.training.metrics_file import read_metrics

logger = logging.getLogger("farsight")

FOLDER = "evaluations"
"""Folder in the run folder with an evaluation's complete results, step-N/NAME.json."""
BEST = "best.json"
"""File in the run folder that names the best checkpoint."""
POLL_SECONDS = 0.2
"""Seconds between looks at a process beside the run, at the run's end."""


Training = tuple[ModelConfig, Iterator[tuple[str, Tensor]]]
"""Config and parameters of a model that trains."""


class Evaluator(Protocol):
    """Evaluates models; `evals.live.LiveEvaluations`."""

    higher_is_better: bool
    """Whether the best value of `checkpoint.keep_best` is the highest."""

    def check(self, tokenizer: Tokenizer) -> None:
        """Opens what evaluations read; raises ConfigError or DataError for what can't be used."""
        ...

    def measure(self, evaluation: Evaluation, path: Path, training: Training | None) -> dict[str, Any]:
        """Evaluates in this process; returns what the command writes as JSON."""
        ...

    def command(self, evaluation: Evaluation, path: Path, out: Path) -> list[str]:
        """The command that evaluates a saved model and writes its JSON to `out`."""
        ...

    def figures(self, evaluation: Evaluation, results: dict[str, Any]) -> dict[str, float]:
        """Figures by "NAME.figure" from those results."""
        ...


@dataclass(frozen=True)
class Outcome:
    """The outcome of an evaluation; the same on all ranks."""

    evaluation: Evaluation
    step: int
    figures: dict[str, float] | None
    """By "NAME.figure"; None if it failed."""
    seconds: float


class _Told(BaseException):
    """A signal asked the run to stop while rank 0 was evaluating."""


class RunEvaluations:
    """A run's evaluations.

    Args:
        config: the run's.
        evaluator: measures.
        tokenizer: the run's.
        checkpoints: the run's, of which the best is kept.
        model: gives the model of a step as an evaluator takes it: the path of its checkpoint, and its config and parameters; or the
            path of a directory that is made for the evaluation, and deleted after it. All ranks call it.
        told_to_stop: whether a signal has asked this rank to stop.

    Raises:
        ConfigError, DataError: something that evaluations read can't be used.
    """

    def __init__(
        self,
        config: JobConfig,
        evaluator: Evaluator | None,
        tokenizer: Tokenizer,
        checkpoints: RunCheckpoints,
        metrics: RunMetrics,
        model: Callable[[int], tuple[Path, Training | None]],
        told_to_stop: Callable[[], bool],
    ) -> None:
        self.config, self.checkpoints, self.metrics, self.model = config, checkpoints, metrics, model
        self.told_to_stop = told_to_stop
        self.folder = Path(config.job.dump_folder)
        self.all = config.evaluations
        assert evaluator is not None or not self.all
        self.evaluator = cast(Evaluator, evaluator)
        higher = evaluator is not None and evaluator.higher_is_better
        figure = config.checkpoint.keep_best
        self.best = Best(figure, higher, self.folder, checkpoints) if figure else None
        self.beside = Beside(self.evaluator, self.folder, checkpoints)
        checkpoints.upkeep.spared = self._spared
        self.arrived = False
        """Set on all ranks once a step's figures say that results from beside the run are there."""
        self.gate = ""
        """The reason why the run has to stop; empty if it goes on."""
        self._interruptible = False
        if self.all:
            on_rank_zero(lambda: self.evaluator.check(tokenizer))

    # In the loop ─────────────────────────────────────────────────────────────────────────────────

    def resume(self, step: int) -> None:
        """Reads what earlier starts of the run left; all ranks call it once metrics are open.

        Raises:
            GateError: the newest figures of an evaluation still meet its `stop_if`.
        """
        if self.best is None and not self.all:
            return
        rows, saved = on_rank_zero(lambda: (self._rows(), complete_steps(self.checkpoints.folder)))
        if self.best is not None:
            self.best.read(rows, saved)
        for evaluation in self.all:
            own = [row for row in rows if row.get("evaluation") == name_of(evaluation)]
            newest = max(own, key=lambda row: row["step"], default={"step": 0})
            self._check(evaluation, newest["step"], newest)
            if evaluation.where == "beside" and dist.get_rank() == 0:
                for number in saved:
                    last = number == self.config.training.steps
                    if newest["step"] < number <= step and self._due(evaluation, number, last):
                        self.beside.add(evaluation, number)
        self.stop_at_gate()

    def due(self, step: int, last: bool) -> bool:
        """Whether something is evaluated after a step, or results have arrived."""
        return self.arrived or any(self._due(evaluation, step, last) for evaluation in self.all)

    def after_step(self, step: int, last: bool) -> None:
        """Runs what is due after a step, and takes the results that have arrived; all ranks call it."""
        for evaluation in self.all:
            if not self._due(evaluation, step, last):
                continue
            if evaluation.where == "beside":
                self.checkpoints.overdue = True
                if dist.get_rank() == 0:
                    self.beside.add(evaluation, step)
            else:
                self._report(self._inside(evaluation, step))
        if self.arrived:
            self.arrived = False
            if (outcome := on_rank_zero(self.beside.take)) is not None:
                self._report(outcome)

    def validated(self, step: int, loss: float) -> None:
        """Compares a validation loss with the best so far."""
        if self.best is not None:
            self.best.consider(step, {VALIDATION_LOSS: loss})

    def finish(self) -> None:
        """Waits for the processes beside the run.

        Raises:
            GateError: the figures of one meet its `stop_if`.
            Interrupted: a signal asked the run to stop.
        """
        while (outcome := on_rank_zero(lambda: self.beside.wait(self.told_to_stop))) is not None:
            self._report(outcome)
        if self.all and dist.get_rank() == 0:
            with suppress(OSError):  # checkpoints that were kept for evaluations; a later start deletes them too
                self.checkpoints.upkeep.delete_older(self.checkpoints.newest)
        self.stop_at_gate()

    def stop_at_gate(self) -> None:
        """Raises GateError if figures have met a `stop_if`."""
        if self.gate:
            raise GateError(self.gate)

    def signalled(self) -> None:
        """Called by the handler of signals that ask the run to stop: leaves an evaluation on rank 0, which may take hours."""
        if self._interruptible:
            raise _Told

    def close(self) -> None:
        """Ends a process beside the run; the next start runs it again."""
        self.beside.close()

    # Measuring ───────────────────────────────────────────────────────────────────────────────────

    @staticmethod
    def _due(evaluation: Evaluation, step: int, last: bool) -> bool:
        return last or step % evaluation.every == 0

    def _inside(self, evaluation: Evaluation, step: int) -> Outcome:
        """Evaluates the weights as they are; on failure the run goes on."""
        with self.metrics.paused():
            started, figures = time.perf_counter(), None
            try:
                figures = self._figures(evaluation, step, *self.model(step))
            except SaveError as error:  # of an adapter that is written for the evaluation, on all ranks
                if dist.get_rank() == 0:
                    logger.error(f"step {step}: the evaluation {name_of(evaluation)} is left out: {error}")
            gc.collect()  # the model, where it is in cycles
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return Outcome(evaluation, step, figures, time.perf_counter() - started)

    def _figures(
        self, evaluation: Evaluation, step: int, path: Path, training: Training | None
    ) -> dict[str, float] | None:
        """Evaluates on rank 0, for all ranks; the last arguments are what `model` gave."""
        config, tensors = training or (None, iter(()))

        def whole() -> Iterator[tuple[str, Tensor]]:
            yield from tensors
            gathering_ended()

        def gathering_ended() -> None:
            self._interruptible = True
            if self.told_to_stop():
                raise _Told

        def work() -> dict[str, float] | None:
            try:
                try:
                    if config is None:
                        gathering_ended()
                    results = self.evaluator.measure(evaluation, path, None if config is None else (config, whole()))
                finally:
                    self._interruptible = False
                write_results(self.folder, evaluation, step, results)
                return self.evaluator.figures(evaluation, results)
            except _Told:
                logger.warning(f"step {step}: the evaluation {name_of(evaluation)} is left out, as the run stops")
            except Exception as error:
                said = cli.explain(error) or cli.report_unexpected(error, self.folder / "errors")
                logger.error(f"step {step}: the evaluation {name_of(evaluation)} failed, and the run goes on: {said}")
            finally:
                for _ in tensors:  # the other ranks send all they hold
                    pass
                if config is None:
                    shutil.rmtree(path, ignore_errors=True)
            return None

        if dist.get_rank() > 0:
            for _ in tensors:
                pass
        return on_rank_zero(work)

    def _report(self, outcome: Outcome) -> None:
        if outcome.figures is not None:
            self.metrics.log_evaluation(outcome.step, name_of(outcome.evaluation), outcome.figures, outcome.seconds)
            self._check(outcome.evaluation, outcome.step, outcome.figures, warn=True)
            if self.best is not None:
                self.best.consider(outcome.step, outcome.figures, outcome.evaluation.where == "beside")
        self.beside.taken = None

    def _check(self, evaluation: Evaluation, step: int, figures: Mapping[str, Any], warn: bool = False) -> None:
        """Compares figures with the conditions of their evaluation."""
        for key, condition in conditions(evaluation).items():
            if not condition.holds(dict(figures)):
                continue
            name, text = name_of(evaluation), getattr(evaluation, key)
            found = f"step {step}: {condition.figure} = {figures[condition.figure]:.6g} meets {key} = {text!r} of the evaluation {name}"
            if key == "stop_if":
                self.gate = f"{found}, which stops the run. To go on, change or remove this stop_if, and start the same command again."
            elif warn and dist.get_rank() == 0:
                logger.warning(found)

    def _rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl with figures of evaluations and validations, which are few."""
        rows = read_metrics(self.folder) if (self.folder / "metrics.jsonl").is_file() else []
        return [row for row in rows if "evaluation" in row or VALIDATION_LOSS in row]

    def _spared(self, step: int) -> bool:
        """Whether a checkpoint is kept, whatever `keep_latest_k` says."""
        return self.beside.needs(step) or (self.best is not None and self.best.needs(step))


def write_results(folder: Path, evaluation: Evaluation, step: int, results: dict[str, Any]) -> None:
    """Writes an evaluation's complete results."""
    write_text(results_file(folder, evaluation, step), json.dumps(results, indent=2) + "\n")


def results_file(folder: Path, evaluation: Evaluation, step: int) -> Path:
    """The file with an evaluation's complete results, in a folder that exists."""
    path = folder / FOLDER / f"step-{step}" / f"{name_of(evaluation)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


# ── Beside the run ─────────────────────────────────────────────────────────────────────────────────


@dataclass
class _Running:
    evaluation: Evaluation
    step: int
    process: subprocess.Popen[bytes]
    started: float
    log: IO[bytes]


class Beside:
    """Evaluations of saved checkpoints by processes beside the run, one after the other; on rank 0."""

    def __init__(self, evaluator: Evaluator, folder: Path, checkpoints: RunCheckpoints) -> None:
        self.evaluator, self.folder, self.checkpoints = evaluator, folder, checkpoints
        self.waiting: list[tuple[Evaluation, int]] = []
        self.running: _Running | None = None
        self.taken: int | None = None
        """The step of the outcome that `take` has returned, until it is reported."""

    def add(self, evaluation: Evaluation, step: int) -> None:
        """Evaluates the checkpoint of a step, once it is complete. An evaluation of which an earlier step still waits takes longer
        than its `every`: that step is left out."""
        if slow := [item for item in self.waiting if item[0] is evaluation]:
            logger.warning(
                f"the evaluation {name_of(evaluation)} takes longer than its {evaluation.every} steps; step {slow[0][1]} is left out"
            )
        self.waiting = [item for item in self.waiting if item[0] is not evaluation] + [(evaluation, step)]

    def needs(self, step: int) -> bool:
        """Whether the checkpoint of a step is evaluated or waits for it, or its figures have not been compared with the best yet."""
        running = self.running
        return step in [number for _, number in self.waiting] or step in (running and running.step, self.taken)

    def poll(self) -> bool:
        """Starts the next process if none runs; returns whether one has ended."""
        if self.running is None and self.waiting:
            evaluation, step = self.waiting[0]
            checkpoint = self.checkpoints.folder / f"step-{step}"
            try:
                if not self._saved(step):
                    return False
                if not is_complete(checkpoint):
                    raise OSError(f"{checkpoint} is not complete")
                self._start(evaluation, step, checkpoint)
            except OSError as error:
                logger.warning(f"step {step}: the evaluation {name_of(evaluation)} is left out: {error}")
            self.waiting.pop(0)
        return self.running is not None and self.running.process.poll() is not None

    def take(self) -> Outcome | None:
        """The outcome of the process that has ended."""
        if self.running is None:
            return None
        done = self.running
        self.taken, self.running = done.step, None
        done.log.close()
        figures, status = None, done.process.wait()
        try:
            if status:
                raise OSError(f"status {status}")
            results = read_object(results_file(self.folder, done.evaluation, done.step))
            figures = self.evaluator.figures(done.evaluation, results)
        except (OSError, ConfigError) as error:
            logger.warning(
                f"step {done.step}: the evaluation {name_of(done.evaluation)} failed beside the run ({error}), which goes "
                f"on; {done.log.name} has its messages"
            )
        return Outcome(done.evaluation, done.step, figures, time.perf_counter() - done.started)

    def wait(self, told_to_stop: Callable[[], bool]) -> Outcome | None:
        """Waits for the next outcome; None if nothing is left.

        Raises:
            Interrupted: a signal asked the run to stop.
        """
        if self.running is None and self.waiting:
            logger.info("waiting for evaluations beside the run")
        while not self.poll():
            if self.running is None and not (self.waiting and self._saved(self.waiting[0][1])):
                return None
            if told_to_stop():
                raise Interrupted("stopped while evaluations ran beside; the same command runs them again")
            time.sleep(POLL_SECONDS)
        return self.take()

    def close(self) -> None:
        """Ends the process that runs. Its checkpoint stays spared: the next start evaluates it again."""
        if self.running is not None:
            self.waiting.insert(0, (self.running.evaluation, self.running.step))
            self.running.process.terminate()
            self.running.process.wait()
            self.running.log.close()
            self.running = None

    def _saved(self, step: int) -> bool:
        """Whether the save of a step is over, even if it failed. Training asks at every step, so neither store nor disk is."""
        return self.checkpoints.newest >= step

    def _start(self, evaluation: Evaluation, step: int, checkpoint: Path) -> None:
        out = results_file(self.folder, evaluation, step)
        log = out.with_suffix(".log").open("wb")
        command = self.evaluator.command(evaluation, checkpoint, out)
        # In a session of its own: Ctrl-C is for the run, which ends it.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_alone(), start_new_session=True
        )
        self.running = _Running(evaluation, step, process, time.perf_counter(), log)


def _alone() -> dict[str, str]:
    """The environment without what launchers tell ranks."""
    of_ranks = (
        "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    )  # fmt: skip
    return {k: v for k, v in os.environ.items() if k not in of_ranks and not k.startswith("TORCHELASTIC_")}


# ── The best checkpoint ────────────────────────────────────────────────────────────────────────────


class Best:
    """The best checkpoint so far by a figure. It is kept until a better one is known to be intact, and best.json names it.

    Args:
        figure: "val_loss", or "NAME.figure" of an evaluation.
        higher: whether the best value is the highest.
        folder: the run's.
    """

    def __init__(self, figure: str, higher: bool, folder: Path, checkpoints: RunCheckpoints) -> None:
        self.figure, self.higher, self.path, self.checkpoints = figure, higher, folder / BEST, checkpoints
        self.value: float | None = None
        """The best so far, whether or not its checkpoint is saved yet."""
        self.kept: int | None = None
        """The step that best.json names."""
        self.next: tuple[int, float] | None = None
        """A better step and its value, until its checkpoint is known to be intact."""
        checkpoints.upkeep.on_intact = self.intact

    def read(self, rows: Sequence[Mapping[str, Any]], saved: Collection[int]) -> None:
        """Finds the best of earlier starts; all ranks call it.

        Args:
            rows: of metrics.jsonl.
            saved: the steps that have a checkpoint; others do not count.
        """
        measured = {row["step"]: row[self.figure] for row in rows if row.get(self.figure) is not None}
        known = [step for step in measured if step in saved]
        if known:
            step = (max if self.higher else min)(
                known, key=lambda step: (measured[step], -step if self.higher else step)
            )
            self.consider(step, {self.figure: measured[step]}, saved=True)

    def consider(self, step: int, figures: Mapping[str, float], saved: bool = False) -> None:
        """Takes a step for the best if its figure is better than all before, and has it saved; all ranks call it.

        Args:
            saved: its checkpoint is already there.
        """
        value = figures.get(self.figure)
        if value is None or not step or value != value:
            return
        if self.value is not None and not (value > self.value if self.higher else value < self.value):
            return
        self.value, self.next = value, (step, value)
        logger.info(f"step {step}: best {self.figure} so far, {value:.6g}")
        if not saved:
            self.checkpoints.overdue = True
        elif dist.get_rank() == 0:
            self.intact(step)

    def intact(self, step: int) -> None:
        """Names a better step in best.json once its checkpoint is intact; on rank 0, also from the thread that verifies. If that
        can't be written, the checkpoint is kept all the same, and so is the one that best.json names."""
        if self.next is not None and self.next[0] == step:
            value = self.next[1]
            checkpoint = str(self.checkpoints.folder / f"step-{step}")
            found = {"figure": self.figure, "step": step, "value": value, "checkpoint": checkpoint}
            try:
                write_text(self.path, json.dumps(found, indent=2) + "\n")
            except OSError as error:
                logger.warning(
                    f"{self.path} can't be written ({error}): it does not name step {step}, the best so far."
                )
                return
            self.kept, self.next = step, None

    def needs(self, step: int) -> bool:
        """Whether a checkpoint is the best, or may become it."""
        better = self.next
        return step == self.kept or (better is not None and step == better[0])
