"""Kills `farsight prepare` at random moments, and compares its shards with those of an undisturbed run, byte for byte."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farsight.benchmarks.data.corpus import write_corpus

KILLS = 20
CHILD = """
import sys
from pathlib import Path
from farsight.configs.schema import JsonlSource
from farsight.data.prepare.write import Job, prepare
from farsight.data.tokenizers.tokenizer import load_tokenizer_dir
if __name__ == "__main__":
    job = Job(JsonlSource(path=sys.argv[1]), Path(sys.argv[3]), drop_duplicates=True, shard_bytes=100_000)
    prepare(job, load_tokenizer_dir(sys.argv[2]), 2)
"""


def kills(folder: Path, megabytes: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Twenty kills of a preparation by two processes, all killed at once; shards of 100 kB of text."""
    path, _, _ = write_corpus(folder, megabytes)
    script = folder / "child.py"
    script.write_text(CHILD)

    def start(out: Path) -> subprocess.Popen[bytes]:
        arguments = [sys.executable, str(script), str(path), str(folder), str(out)]
        return subprocess.Popen(arguments, stderr=subprocess.DEVNULL, start_new_session=True)

    whole, out, drawn = folder / "whole", folder / "killed", random.Random(0)
    began = time.perf_counter()
    if start(whole).wait():
        raise RuntimeError("the undisturbed run failed")
    seconds = time.perf_counter() - began
    killed, after = 0, []
    while killed < KILLS:
        running = start(out)
        began, limit = time.perf_counter(), drawn.uniform(0, 0.5 * seconds)
        while running.poll() is None and time.perf_counter() - began < limit:
            time.sleep(0.001)
        if running.poll() is None:
            _kill(running)
            killed += 1
            after.append(len(list(out.glob("parts/*.json"))))
        else:  # it ended before its kill: begin with another folder
            _equal(out, whole)
            out = folder / f"killed-{killed}"
    if start(out).wait():
        raise RuntimeError("the last run failed")
    _equal(out, whole)
    yield {"what": "kills of prepare", "kills": killed, "equal": True, "shards_done_at_a_kill": after, "cores": 2}


def _kill(running: subprocess.Popen[bytes]) -> None:
    import os

    os.killpg(running.pid, signal.SIGKILL)
    running.wait()


def _equal(found: Path, expected: Path) -> None:
    """Raises RuntimeError unless two folders hold the same files."""
    contents = [
        {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        for folder in (found, expected)
    ]
    if contents[0] != contents[1]:
        raise RuntimeError(f"{found} and {expected} differ")
