"""Rows of lm-eval's tasks from local files, where their data sets can't be downloaded.

A task's questions are in `TASK.jsonl`, the examples shown before them in `TASK.fewshot.jsonl`: one JSON object a line, with the
fields of the data set that the task is written for.
"""

import dataclasses
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farsight.errors import ConfigError

EXAMPLES = ".fewshot"
"""Suffix of the name of a file with a task's examples."""


@dataclass(frozen=True)
class LocalData:
    """Files with a task's rows."""

    questions: Path
    examples: Path | None = None


def local_data(named: Iterable[str], folder: Path | None) -> dict[str, LocalData]:
    """Files with rows, by task.

    Args:
        named: "TASK=FILE" or "TASK.fewshot=FILE".
        folder: contains files named after tasks.

    Raises:
        ConfigError: a missing file, or examples without questions.
    """
    files: dict[str, Path] = {}
    if folder is not None:
        files = {path.stem: path for path in sorted(folder.glob("*.jsonl"))}
        if not files:
            raise ConfigError(f"--data-dir {folder}: there is no TASK.jsonl in it.")
    for text in named:
        task, equals, file = text.partition("=")
        if not equals:
            raise ConfigError(f"--data {text}: write TASK=FILE.jsonl.")
        files[task] = Path(file)
    for task, path in files.items():
        if not path.is_file():
            raise ConfigError(f"--data {task}={path}: there is no such file.")
    found = {}
    for task, path in files.items():
        if not task.endswith(EXAMPLES):
            found[task] = LocalData(path, files.get(task + EXAMPLES))
        elif task.removesuffix(EXAMPLES) not in files:
            raise ConfigError(f"{path} holds examples of {task.removesuffix(EXAMPLES)}: its questions are missing.")
    return found


@contextmanager
def use_local_data(index: dict[str, Any], data: Mapping[str, LocalData]) -> Iterator[None]:
    """Makes lm-eval's tasks read the files inside the context, through copies of their configs that name them.

    Args:
        index: `TaskManager.task_index`.

    Raises:
        ConfigError: a task whose rows can't be read from a file.
    """
    before = dict(index)
    with tempfile.TemporaryDirectory() as folder:
        try:
            _redirect(index, data, Path(folder))
            yield
        finally:
            index.update(before)


def _redirect(index: dict[str, Any], data: Mapping[str, LocalData], folder: Path) -> None:
    import yaml

    for task, files in data.items():
        entry = index[task]
        if entry.kind.name != "TASK" or entry.yaml_path is None:
            raise ConfigError(f"--data {task}: lm-eval reads the rows of this task by a program; it takes no file.")
        splits = {"test": str(files.questions.resolve())}
        if files.examples is not None:
            splits["examples"] = str(files.examples.resolve())
        # `test`: lm-eval leaves a question out of its own examples only if both are of the test split.
        examples = "test" if files.examples is None else "examples"
        listed = "samples" in (entry.cfg.get("fewshot_config") or {})
        config = {
            "include": str(entry.yaml_path),
            "task": task,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": splits, "cache_dir": str(folder / "datasets")},
            "custom_dataset": None,
            "training_split": None,
            "validation_split": None,
            "test_split": "test",
            "fewshot_split": None if listed else examples,
        }
        path = folder / f"{task}.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        index[task] = dataclasses.replace(entry, yaml_path=path)
