"""lm-evaluation-harness 0.4.13 on any model here.

    farsight harness MODEL_DIR --tasks scope_nlu --json F
    farsight harness MODEL_DIR OTHER_DIR --tasks longbench_en --max-length 32768 --truncate middle
    farsight harness MODEL_DIR --tasks ruler --lengths 4096 16384 --limit 50
    farsight harness MODEL_DIR --tasks piqa garfa_six/mmlu --data piqa=piqa.jsonl --data-dir mmlu_rows/

Takes model directories of every kind, adapters and checkpoints, and --extend. Needs `pip install '.[eval]'`.

Groups, with shots and metrics as the papers have them: scope_nlu (SCOPE, Table 6), garfa_six (GARFA, section 4), longbench (six
categories; SCOPE, Table 2), longbench_en (its sixteen English data sets; RiPRA, Table 15), ruler (thirteen tasks at each of
--lengths). GROUP/TASK is one of them. Any other name is a task or group of lm-eval's own: `lm-eval ls tasks` lists them.

Texts longer than --max-length (default: what the model was trained on) are cut, and how many were is printed. Data sets come
from the Hugging Face Hub; without a network, --data and --data-dir take their rows from files (docs/evaluation/evaluate.md).
"""

import argparse
import json
import logging
import math
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from farsight.checkpoints.model_dir import hf_config
from farsight.cli import bounded, command, positive
from farsight.configs.check import ConfigError
from farsight.data.tokenizers.files import parse_json
from farsight.data.tokenizers.tokenizer import find_tokenizer_dir
from farsight.evals.harness.data import EXAMPLES, LocalData, local_data, use_local_data
from farsight.evals.harness.tasks import RULER_LENGTHS, Benchmark, benchmarks, leaves, named_groups
from farsight.files import write_text
from farsight.inference.model_options import add_model_options, load
from farsight.outputs import check_outputs

if TYPE_CHECKING:
    from farsight.evals.harness.model import HarnessModel

logger = logging.getLogger("farsight")

BOOTSTRAP = 1000
"""Resamplings behind the standard error of what is no mean; lm-eval's 100,000 take minutes a task, and a pool of processes."""


def task_manager(include_path: Path | None = None, metadata: dict[str, Any] | None = None) -> Any:
    """lm-eval's index of tasks.

    Args:
        include_path: folder of further tasks' YAML files.
        metadata: what tasks that make their data themselves are told.

    Raises:
        ConfigError: lm-eval is not installed.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise ConfigError(f"this needs lm-evaluation-harness 0.4.13 ({error}): pip install '.[eval]'") from None
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
    """Figures of a model.

    Args:
        manager: from `task_manager`.
        data: files in place of data sets, by task; those of tasks that are not run are left alone.
        limit: at most this many questions of each task, and of each length of a task of RULER's.
        run_code: run programs that the model writes.
        cache: lm-eval's own cache of answers, of this model and this way of reading alone.

    Returns:
        {"results": {task: {"value", "stderr", "metric", "shots", "n", "metrics"}}, "means": {group: mean}, "mean"}. Means leave
        out figures of which lower is better. A "value" is None where lm-eval did not write the metric; a warning says so.

    Raises:
        ConfigError: unknown tasks, data that are not there or do not fit.
    """
    from lm_eval.api.model import CachingLM
    from lm_eval.evaluator import evaluate

    index = manager.task_index
    tasks = {benchmark.task: leaves(index, benchmark.task) for benchmark in chosen}
    run = {leaf for found in tasks.values() for leaf in found}
    _refuse_code(index, run, run_code)
    data = {task: files for task, files in (data or {}).items() if task in run}
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # of the resamplings; these are few
    # The seeds that lm-eval sets by itself when it runs as a command.
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
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # what the metric asks for before it runs anything


def _refuse_tokenizer_code(folder: Path) -> None:
    """RULER has transformers load this tokenizer with `trust_remote_code`, which would run what these files name."""
    code = Path(hf_config.__file__).with_name(f"{hf_config.MODELING}.py")
    for name in ("tokenizer_config.json", "config.json"):
        path = folder / name
        given = parse_json(path.read_bytes(), path).get("auto_map") if path.is_file() else None
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
    """lm-eval's tasks with their rows, as `evaluate` takes them."""
    shots = {benchmark.task: benchmark.shots for benchmark in chosen}
    loaded: dict[str, Any] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in shots:
        try:
            found = manager.load([name])
        except Exception as error:  # of many kinds: no network, no such set, a field that is not there
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
            elif shots[name]:  # as lm-eval itself has it
                logger.warning(f"{task_name} is asked with 0 shots and not {shots[name]}: it is written for none.")
            task.set_fewshot_seed(1234)
        for kind in loaded:
            loaded[kind] |= found.get(kind, {})
    return loaded


