"""Runs `train.py`, another script or a command many times without importing its libraries each time; for tests and benchmarks.

Most of a short run's time is imports (eight seconds of nine). Here a server process imports them once. Every rank of every
run is a fork of that server, with its own environment and output files.
"""

import gc
import multiprocessing
import os
import runpy
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent

PRELOADED = [
    "farsight.analysis.plasticity.live",
    "farsight.launch.plan.out_of_memory",
    "farsight.launch.plan.text",
    "farsight.training.finetune.trainer",
    "peft",
    "bitsandbytes",
]
"""Modules that most runs need; `train.py` imports them itself when it trains."""


@dataclass(frozen=True)
class Finished:
    """How a run ended: a non-zero exit status of a rank, if there is one, and what all ranks printed."""

    returncode: int
    stdout: str
    stderr: str


class Forked:
    """The ranks of one run.

    Args:
        arguments: the script's arguments.
        ranks: the number of processes.
        output: a folder for what they print.
        script: a file of the repository, or a command of `farsight`.
        folder: the working directory.
        environment: variables for all ranks.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        ranks: int,
        output: Path,
        script: str = "train.py",
        folder: Path = ROOT,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        output.mkdir(parents=True, exist_ok=True)
        self.output = output
        common = {**(environment or {}), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        common["MASTER_PORT"] = str(_free_port()) if ranks > 1 else "0"
        self.processes: list[BaseProcess] = []
        for rank in range(ranks):
            own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
            files = output / f"{rank}.out", output / f"{rank}.err"
            process = _server().Process(target=_rank, args=([script, *arguments], own, str(folder), *map(str, files)))
            process.start()
            self.processes.append(process)

    def wait(self, timeout: float = 300.0) -> Finished:
        """Waits for the ranks to end. When one fails, or after `timeout` seconds, ends the others as torchrun does."""
        end = time.monotonic() + timeout
        while any(process.is_alive() for process in self.processes):
            if any(process.exitcode for process in self.processes):
                end = min(end, time.monotonic() + 5)
            if time.monotonic() > end:  # the exit status then names the signal
                for process in self.processes:
                    process.kill()
            time.sleep(0.01)
        for process in self.processes:
            process.join()
        # A rank's own failure counts before the signals that ended the others.
        codes = [process.exitcode or 0 for process in self.processes]
        code = max(codes) or min(codes)
        printed = [
            "".join((self.output / f"{rank}.{kind}").read_text() for rank in range(len(codes)))
            for kind in ("out", "err")
        ]
        return Finished(code, *printed)


def start_server() -> None:
    """Starts the server and waits until it has imported everything, so that the first run is as fast as later ones."""
    process = _server().Process(target=int)
    process.start()
    process.join()


def _server() -> ForkServerContext:
    """The multiprocessing context whose server has a run's imports; the first process starts that server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _rank(command: list[str], environment: dict[str, str], folder: str, out: str, err: str) -> None:
    gc.freeze()  # collecting what it inherits would copy the server's memory, which takes longer than a short run
    for number, path in ((1, out), (2, err)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.update(environment)
    os.environ.pop("TRITON_INTERPRET", None)  # the server inherits it when a kernel test started it
    torch.set_num_threads(1)  # torch has read its variable already
    os.chdir(folder)
    sys.path.insert(0, str(ROOT))
    sys.argv = command
    if command[0].endswith(".py"):
        runpy.run_path(str(ROOT / command[0]), run_name="__main__")
    else:
        sys.argv.insert(0, "farsight")
        runpy.run_module("farsight", run_name="__main__", alter_sys=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
