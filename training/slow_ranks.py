"""Ranks that are slower than others.

In synchronous training all ranks take equally long for a step, since they wait for each other. So each measures what it
does not wait for others in:

- on CPUs, the time in which its main thread ran or wanted to run: what the kernel counts as running and as waiting for a core.
  A thread that waits in a collective sleeps, and is not counted;
- on GPUs, a fixed piece of work, between two steps: the device's time for some matrix products. A host that waits for its GPU
  does not sleep, so that its time says nothing;
- on both, the time spent waiting for data.
"""

import logging
import time
from pathlib import Path
from statistics import median_low
from typing import Any

import torch

from farsight.parallel.meshes import ParallelDims
from farsight.training.hangs.read import read_heartbeats

logger = logging.getLogger("farsight")

SLOW = 1.2
"""A rank is slow if it takes this many times as long as the median rank."""
IN_A_ROW = 3
"""Measurements in a row that must agree."""
PROBE_SIZE, PROBE_PRODUCTS = 2048, 100
"""Side of the matrices that a GPU multiplies, and how often; about 2 TFLOP."""


class SlowRanks:
    """Measures this rank, and names slow ones.

    Args:
        run: the run folder, whose heartbeats tell hosts and devices.
        every: steps between measurements; 0 measures none.
    """

    def __init__(self, run: Path, every: int, dims: ParallelDims, device: torch.device) -> None:
        self.run, self.every, self.device = run, every if dims.world_size > 1 else 0, device
        # Stages of a pipeline have different work, but GPUs measure the same piece of work on all.
        self.peers = dims.world_size // (dims.pp if device.type == "cpu" else 1)
        self._since: tuple[int, float, float] | None = None
        self._waited, self._left_out, self._left_out_busy = 0.0, 0.0, 0.0
        self._in_a_row = [0] * dims.world_size
        self._named: frozenset[int] = frozenset()

    def waited(self, seconds: float) -> None:
        """Counts time spent waiting for data."""
        self._waited += seconds

    def left_out(self, seconds: float, busy: float) -> None:
        """Leaves out work between steps, which ranks share unequally.

        Args:
            seconds: how long it took.
            busy: the part in which this thread did not sleep: a difference of `busy_seconds`.
        """
        self._left_out += seconds
        self._left_out_busy += busy

    def measure(self, step: int) -> tuple[float, float, float] | None:
        """Seconds since the last measurement, and of these own work and waiting for data; None if no measurement is due.

        On GPUs the own work is that of the probe. The first call measures nothing: the first step also compiles.
        """
        if not self.every or (self._since is not None and step - self._since[0] < self.every):
            return None
        before, now, busy = self._since, time.perf_counter(), busy_seconds()
        figures = None
        if before is not None:
            own = busy - before[2] - self._left_out_busy if self.device.type == "cpu" else self._probe()
            figures = now - before[1] - self._left_out, own, self._waited
        self._since = step, time.perf_counter(), busy_seconds()
        self._waited = self._left_out = self._left_out_busy = 0.0
        return figures

    def find(self, step: int, figures: list[list[float]]) -> list[dict[str, Any]] | None:
        """The ranks that were slow in this and the last measurements; logs when they change.

        Args:
            figures: what `measure` returned, by rank.

        Returns:
            Empty once when no rank is slow any more, then None.
        """
        ratios = self.ratios(figures)
        self._in_a_row = [row + 1 if ratio > SLOW else 0 for row, ratio in zip(self._in_a_row, ratios, strict=True)]
        slow = frozenset(rank for rank, row in enumerate(self._in_a_row) if row >= IN_A_ROW)
        if not slow and not self._named:
            return None
        beats = read_heartbeats(self.run) if slow else {}
        found = [
            {
                "rank": rank,
                "host": beats[rank].host if rank in beats else None,
                "device": beats[rank].device if rank in beats else None,
                "ratio": ratios[rank],
            }
            for rank in sorted(slow)
        ]
        if slow != self._named:
            self._named = slow
            texts = [f"rank {f['rank']} ({f['host']}, {f['device']}) at {f['ratio']:.1f} × the median" for f in found]
            logger.warning(
                f"step {step}: slow ranks: {'; '.join(texts)}" if slow else f"step {step}: no rank is slow any more"
            )
        return found

    def ratios(self, figures: list[list[float]]) -> list[float]:
        """How many times as long each rank takes as the median of its peers, for its own work or because of its data.

        Without a middle one, the median is the lower of the two in the middle: the faster one of two ranks.
        """
        ratios = []
        waits = median_low([waited for _, _, waited in figures])
        for rank, (seconds, own, waited) in enumerate(figures):
            first = rank // self.peers * self.peers
            usual = median_low([work for _, work, _ in figures[first : first + self.peers]])
            late = min(waited - waits, 0.99 * seconds)
            ratios.append(max(own / usual if usual > 0 else 1.0, seconds / (seconds - late)))
        return ratios

    def _probe(self) -> float:
        """Seconds that this GPU takes for a fixed number of matrix products."""
        # A generator of its own: the run's random numbers stay the same.
        random = torch.Generator(self.device).manual_seed(0)
        a = torch.randn(PROBE_SIZE, PROBE_SIZE, dtype=torch.bfloat16, device=self.device, generator=random)
        out = torch.empty_like(a)
        begin, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        torch.mm(a, a, out=out)  # chooses a kernel
        begin.record()
        for _ in range(PROBE_PRODUCTS):
            torch.mm(a, a, out=out)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def busy_seconds() -> float:
    """Seconds in which this thread has run or waited for a core; without Linux's figures, those in which it ran."""
    try:
        ran, wanted, _ = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return time.thread_time()
    return (int(ran) + int(wanted)) / 1e9
