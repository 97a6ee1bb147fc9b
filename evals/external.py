"""Results of other harnesses, in the table and JSON format of `farsight harness`.

    farsight external HELMET/output/my_model --json F
    farsight external LOFT/outputs LongBench-Pro/output/my_model/*_summary.json

Reads what HELMET, LOFT and LongBench-Pro write, and what L-Eval prints (docs/evaluation/evaluate.md says how to run each of them, and where
they put their results). A folder is searched for files of these kinds; other files are skipped. Figures range from 0 to 1, whatever
the harness's own scale.
"""

import ast
import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farsight.cli import command, new_parser
from farsight.errors import ConfigError
from farsight.evals.harness.table import table
from farsight.json_files import fields_of, read_object
from farsight.outputs import add_json_option, write_json

logger = logging.getLogger("farsight")

KINDS = """\
  HELMET         DATASET_TAG_TEST_inLENGTH_size….json, .json.score, or -gpt4eval_o.json: "averaged_metrics"
  LOFT           …_metrics.json of run_evaluation.py: "quality"
  LongBench-Pro  …_summary.json: "average_overall_metric"
  L-Eval         a .txt file with what auto_eval.py printed: a line that begins {'exact_match': …"""


@dataclass(frozen=True)
class Figure:
    """One task's result."""

    name: str
    metric: str
    value: float
    source: Path
    n: int | None = None
    group: str = ""
    """Group whose mean includes it."""


# Category and reported metrics of HELMET's data sets, by a part of the data set's name.
_HELMET: dict[str, tuple[str, tuple[str, ...]]] = {
    "json_kv": ("Recall", ("substring_exact_match",)),
    "ruler_niah": ("Recall", ("ruler_recall",)),
    "ruler_qa": ("RULER", ("substring_exact_match",)),
    "ruler_": ("RULER", ("ruler_recall",)),
    "hotpotqa": ("RAG", ("substring_exact_match",)),
    "popqa": ("RAG", ("substring_exact_match",)),
    "triviaqa": ("RAG", ("substring_exact_match",)),
    "kilt_nq": ("RAG", ("substring_exact_match",)),
    "msmarco_rerank": ("Re-rank", ("NDCG@10",)),
    "icl_": ("ICL", ("exact_match",)),
    "narrativeqa": ("LongQA", ("gpt-4-score",)),
    "infbench_qa": ("LongQA", ("rougeL_f1",)),
    "infbench_choice": ("LongQA", ("exact_match",)),
    "infbench_sum": ("Summ", ("gpt-4-f1",)),
    "multi_lexsum": ("Summ", ("gpt-4-f1",)),
    "alce_asqa": ("Cite", ("str_em", "citation_rec", "citation_prec")),
    "alce_qampari": ("Cite", ("qampari_rec_top5", "citation_rec", "citation_prec")),
}
_HELMET_RECALL = ("ruler_niah_mk_2", "ruler_niah_mk_3", "ruler_niah_mv")
"""RULER's needle tasks that count in HELMET's Recall."""
_HELMET_FULL = {"gpt-4-score": 3.0, "gpt-4-f1": 1.0}
_HELMET_COLUMNS = {"Recall": 4, "RAG": 4, "ICL": 5, "Cite": 6, "Re-rank": 1, "LongQA": 3, "Summ": 2}
_HELMET_NAME = re.compile(r"(?P<rest>.+)_in(?P<length>\d+)_size.*?\.json(?:\.score)?$")
_GPT4 = "-gpt4eval_o.json"

# LOFT's primary metrics by task (its README), and those of retrieval data sets that differ.
_LOFT = {"retrieval": "recall@1", "mm": "recall@1", "rag": "subspan_em", "sql": "exec_acc", "icl": "em"}
_LOFT_RETRIEVAL = {"hotpotqa": "mrecall@2", "musique": "mrecall@5", "qampari": "mrecall@5", "quest": "mrecall@3"}

_LEVAL_FILE = re.compile(r"^loading from (?P<file>.+), there are (?P<n>\d+) samples$", re.MULTILINE)
_LEVAL_AVERAGE = re.compile(r"^average score of .*: (?P<value>[\d.]+)$", re.MULTILINE)


