"""Runs tasks of lm-evaluation-harness 0.4.13 on a model and collects its figures."""

import argparse
import logging
import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from farsight.checkpoints.model_dir import hf_config
from farsight.data.tokenizers.tokenizer import find_tokenizer_dir
from farsight.errors import ConfigError
from farsight.evals.harness.data import EXAMPLES, LocalData, local_data, use_local_data
from farsight.evals.harness.tasks import Benchmark, benchmarks, leaves
from farsight.extras import install_command
from farsight.inference.loading import LoadedModel
from farsight.inference.model_options import reading_options
from farsight.json_files import read_object
from farsight.remote import shown

if TYPE_CHECKING:
    from farsight.evals.harness.model import HarnessModel

logger = logging.getLogger("farsight")

BOOTSTRAP = 1000
"""Resamplings for the standard errors of metrics that are not means. lm-eval's default of 100,000 takes minutes for each task, and a
pool of processes."""


def task_manager(include_path: Path | None = None, metadata: dict[str, Any] | None = None) -> Any:
    """lm-eval's index of tasks.

    Args:
        include_path: folder with YAML files of further tasks.
        metadata: passed to tasks that generate their data.

    Raises:
        ConfigError: lm-eval is not installed.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise ConfigError(f"this needs lm-evaluation-harness 0.4.13 ({error}): {install_command('eval')}") from None
    return TaskManager(include_path=include_path and str(include_path), metadata=metadata)


def run_tasks(
    model: "HarnessModel",
    manager: Any,
    chosen: Sequence[Benchmark],
    data: Mapping[str, LocalData] | None = None,
    limit: int | None = None,
    run_code: bool = False,
    cache: Path | None = None,
) -> dict[str, Any]:
    """Runs tasks on a model.

    Args:
        manager: from `task_manager`.
        data: files in place of data sets, by task; files of tasks that are not run are ignored.
        limit: most questions of each task, and of each length of a RULER task.
        run_code: run programs that the model writes.
        cache: lm-eval's own cache of answers, valid for this model and reading only.

    Returns:
        {"results": {task: {"value", "stderr", "metric", "shots", "n", "metrics"}}, "means": {group: mean}, "mean"}. Means leave
        out metrics where lower is better. A "value" is None, with a warning, where lm-eval did not write the metric.

    Raises:
        ConfigError: unknown tasks, or data that are missing or do not fit.
    """
    from lm_eval.api.model import CachingLM
    from lm_eval.evaluator import evaluate

    index = manager.task_index
    tasks = {benchmark.task: leaves(index, benchmark.task) for benchmark in chosen}
    run = {leaf for found in tasks.values() for leaf in found}
    _refuse_code(index, run, run_code)
    data = {task: files for task, files in (data or {}).items() if task in run}
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # BOOTSTRAP resamplings need no pool of processes
    # The seeds that lm-eval's own command sets.
    random.seed(0)
    np.random.seed(1234)
    torch.manual_seed(1234)
    with use_local_data(index, data):
        loaded = _load(manager, chosen)
        rows = _rows(loaded["tasks"], chosen, limit)
        written = evaluate(
            CachingLM(model, str(cache)) if cache is not None else model,
            loaded,
            samples={task: [row for part in parts.values() for row in part] for task, parts in rows.items()},
            bootstrap_iters=BOOTSTRAP,
            log_samples=False,
            apply_chat_template=model.template is not None,
            fewshot_as_multiturn=True,
            confirm_run_unsafe_code=run_code,
        )
    return _figures(written, chosen, tasks, rows)


def _refuse_code(index: Mapping[str, Any], tasks: set[str], run_code: bool) -> None:
    unsafe = sorted(task for task in tasks if task in index and (index[task].cfg or {}).get("unsafe_code"))
    if unsafe and not run_code:
        raise ConfigError(
            f"{', '.join(unsafe)}: runs programs that the model writes, on this machine and with your rights. Where they can "
            "harm nothing, add --run-code to this command; in an ablation, to the one in a copy of its evaluations file."
        )
    if unsafe:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # the metric refuses to run code without it


def _refuse_tokenizer_code(folder: Path) -> None:
    """Refuses a tokenizer folder that names programs: RULER loads it with `trust_remote_code`, which would run them."""
    code = Path(hf_config.__file__).with_name(f"{hf_config.MODELING}.py")
    for name in ("tokenizer_config.json", "config.json"):
        path = folder / name
        given = read_object(path).get("auto_map") if path.is_file() else None
        named = {"AutoTokenizer": given} if isinstance(given, list) else given or {}
        for kind in ("AutoTokenizer", "AutoConfig"):
            own = folder / code.name
            written_here = (
                kind == "AutoConfig"
                and named.get(kind) == f"{code.stem}.FarsightConfig"
                and own.is_file()
                and own.read_bytes() == code.read_bytes()
            )
            if kind in named and not written_here:
                raise ConfigError(
                    f"{path}: its auto_map names a program for {kind}, {named[kind]}, which RULER's tasks would run with your "
                    "rights. Take auto_map out of a copy, or export the directory again if it came from here."
                )


def _load(manager: Any, chosen: Sequence[Benchmark]) -> dict[str, Any]:
    """lm-eval's tasks with their rows, in the form that `evaluate` takes."""
    shots = {benchmark.task: benchmark.shots for benchmark in chosen}
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in shots:
        try:
            found = manager.load([name])
        except Exception as error:  # many kinds: no network, no such data set, a missing field
            raise ConfigError(
                f"{name} could not be loaded ({type(error).__name__}: {error}). Its rows can come from a file: "
                "--data TASK=FILE.jsonl, one JSON object a line with the fields of the data set that the task is written for."
            ) from error
        for task_name, task in found["tasks"].items():
            if task_name in loaded["tasks"]:
                raise ConfigError(f"--tasks: {task_name} is in {name} and in another; run one after the other.")
            own = task.get_config("num_fewshot")
            if own is None or (shots[name] is not None and own != 0):
                task.set_config("num_fewshot", shots[name] or 0)
            elif shots[name]:  # lm-eval keeps these at 0 too
                logger.warning(f"{task_name} runs with 0 shots, not {shots[name]}: the task is defined as zero-shot.")
            task.set_fewshot_seed(1234)
        for kind in loaded:
            loaded[kind] |= found.get(kind, {})
    return loaded


