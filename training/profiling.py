"""Traces of steps and snapshots of GPU memory, by PyTorch's profiler."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from farsight.configs.schema import JobConfig

logger = logging.getLogger("farsight")

_ALLOCATIONS = 100_000
"""Allocations and releases that a snapshot goes back."""


@contextmanager
def profiling(config: JobConfig, first_step: int) -> Iterator[Callable[[], None]]:
    """Traces and snapshots as `[profiling]` asks for them; call what it yields after each step.

    Args:
        first_step: steps already done, so that files are named by the run's own count.
    """
    options, folder = config.profiling, Path(config.job.dump_folder)
    with ExitStack() as stack:
        after_step: list[Callable[[], None]] = []
        if options.enable_memory_snapshot:
            snapshots = _snapshots(folder / options.save_memory_snapshot_folder, options.profile_freq, first_step)
            after_step.append(stack.enter_context(snapshots))
        if options.enable_profiling:
            after_step.append(stack.enter_context(_traces(config, folder, first_step)))

        def all_of_them() -> None:
            for call in after_step:
                call()

        yield all_of_them


@contextmanager
def _traces(config: JobConfig, folder: Path, first_step: int) -> Iterator[Callable[[], None]]:
    options = config.profiling

    def write(profiler: profile) -> None:
        path = _file(folder / options.save_traces_folder, profiler.step_num, "trace.json")
        profiler.export_chrome_trace(str(path))
        logger.info(f"profiler trace: {path}")

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    waits = options.profile_freq - options.profiler_active - options.profiler_warmup
    steps = schedule(wait=waits, warmup=options.profiler_warmup, active=options.profiler_active)
    with profile(activities=activities, schedule=steps, on_trace_ready=write, record_shapes=True) as profiler:
        profiler.step_num = first_step
        yield profiler.step


@contextmanager
def _snapshots(folder: Path, every: int, step: int) -> Iterator[Callable[[], None]]:
    """Records allocations on the GPU; writes a snapshot every few steps, and one if memory runs out."""
    if not torch.cuda.is_available():
        logger.warning(
            "profiling.enable_memory_snapshot records GPU memory, and there is no GPU: no snapshot is written"
        )
        yield lambda: None
        return
    torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS)

    def write(name: str) -> None:
        path = _file(folder, step, name)
        torch.cuda.memory._dump_snapshot(str(path))
        logger.info(f"memory snapshot: {path}, to open at pytorch.org/memory_viz")

    def after_step() -> None:
        nonlocal step
        step += 1
        if step % every == 0:
            write("memory_snapshot.pickle")

    try:
        yield after_step
    except torch.OutOfMemoryError:
        write("out_of_memory.pickle")
        raise


def _file(folder: Path, step: int, name: str) -> Path:
    path = folder / f"iteration_{step}" / f"rank{dist.get_rank()}_{name}"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