def read(paths: Iterable[Path]) -> list[Figure]:
    """The figures in result files and folders of them.

    Raises:
        ConfigError: a missing file, one of unknown kind or without figures, or two files with the same figure.
    """
    figures: dict[str, Figure] = {}
    for path in paths:
        if path.is_dir():
            found = [figure for file in _result_files(path) for figure in read_file(file)]
        elif path.is_file():
            found = read_file(path)
        else:
            raise ConfigError(f"There is no file or folder {path}.")
        if not found:
            raise ConfigError(f"{path} holds no results of the kinds\n{KINDS}")
        for figure in found:
            other = figures.setdefault(figure.name, figure)
            if other != figure:
                raise ConfigError(f"{other.source} and {figure.source} both give {figure.name}; name one of them.")
    return list(figures.values())


def _result_files(folder: Path) -> Iterator[Path]:
    """The result files in a folder; of the files that HELMET writes for one run, the one with the final figures."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or _kind_of(path) is None:
            continue
        alce = "alce" in path.name  # ALCE's figures are only in the .score file
        if path.suffix == ".score":
            superseded = not alce and path.with_suffix("").is_file()
        else:
            judged = path.with_name(path.name.removesuffix(".json") + _GPT4)
            superseded = judged.is_file() or (alce and path.with_name(f"{path.name}.score").is_file())
        if not superseded:
            yield path


def _kind_of(path: Path) -> str | None:
    """The harness that wrote a file; None for other files."""
    if path.suffix not in (".json", ".score", ".txt"):
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".txt":
        return "L-Eval" if "begin evaluating:" in text else None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    if "averaged_metrics" in content or (path.suffix == ".score" and _HELMET_NAME.match(path.name)):
        return "HELMET"
    if isinstance(content.get("quality"), dict) and "num_unanswered_queries" in content:
        return "LOFT"
    return "LongBench-Pro" if "average_overall_metric" in content else None


def read_file(path: Path) -> list[Figure]:
    """The figures in one file.

    Raises:
        ConfigError: a file of unknown kind, or an unknown task.
    """
    with fields_of(path):
        match _kind_of(path):
            case "HELMET":
                figures = _helmet(path)
            case "LOFT":
                figures = _loft(path)
            case "LongBench-Pro":
                figures = _longbench_pro(path)
            case "L-Eval":
                figures = _leval(path)
            case _:
                raise ConfigError(f"{path} is not a result file of any of these kinds:\n{KINDS}")
    for figure in figures:
        if not isinstance(figure.value, int | float):
            raise ConfigError(f"{path}: {figure.metric} of {figure.name} is {figure.value!r}, not a number.")
    return figures


def _helmet(path: Path) -> list[Figure]:
    content = read_object(path)
    name, length = _helmet_task(path, content)
    key = next((key for key in _HELMET if key in name), None)
    if key is None:
        raise ConfigError(f"{path}: {name} is none of HELMET's data sets ({', '.join(_HELMET)}).")
    category, metrics = _HELMET[key]
    if key == "ruler_niah" and not any(each in name for each in _HELMET_RECALL):
        category = "RULER"
    averages = content.get("averaged_metrics", content)
    data = content.get("data")
    figures = []
    for metric in metrics:
        if metric not in averages and metric in _HELMET_FULL:
            logger.warning(f"{path} is left out: it lacks {metric}, which HELMET's scripts/eval_gpt4_*.py add.")
            return []
        if metric not in averages:
            raise ConfigError(f"{path} lacks {metric}. It has {', '.join(averages)}.")
        label = f"helmet/{name}" + (f":{metric}" if len(metrics) > 1 else "")
        value = averages[metric] / _HELMET_FULL.get(metric, 100.0)
        count = len(data) if isinstance(data, list) else None
        figures.append(Figure(f"{label}@{length}", metric, value, path, count, f"helmet/{category}@{length}"))
    return figures


def _helmet_task(path: Path, content: dict[str, Any]) -> tuple[str, str]:
    """Data set and length of a run: from its arguments (a .score file has them in the file beside it) or from its name."""
    beside = path.with_suffix("")
    if path.suffix == ".score" and beside.is_file():
        content = read_object(beside)
    if "args" in content:
        return content["args"]["datasets"], str(content["args"]["input_max_length"])
    named = _HELMET_NAME.match(path.name)
    if named is None:
        raise ConfigError(f"{path}: HELMET's names have …_inLENGTH_size… in them, and this one does not.")
    return named["rest"], named["length"]


def _loft(path: Path) -> list[Figure]:
    """The figure in `outputs/TASK/DATASET/LENGTH/SPLIT_predictions_metrics.json`, the layout of LOFT's own script."""
    if len(path.absolute().parts) < 5 or path.absolute().parts[-4] not in _LOFT:
        raise ConfigError(
            f"{path}: LOFT's results lie at TASK/DATASET/LENGTH/{path.name}, with TASK one of {', '.join(_LOFT)}."
        )
    task, dataset, length = path.absolute().parts[-4:-1]
    metric = _LOFT_RETRIEVAL.get(dataset, _LOFT[task]) if task == "retrieval" else _LOFT[task]
    quality = read_object(path)["quality"]
    if metric not in quality:
        raise ConfigError(
            f"{path} lacks {metric}, which LOFT reports of {task}/{dataset}. It has {', '.join(quality)}."
        )
    lines = path.with_name(path.name.removesuffix(".json") + "_per_line.jsonl")
    count = (
        sum(1 for line in lines.open(encoding="utf-8", errors="replace") if line.strip()) if lines.is_file() else None
    )
    return [Figure(f"loft/{task}/{dataset}@{length}", metric, quality[metric], path, count, f"loft/{task}@{length}")]