def _rows(
    tasks: Mapping[str, Any], chosen: Sequence[Benchmark], limit: int | None
) -> dict[str, dict[int | None, Sequence[int]]]:
    """Numbers of the questions to ask, by task and length.

    RULER's tasks hold the prompts of all lengths one after the other, where lm-eval's own limit would take the first length alone.
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
        # A tag is no group: lm-eval writes its tasks one by one.
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


def table(figures: Mapping[str, Any]) -> str:
    """The figures as text, a line a task."""
    results = figures["results"]
    width = max(len(name) for name in [*results, *figures["means"], "task"])
    lines = [f"{'task':<{width}}  {'shots':>5}  {'value':>8}  {'± error':>8}  {'n':>6}  metric"]
    for name, row in results.items():
        shots, value, error, n = (
            "" if row[key] is None else shape.format(row[key])
            for key, shape in (("shots", "{}"), ("value", "{:.4f}"), ("stderr", "{:.4f}"), ("n", "{}"))
        )
        lines.append(f"{name:<{width}}  {shots:>5}  {value:>8}  {error:>8}  {n:>6}  {row['metric']}")
    lines += [f"{name:<{width}}  {'':>5}  {mean:>8.4f}  mean" for name, mean in figures["means"].items()]
    return "\n".join(lines)


@command
def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="farsight harness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path, nargs="+")
    parser.add_argument("--tasks", nargs="+", required=True, metavar="NAME", help="groups and tasks")
    parser.add_argument("--limit", type=positive, help="at most this many questions of each task and length, for a try")
    parser.add_argument(
        "--shots", type=bounded(int, least=0), help="examples before each question, for tasks of no group named above"
    )
    parser.add_argument("--lengths", type=positive, nargs="+", help="of RULER's prompts (4096)")
    parser.add_argument("--data", nargs="+", action="extend", default=[], metavar="TASK=FILE", help="rows of a task")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="folder with TASK.jsonl and TASK.fewshot.jsonl")
    parser.add_argument("--include-path", type=Path, metavar="DIR", help="folder of your own tasks, as lm-eval's YAML")
    parser.add_argument(
        "--max-length", type=positive, help="most tokens of a text (default: the trained length, or --lengths)"
    )
    parser.add_argument("--truncate", choices=["left", "middle"], default="left", help="what goes of a longer one")
    parser.add_argument("--batch-size", type=positive, default=8, help="texts that are read together (%(default)s)")
    parser.add_argument(
        "--bos", choices=["auto", "yes", "no"], default="auto", help="bos first (auto: as the tokenizer has it)"
    )
    parser.add_argument("--chat", action="store_true", help="write prompts by the tokenizer's chat template")
    parser.add_argument("--run-code", action="store_true", help="run programs that the model writes (HumanEval+)")
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="FILE",
        help="lm-eval's cache of answers (SQLite, pickled: only your own), for one "
        "--max-length, --truncate and --bos: it does not tell them apart",
    )
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures here too")
    add_model_options(parser)
    options = parser.parse_args(arguments)
    if options.shots is not None and all(name.partition("/")[0] in named_groups() for name in options.tasks):
        parser.error("--shots: these tasks have the shots of their group; name them as lm-eval does, without GROUP/")
    if options.lengths and not any(name.partition("/")[0] == "ruler" for name in options.tasks):
        parser.error("--lengths is for RULER's prompts, and --tasks names none; --max-length cuts texts")
    options.lengths = options.lengths or list(RULER_LENGTHS)
    check_outputs(parser, options, "cache")
    if options.cache and len(options.model_dir) > 1:
        parser.error("--cache: answers of several models can't share one; measure them one by one")
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    results = {str(folder): _measure(folder, options) for folder in options.model_dir}
    for folder, figures in results.items():
        if len(results) > 1:
            print(folder)
        print(table(figures))
        if figures["truncated"]:
            print(
                f"{figures['truncated']} texts were cut to {figures['max_length']:,} tokens: --max-length reads more."
            )
    if options.json:
        content = {"models": results} if len(results) > 1 else next(iter(results.values()))
        write_text(options.json, json.dumps(content, indent=2) + "\n")


def _measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
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
    from farsight.evals.harness.model import HarnessModel, Reading

    loaded = load(folder, options)
    ruler = any(benchmark.group.startswith("ruler@") for benchmark in chosen)
    reading = Reading(
        options.max_length or max([loaded.trained_length, *(options.lengths if ruler else [])]),
        options.truncate,
        options.batch_size,
        {"auto": None, "yes": True, "no": False}[options.bos],
        options.chat,
    )
    model = HarnessModel(loaded, reading)
    figures = run_tasks(model, manager, chosen, data, options.limit, options.run_code, options.cache)
    return {
        **figures,
        "model": str(folder),
        "extend": options.extend,
        "limit": options.limit,
        "max_length": reading.max_length,
        "truncated": model.truncated,
    }


if __name__ == "__main__":
    main()
