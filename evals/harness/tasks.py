"""The named groups of tasks of lm-evaluation-harness 0.4.13, with the number of examples and the metric reported for each task."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farsight.errors import ConfigError


@dataclass(frozen=True)
class Benchmark:
    """A task, or a group of tasks averaged by lm-eval."""

    task: str
    shots: int | None = None
    """Examples before each question; None keeps the task's own number."""
    metric: str | None = None
    """"METRIC,FILTER", as lm-eval writes it; None reports the first one."""
    name: str = ""
    """Name in the results; the task's if empty."""
    group: str = ""
    """Group whose mean includes it."""
    length: int | None = None
    """Length of the prompts that count, for a task with prompts of several lengths."""

    @property
    def label(self) -> str:
        return self.name or self.task


# SCOPE's Table 6 says "Accuracy" throughout. Its shots are those of the Open LLM Leaderboard, which uses acc_norm for ARC and
# HellaSwag; its 0.33 on OpenBookQA (beside 0.71 on PIQA) and 0.38 on TruthfulQA are typical of acc_norm and mc2 for models of that
# strength. lm-eval's BBH is the variant with chains of thought.
_SCOPE_NLU = (
    Benchmark("gpqa_main_zeroshot", 0, "acc,none"),
    Benchmark("piqa", 0, "acc,none"),
    Benchmark("truthfulqa_mc2", 0, "acc,none"),
    Benchmark("boolq", 0, "acc,none"),
    Benchmark("lambada_openai", 0, "acc,none"),
    Benchmark("openbookqa", 0, "acc_norm,none"),
    Benchmark("bbh", 3, "exact_match,get-answer"),
    Benchmark("winogrande", 5, "acc,none"),
    Benchmark("hellaswag", 10, "acc_norm,none"),
    Benchmark("arc_challenge", 25, "acc_norm,none"),
)
# GARFA's section 4 does not name its variants of GPQA, MATH and MGSM. It ran HumanEval+ with EvalPlus.
_GARFA_SIX = (
    Benchmark("mmlu", 5, "acc,none"),
    Benchmark("gpqa_main_zeroshot", 0, "acc,none"),
    Benchmark("humaneval_plus", 0, "pass@1,create_test"),
    Benchmark("minerva_math", 4, "exact_match,none"),
    Benchmark("mgsm_direct_en", 8, "exact_match,flexible-extract"),
    Benchmark("arc_challenge", 25, "acc,none"),
)
# The six categories of SCOPE's Table 2.
_LONGBENCH = tuple(
    Benchmark(f"longbench_{category}", 0, "score,none")
    for category in ("code", "fewshot", "multi", "single", "summarization", "synthetic")
)
# The sixteen data sets of RiPRA's Table 15.
_LONGBENCH_EN = tuple(
    Benchmark(f"longbench_{name}", 0, "score,none")
    for name in (
        "narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report", "qmsum", "multi_news",
        "trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p",
    )
)  # fmt: skip
_RULER = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multiquery", "niah_multivalue", "ruler_vt", "ruler_cwe", "ruler_fwe", "ruler_qa_squad", "ruler_qa_hotpot",
)  # fmt: skip

RULER_LENGTHS = (4096,)


def named_groups(lengths: Sequence[int] = RULER_LENGTHS) -> dict[str, tuple[Benchmark, ...]]:
    """The groups by name.

    Args:
        lengths: lengths of RULER's prompts, in tokens; lm-eval writes a task's figure at each length with the length as its metric.
    """
    ruler = tuple(
        Benchmark(task, 0, f"{length},none", f"{task}@{length}", f"ruler@{length}", length)
        for length in lengths
        for task in _RULER
    )
    groups = {
        "scope_nlu": _SCOPE_NLU,
        "garfa_six": _GARFA_SIX,
        "longbench": _LONGBENCH,
        "longbench_en": _LONGBENCH_EN,
        "ruler": ruler,
    }
    return {
        name: tuple(dataclasses.replace(benchmark, group=benchmark.group or name) for benchmark in benchmarks)
        for name, benchmarks in groups.items()
    }


def benchmarks(
    names: Iterable[str], shots: int | None = None, lengths: Sequence[int] = RULER_LENGTHS
) -> list[Benchmark]:
    """The benchmarks to run.

    Args:
        names: groups, tasks of a group ("garfa_six/mmlu"), or any tasks or groups of lm-eval.
        shots: for names of the last kind.

    Raises:
        ConfigError: a group has no such task, or two groups report one task differently.
    """
    groups = named_groups(lengths)
    found: dict[str, Benchmark] = {}
    for name in names:
        group, _, task = name.partition("/")
        chosen: Iterable[Benchmark]
        if group not in groups:
            chosen = [Benchmark(name, shots)]
        else:
            chosen = [benchmark for benchmark in groups[group] if task in ("", benchmark.task)]
            if not chosen:
                known = ", ".join(dict.fromkeys(benchmark.task for benchmark in groups[group]))
                raise ConfigError(f"--tasks {name}: {group} has {known}.")
        for benchmark in chosen:
            other = found.setdefault(benchmark.label, benchmark)
            if dataclasses.replace(other, group="") != dataclasses.replace(benchmark, group=""):
                raise ConfigError(
                    f"--tasks: {benchmark.task} is asked for with {_asked(other)} and with {_asked(benchmark)}; "
                    "run one after the other."
                )
    return list(found.values())


def _asked(benchmark: Benchmark) -> str:
    shots = "its own" if benchmark.shots is None else benchmark.shots
    return f"{shots} shots and {benchmark.metric or 'its first metric'}"


def leaves(index: Mapping[str, Any], name: str) -> list[str]:
    """The tasks in an lm-eval task, group or tag.

    Args:
        index: `TaskManager.task_index`.

    Raises:
        ConfigError: an unknown name; the message suggests similar ones.
    """
    if name not in index:
        like = difflib.get_close_matches(name, [*named_groups(), *index], n=3)
        hint = f"Did you mean {' or '.join(like)}?" if like else "`lm-eval ls tasks` lists them."
        raise ConfigError(f"--tasks {name}: lm-eval has no such task. {hint}")
    entry = index[name]
    match entry.kind.name:
        case "TAG":
            members = sorted(entry.tags)
        case "GROUP":
            given = entry.cfg.get("task") or []
            members = [m if isinstance(m, str) else m.get("group", m.get("task")) for m in given]
        case _:
            return [name]
    # A group may define tasks inline, which the index lacks.
    return [leaf for member in members for leaf in (leaves(index, member) if member in index else [member])]