def _longbench_pro(path: Path) -> list[Figure]:
    """The mean over all runs of each question, and the same by length, language and kind of task."""
    content = read_object(path)
    figures = [
        Figure("longbench_pro", "overall", content["average_overall_metric"], path, content["total_questions_num"])
    ]
    for dimension in ("token_length", "language", "contextual_requirement", "primary_task"):
        for name, value in content.get(f"average_{dimension}_metric", {}).items():
            label = f"longbench_pro@{name}" if dimension == "token_length" else f"longbench_pro/{name}"
            figures.append(Figure(label, dimension, value, path))
    return figures


def _leval(path: Path) -> list[Figure]:
    """The figure in the output of `auto_eval.py`: the file that it read, then its metrics as a Python dictionary."""
    text = path.read_text(encoding="utf-8", errors="replace")
    file = _LEVAL_FILE.search(text)
    if file is None:
        raise ConfigError(
            f'{path} lacks the line "loading from FILE, there are N samples" that auto_eval.py begins with.'
        )
    task = Path(file["file"]).name.removesuffix(".pred.jsonl")
    metrics: dict[str, Any] = {}
    for line in text.splitlines():
        start = line.find("{'")
        if start >= 0 and "'LEval_score'" in line:
            try:
                metrics = ast.literal_eval(line[start:])
            except (ValueError, SyntaxError):  # nan is not a literal
                raise ConfigError(f"{path}: {line[start:]} is not a line of numeric metrics.") from None
    if not metrics:
        raise ConfigError(f"{path} lacks the line of metrics ({{'exact_match': …, 'LEval_score': …}}) of auto_eval.py.")
    average = _LEVAL_AVERAGE.search(text)  # over the parts of a task that has several
    value = float(average["value"]) if average else metrics["LEval_score"]
    metric = metrics["display_keys"][0].partition("/")[0]
    return [Figure(f"leval/{task}", metric, value / 100, path, int(file["n"]), f"leval/{metric}")]


def figures_of(found: Sequence[Figure]) -> dict[str, Any]:
    """The figures as `farsight harness` writes them: {"results": {task: …}, "means": {group: mean}}.

    A HELMET category has a mean only if all its columns are present, and HELMET only if all its categories have one.
    """
    groups: dict[str, list[float]] = {}
    for figure in found:
        groups.setdefault(figure.group, []).append(figure.value)
    means: dict[str, float] = {}
    for group, values in groups.items():
        category = group.removeprefix("helmet/").partition("@")[0]
        whole = not group.startswith("helmet/") or _HELMET_COLUMNS.get(category, len(values)) == len(values)
        if group and whole:
            means[group] = math.fsum(values) / len(values)
    for length in dict.fromkeys(group.partition("@")[2] for group in groups if group.startswith("helmet/")):
        categories = [means.get(f"helmet/{category}@{length}") for category in _HELMET_COLUMNS]
        if None not in categories:
            means[f"helmet@{length}"] = math.fsum(c for c in categories if c is not None) / len(categories)
    return {
        "results": {
            figure.name: {
                "value": figure.value,
                "stderr": None,
                "metric": figure.metric,
                "shots": None,
                "n": figure.n,
                "source": str(figure.source),
            }
            for figure in found
        },
        "means": means,
    }


@command
def main(arguments: list[str] | None = None) -> None:
    parser = new_parser("farsight external", f"{__doc__}\n{KINDS}")
    parser.add_argument("results", type=Path, nargs="+", metavar="FILE_OR_DIR")
    add_json_option(parser)
    options = parser.parse_args(arguments)
    figures: Mapping[str, Any] = figures_of(read(options.results))
    print(table(figures))
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