def _rows(
    tasks: Mapping[str, Any], chosen: Sequence[Benchmark], limit: int | None
) -> dict[str, dict[int | None, Sequence[int]]]:
    """Numbers of the questions to ask, by task and length.

    A RULER task lists the prompts of all lengths one after another; lm-eval's own limit would take only the first length's.
    """
    lengths: dict[str, list[int]] = {}
    for benchmark in chosen:
        if benchmark.length is not None:
            lengths.setdefault(benchmark.task, []).append(benchmark.length)
    found: dict[str, dict[int | None, Sequence[int]]] = {}
    for name, task in tasks.items():
        docs = task.eval_docs
        if name in lengths:
            of = list(docs["max_length"])
            found[name] = {n: [i for i, each in enumerate(of) if each == n][:limit] for n in lengths[name]}
            if missing := [str(n) for n, rows in found[name].items() if not rows]:
                raise ConfigError(f"{name}: its rows have no prompt with a max_length of {' or '.join(missing)}.")
        else:
            found[name] = {None: range(len(docs))[:limit]}
    return found


def _figures(
    written: Mapping[str, Any],
    chosen: Sequence[Benchmark],
    tasks: Mapping[str, Sequence[str]],
    rows: Mapping[str, Mapping[int | None, Sequence[int]]],
) -> dict[str, Any]:
    results: dict[str, dict[str, Any]] = {}
    counted: dict[str, list[float]] = {}
    for benchmark in chosen:
        members = tasks[benchmark.task]
        # lm-eval has no figure for a tag as it has for a group, only for each of its tasks.
        names = [benchmark.task] if benchmark.task in written["results"] else members
        for name in names:
            entry = written["results"][name]
            metrics = {
                key: float(value)
                for key, value in entry.items()
                if "," in key and "_stderr," not in key and isinstance(value, int | float)
            }
            key = benchmark.metric or next(iter(metrics), "")
            label = benchmark.name or name
            if key not in metrics:
                wrote = ", ".join(metrics) or "nothing"
                logger.warning(f"{label} has no figure: lm-eval wrote no {key or 'metric'}, but {wrote}.")
            metric, _, filters = key.partition(",")
            stderr = entry.get(f"{metric}_stderr,{filters}")
            of = members if name == benchmark.task else [name]
            results[label] = {
                "value": metrics.get(key),
                "stderr": float(stderr) if isinstance(stderr, int | float) else None,
                "metric": key,
                "shots": written["n-shot"].get(of[0]),
                "n": sum(len(rows[leaf][benchmark.length]) for leaf in of),
                "metrics": metrics,
            }
            if key in metrics and written["higher_is_better"].get(of[0], {}).get(metric) is not False:
                counted.setdefault(benchmark.group, []).append(metrics[key])
    everything = [value for values in counted.values() for value in values]
    return {
        "results": results,
        "means": {group: math.fsum(values) / len(values) for group, values in counted.items() if group},
        "mean": math.fsum(everything) / len(everything) if everything else None,
    }


