"""A part of `python -m benchmarks.gpu`: its options, and its file, which is written after every row.

A row that fails is named under "failed", and the part goes on with the next. After seven minutes it starts no more: those, and
rows that do not fit into the GPU's memory, are named under "left_out".
"""

import argparse
import gc
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from farsight.benchmarks.gpu import limits
from farsight.benchmarks.machine import origin
from farsight.cli import new_parser, positive
from farsight.outputs import add_json_option, write_json


def part_parser(module: str, text: str | None) -> argparse.ArgumentParser:
    """The options that all parts have."""
    parser = new_parser(f"python -m benchmarks.gpu.{module}", text)
    parser.add_argument("--small", action="store_true", help="small shapes on the CPU, to see that it runs")
    add_json_option(parser, "the rows, after each of them,")
    return parser


def add_length_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option for the tokens of a row."""
    parser.add_argument(
        "--length", type=positive, default=8192, metavar="T", help="tokens of a row (default: %(default)s)"
    )


class Rows:
    """The rows of a part.

    Attributes:
        device: "cuda", or "cpu" for small shapes.
        figures: the content of the file.

    Raises:
        SystemExit: there is no GPU.
    """

    def __init__(self, options: argparse.Namespace, part: str) -> None:
        if not options.small and not torch.cuda.is_available():
            raise SystemExit("PyTorch sees no GPU here: --small runs the same on a CPU")
        self.small, self.path = options.small, options.json
        self.device = "cpu" if self.small else "cuda"
        self.begin = time.perf_counter()
        self.figures: dict[str, Any] = {
            "part": part, **origin(self.device), "outcome": "running", "seconds": 0.0, "rows": [], "failed": [], "left_out": [],
        }  # fmt: skip
        self.write()

    @property
    def seconds(self) -> float:
        """Since the part began."""
        return time.perf_counter() - self.begin

    @property
    def major(self) -> int:
        """Major compute capability; without a GPU, Hopper's."""
        return torch.cuda.get_device_capability()[0] if self.device == "cuda" else 9

    def add(self, **row: Any) -> None:
        """Adds a row, and prints it."""
        self.figures["rows"].append(row)
        print("  ".join(f"{name} {_short(value)}" for name, value in row.items()), flush=True)
        self.write()

    def write(self) -> None:
        """Writes the file, if there is one."""
        self.figures["seconds"] = self.seconds
        write_json(self.path, self.figures)

    def attempt(self, name: str, measure: Callable[[], Any]) -> Any:
        """Calls `measure` and returns its result; None if it failed, or if there is no memory or time left for it."""
        if self.seconds > limits.START:
            self.figures["left_out"].append(f"{name}: no time left")
            return None
        try:
            return measure()
        except torch.OutOfMemoryError:
            self.figures["left_out"].append(f"{name}: does not fit into the GPU's memory")
            return None
        except Exception as error:  # whatever it is, the other rows are worth having
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            self.figures["failed"].append(f"{name}: {type(error).__name__} at {where}: {str(error).strip()[:300]}")
            print(f"FAILED {self.figures['failed'][-1]}", flush=True)
            self.write()
            return None
        finally:
            gc.collect()
            if self.device == "cuda":
                torch.cuda.empty_cache()

    def end(self) -> int:
        """Writes the file; the exit status."""
        for name in self.figures["left_out"]:
            print(f"left out: {name}", flush=True)
        self.figures["outcome"] = "ended"
        self.write()
        return 1 if self.figures["failed"] else 0


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def milliseconds(run: Callable[[], object], device: str, repeats: int = 7, warm_up: int = 2) -> float:
    """Median milliseconds of a run, by the device's own clock."""
    for _ in range(warm_up):
        run()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        else:
            begin = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - begin))
    return sorted(times)[len(times) // 2]
