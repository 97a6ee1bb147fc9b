"""Small runs, models and files to spoil, and how a case is run and judged."""

import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from farsight.benchmarks.forked import Finished, Forked
from farsight.benchmarks.tiny import MODEL, SETTINGS

CONFIG = (
    MODEL
    + SETTINGS
    + """
[position]
heads = { kind = "scope" }

[training]
seq_len = 32
local_batch_size = 2
global_batch_size = 2
steps = 12
mixed_precision_param = "float32"

[checkpoint]
interval = 4

[validation]
freq = 12
steps = 2

[metrics]
log_freq = 1
trackers = []
"""
)
FINETUNE = """
[base_model]
quantization = "none"
dtype = "float32"

[lora]
rank = 2
alpha = 4.0
dropout = 0.0

[training]
seq_len = 160
local_batch_size = 2
global_batch_size = 2
steps = 2

[validation]
enable = false
"""
EXECUTED = "executed"
"""The name of a file that appears beside a case's files when something in them was executed."""
BOUND_SECONDS = 90.0
"""Seconds that a command may take to refuse its input, on a busy machine."""

Content = bytes | str | Callable[[Path], None]
"""A file's content, or a function that creates the file at a given path."""


@dataclass(frozen=True)
class Case:
    """A command that has to refuse its input."""

    name: str
    command: str
    """`train.py …` or a command of `farsight` with its arguments. {here}, {model}, {dense}, {adapter}, {run}, {checkpoint}, {text}, {rows}
    and {config} stand for paths."""
    says: tuple[str, ...]
    """Words that its message must contain."""
    files: Mapping[str, Content] = field(default_factory=dict)
    """Files that are written below {here} first."""
    copies: tuple[str, ...] = ()
    """Parts of the workshop that the case spoils: copied below {here} first."""
    status: int = 2


@dataclass
class Workshop:
    """A folder with a small run, its checkpoints, models, an adapter and texts."""

    folder: Path
    paths: dict[str, Path] = field(init=False)

    def __post_init__(self) -> None:
        f = self.folder
        self.paths = {
            "model": f / "run" / "model", "dense": f / "dense" / "model", "dense_plain": f / "plain", "adapter": f / "tuned" / "adapter", "run": f / "run",
            "checkpoint": f / "dense" / "checkpoint" / "step-12", "text": f / "text.txt", "rows": f / "rows.jsonl",
            "chats": f / "chats.jsonl", "prompts": f / "prompts.csv", "piqa": f / "piqa.jsonl", "config": f / "config.toml", "finetune": f / "finetune.toml",
        }  # fmt: skip

    def build(self) -> None:
        """Trains and writes all of it, in a few seconds."""
        paths = self.paths
        self.folder.mkdir(parents=True, exist_ok=True)
        words = " ".join(f"word{i * i % 97} and {i % 7};" for i in range(4000))
        paths["text"].write_text(words)
        paths["rows"].write_text("".join(json.dumps({"text": words[i : i + 600]}) + "\n" for i in range(0, 24000, 600)))
        talk = [{"instruction": f"Say {i}.", "input": "", "output": f"It is {i}."} for i in range(24)]
        paths["chats"].write_text("".join(json.dumps(row) + "\n" for row in talk))
        paths["prompts"].write_text("prompt_id,prompt\n1,one two three\n")
        choice = {"goal": "write", "sol1": "a word", "sol2": "a number", "label": 0}
        paths["piqa"].write_text(f"{json.dumps(choice)}\n" * 4)
        paths["config"].write_text(CONFIG)
        paths["finetune"].write_text(FINETUNE + f'[[data.sources]]\nkind = "jsonl"\npath = "{paths["chats"]}"\n')
        self._must(f"train.py --job.config_file {paths['config']} --job.dump_folder {paths['run']}")
        dense = f"--job.dump_folder {self.folder / 'dense'} --position.heads.kind dense"
        self._must(f"train.py --job.config_file {paths['config']} {dense}")
        copy_any(paths["dense"], paths["dense_plain"])
        (paths["dense_plain"] / "farsight.json").unlink()  # as if downloaded from a hub
        tuned = f"--base_model.path {paths['dense']} --job.dump_folder {self.folder / 'tuned'}"
        self._must(f"train.py finetune --job.config_file {paths['finetune']} {tuned}")

    def _must(self, command: str) -> None:
        done = self.start(command, self.folder).wait(300)
        if done.returncode:
            raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")

    def start(self, command: str, folder: Path, ranks: int = 1) -> Forked:
        """Starts a command in a folder; its output is kept there too."""
        script, *arguments = shlex.split(command)
        return Forked(arguments, ranks, folder / "printed", script, folder)

    def place(self, case: Case, here: Path) -> str:
        """Writes a case's files below `here`; returns its command."""
        here.mkdir(parents=True)
        paths = dict(self.paths)
        for name in case.copies:
            paths[name] = here / name
            copy_any(self.paths[name], here / name)
        for name, content in case.files.items():
            path = here / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if callable(content):
                content(path)
            else:
                path.write_bytes(content.encode() if isinstance(content, str) else content)
        return case.command.format(here=here, **paths)

    def check(self, case: Case, number: int) -> "Verdict":
        """Runs a case and judges it."""
        here = self.folder / "cases" / f"{number:04d}"
        command = self.place(case, here)
        before = fingerprint(here)
        begin = time.monotonic()
        done = self.start(command, here).wait(BOUND_SECONDS)
        seconds = time.monotonic() - begin
        return Verdict(case, command, done, seconds, judge(case, done, seconds, here, before))


@dataclass(frozen=True)
class Verdict:
    case: Case
    command: str
    done: Finished
    seconds: float
    wrong: tuple[str, ...]
    """The faults found: "traceback", "hang", "executed", "status …", "unclear: …", "lost data: …"."""


def judge(case: Case, done: Finished, seconds: float, here: Path, before: dict[str, str]) -> tuple[str, ...]:
    """Returns the faults in how a case ended."""
    printed = done.stdout + done.stderr
    wrong = []
    if "Traceback (most recent call last)" in printed or "fault in Farsight" in printed:
        wrong.append("traceback")
    if seconds >= BOUND_SECONDS:
        wrong.append("hang")
    if any(here.rglob(EXECUTED)):
        wrong.append("executed")
    if done.returncode != case.status:
        wrong.append(f"status {done.returncode}, not {case.status}")
    if missing := [word for word in case.says if word not in printed]:
        wrong.append(f"unclear: nothing of {', '.join(map(repr, missing))}")
    after = fingerprint(here)
    if changed := [name for name, found in before.items() if after.get(name) != found]:
        wrong.append(f"lost data: {', '.join(changed[:3])} changed")
    return tuple(wrong)


def fingerprint(folder: Path) -> dict[str, str]:
    """A hash of every file below a folder, by its path; what a command prints, and locks, are left out."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not path.is_symlink() and not name.startswith("printed/") and path.name != ".lock":
            found[name] = blake2b(path.read_bytes(), digest_size=16).hexdigest()
    return found


def copy_any(source: Path, target: Path) -> None:
    (shutil.copytree if source.is_dir() else shutil.copy)(source, target)


def fifo(path: Path) -> None:
    """A pipe that nobody writes to: opening it blocks for ever."""
    os.mkfifo(path)