@dataclass(frozen=True)
class Tasks:
    """What the command's options ask for."""

    chosen: list[Benchmark]
    data: dict[str, LocalData]
    manager: Any
    """lm-eval's index of tasks."""


def read_tasks(folder: Path, options: argparse.Namespace) -> Tasks:
    """The tasks that the command's options ask for, before any weight is read.

    Args:
        folder: the model's, whose tokenizer RULER's tasks make their prompts with.

    Raises:
        ConfigError: unknown tasks, or data that are missing or do not fit.
    """
    chosen = benchmarks(options.tasks, options.shots, options.lengths)
    data = local_data(options.data, options.data_dir)
    metadata = {"tokenizer": str(find_tokenizer_dir(folder) or folder), "max_seq_lengths": options.lengths}
    manager = task_manager(options.include_path, metadata)
    if any(benchmark.length is not None for benchmark in chosen):
        _refuse_tokenizer_code(Path(metadata["tokenizer"]))
    run = {leaf for benchmark in chosen for leaf in leaves(manager.task_index, benchmark.task)}
    for task in (text.partition("=")[0].removesuffix(EXAMPLES) for text in options.data):
        if task not in run:
            if task in [benchmark.task for benchmark in chosen]:
                raise ConfigError(
                    f"--data {task}=…: {task} is a group; each of its tasks needs a file of its own (--data-dir)."
                )
            raise ConfigError(f"--data {task}=…: --tasks does not run {task}.")
    return Tasks(chosen, data, manager)


def measure(loaded: LoadedModel, options: argparse.Namespace, tasks: Tasks) -> dict[str, Any]:
    """The model's figures on the tasks, as the command's options say.

    Raises:
        ConfigError: data that do not fit.
    """
    from farsight.evals.harness.model import HarnessModel, Reading

    ruler = any(benchmark.group.startswith("ruler@") for benchmark in tasks.chosen)
    reading = Reading(
        options.max_length or max([loaded.trained_length, *(options.lengths if ruler else [])]),
        options.truncate,
        options.batch_size,
        {"auto": None, "yes": True, "no": False}[options.bos],
        options.chat,
    )
    model = HarnessModel(loaded, reading)
    figures = run_tasks(model, tasks.manager, tasks.chosen, tasks.data, options.limit, options.run_code, options.cache)
    return {
        **figures,
        "model": shown(loaded.path),
        **reading_options(options),
        "limit": options.limit,
        "max_length": reading.max_length,
        "truncated": model.truncated,
    }
