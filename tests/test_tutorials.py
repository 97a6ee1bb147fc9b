"""The pages of docs/tutorials/: their files, commands, programs and diffs are run in order, and print what the pages show.

A page's fenced blocks are, by their first word and title:

    console                 lines after "$ " are commands; the other lines are part of what the command above them prints
    console interrupt=…     the same, with Ctrl-C once the command has printed this
    toml title="my.toml"    a file, whatever its language
    python                  a program
    diff                    a change to the checkout, for git apply
    text                    part of what the block above it prints

Of what is printed, numbers may differ, and "…" stands for anything.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.running import ROOT, environment

TUTORIALS = ROOT / "docs" / "tutorials"
CHECKOUTS = {"position", "backend", "source", "evaluation"}
"""Pages that change a checkout; they are run in a copy of this one."""
BEFORE = {"extend": ["from_scratch"], "finetune": ["from_scratch"]}
"""Pages that use what another page made."""
FENCE = re.compile(r"^```(\w*) *([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LIMIT = 300.0
"""Seconds that a command may take."""

FORKS = """
import gc, json, os, runpy, sys
import bitsandbytes, peft, sentencepiece, torch.distributed.checkpoint, transformers

torch.set_num_threads(1)
gc.freeze()  # what a fork has inherited need not be collected when it ends
for line in sys.stdin:
    job = json.loads(line)
    if child := os.fork():
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    printed = os.open(job["printed"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(printed, 1), os.dup2(printed, 2), os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(job["folder"])
    os.environ["PYTHONPATH"] = job["checkout"]
    sys.path[0] = job["checkout"]
    sys.argv = job["command"]
    if sys.argv[0] == "farsight":
        runpy.run_module("farsight", run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
    break
"""
"""Forks of a process that has imported the libraries, and none of our packages, so that a changed checkout can be run."""


@dataclass(frozen=True)
class Block:
    kind: str
    attributes: str
    text: str

    def attribute(self, name: str) -> str | None:
        found = re.search(rf'{name}=(?:"([^"]*)"|(\S+))', self.attributes)
        return (found[1] or found[2]) if found else None

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """The commands of a console block, each with the lines that it prints."""
        for part in re.split(r"^\$ ", self.text.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
            command, *printed = part.splitlines()
            yield command, printed


def blocks(name: str) -> list[Block]:
    return [Block(*found) for found in FENCE.findall((TUTORIALS / f"{name}.md").read_text("utf-8"))]


def loosely(line: str) -> str:
    """A regular expression for a line that a page shows."""
    text = re.escape(" ".join(line.split()))
    return re.sub(r"\\?-?\d(?:[\d,]|\\\.)*(?:e\\?[-+]\d+)?", r"[-+\\d.,e]+", text).replace("…", ".*")


def unprinted(lines: list[str], printed: str) -> list[str]:
    """The shown lines that were not printed."""
    there = [" ".join(line.split()) for line in re.split(r"[\n\r]", re.sub(r"\x1b\[[\d;]*m", "", printed))]
    return [line for line in lines if line.strip() and not any(re.fullmatch(loosely(line), found) for found in there)]


class Runner:
    """Runs pages, each once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ran = folder, set[str]()
        self.forks = subprocess.Popen(
            [sys.executable, "-c", FORKS], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def page(self, name: str) -> None:
        if name in self.ran:
            return
        self.ran.add(name)
        for earlier in BEFORE.get(name, []):
            self.page(earlier)
        place = checkout = ROOT
        if name in CHECKOUTS:
            place = checkout = copied(self.folder / name)
        else:
            place = self.folder / "own"
            place.mkdir(exist_ok=True)
        printed = ""
        for block in blocks(name):
            try:
                printed = self.block(block, place, checkout, printed)
            except AssertionError as error:
                raise AssertionError(
                    f"{name}.md:\n```{block.kind} {block.attributes}\n{block.text}```\n{error}"
                ) from None

    def block(self, block: Block, place: Path, checkout: Path, before: str) -> str:
        """Runs a block and returns what it printed; `before` is what the one above it printed."""
        if (title := block.attribute("title")) is not None:
            (place / title).parent.mkdir(parents=True, exist_ok=True)
            (place / title).write_text(block.text, "utf-8")
            return ""
        if block.kind == "text":
            check_shown(block.text.splitlines(), before)
            return before
        if block.kind == "diff":
            return shell(["git", "apply", "-v", "-"], place, block.text)
        if block.kind == "python":
            (self.folder / "block.py").write_text(block.text, "utf-8")
            return self.fork([str(self.folder / "block.py")], place, checkout)
        assert block.kind == "console", f"a block of kind {block.kind!r} is neither run nor compared"
        printed = ""
        for command, shown in block.commands():
            words = shlex.split(command, comments=True)
            if words[0] == "farsight":
                printed = self.fork(words, place, checkout, block.attribute("interrupt"))
            else:
                printed = shell(["bash", "-euc", command], place)
            check_shown(shown, printed)
        return printed

    def fork(self, command: list[str], place: Path, checkout: Path, interrupt: str | None = None) -> str:
        """Runs a command of `farsight`, or a Python file; returns what it printed."""
        path = self.folder / "printed"
        path.unlink(missing_ok=True)
        job = {"command": command, "folder": str(place), "checkout": str(checkout), "printed": str(path)}
        assert self.forks.stdin is not None
        assert self.forks.stdout is not None
        print(json.dumps(job), file=self.forks.stdin, flush=True)
        child, end = int(self.forks.stdout.readline()), time.monotonic() + LIMIT
        if interrupt is not None:
            while interrupt not in (path.read_text("utf-8") if path.exists() else ""):
                assert time.monotonic() < end, f"{interrupt!r} was not printed:\n{path.read_text('utf-8')}"
                try:
                    os.kill(child, 0)
                except ProcessLookupError:
                    break  # it has ended
                time.sleep(0.05)
            else:
                os.kill(child, signal.SIGINT)
        status = int(self.forks.stdout.readline())
        printed = path.read_text("utf-8")
        assert status == (0 if interrupt is None else 75), f"{command} ended with {status}:\n{printed}"
        return printed

    def close(self) -> None:
        assert self.forks.stdin is not None
        self.forks.stdin.close()
        self.forks.wait()


def copied(folder: Path) -> Path:
    """A copy of the files of this checkout that a change may touch."""
    left_out = shutil.ignore_patterns("__pycache__", ".*", "runs", "assets", "build", "*.png")
    shutil.copytree(ROOT, folder, symlinks=True, ignore=left_out)
    return folder


def shell(command: list[str], folder: Path, given: str = "") -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment(), input=given, timeout=LIMIT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def check_shown(lines: list[str], printed: str) -> None:
    absent = unprinted(lines, printed)
    assert not absent, "\n".join(["These lines of the page were not printed:", *absent, "This was:", printed])


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    runner = Runner(tmp_path_factory.mktemp("tutorials"))
    yield runner
    runner.close()


@pytest.mark.parametrize("name", sorted(path.stem for path in TUTORIALS.glob("*.md")))
def test_a_page_does_what_it_says(runner, name):
    runner.page(name)


def test_lines_are_compared_loosely():
    printed = "step 20  loss 5.125\nmodel directory: runs/my/model\n"
    assert not unprinted(["step 1  loss 4.2", "model directory: …/model", ""], printed)
    assert unprinted(["step 1  perplexity 4.2", "model directory: runs/his/model"], printed) == [
        "step 1  perplexity 4.2",
        "model directory: runs/his/model",
    ]


def test_blocks_are_taken_apart():
    block = Block("console", 'interrupt="step 5"', "$ ls \\\n  -l\ntotal 3\n$ pwd  # where\n")
    assert list(block.commands()) == [("ls    -l", ["total 3"]), ("pwd  # where", [])]
    assert block.attribute("interrupt") == "step 5"
    assert block.attribute("title") is None
