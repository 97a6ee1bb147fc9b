"""Which tasks of lm-evaluation-harness 0.4.13 the named groups run, with how many examples, and under which key lm-eval
writes what is reported."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farsight.configs.check import ConfigError


@dataclass(frozen=True)
class Benchmark:
    """A task, or a group of tasks that lm-eval averages."""

    task: str
    shots: int | None = None
    """Examples before each question; None leaves them to the task."""
    metric: str | None = None
    """"METRIC,FILTER", as lm-eval writes it; None reports the first that it writes."""
    name: str = ""
    """In the results; the task's where it is empty."""
    group: str = ""
    """Whose mean it counts in."""
    length: int | None = None
    """Of the prompts that it counts, where a task has prompts of several."""

    @property
    def label(self) -> str:
        return self.name or self.task


# SCOPE's Table 6 says "Accuracy" throughout. Its shots are those of the Open LLM Leaderboard, which takes acc_norm for ARC and
# HellaSwag; and its 0.33 on OpenBookQA beside 0.71 on PIQA, and 0.38 on TruthfulQA, are what models of that strength have in
# acc_norm and in mc2. lm-eval's own BBH is the one with chains of thought.
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
# GARFA's section 4, which does not say which variants of GPQA, MATH and MGSM it ran. It ran HumanEval+ with EvalPlus.
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
        lengths: in tokens, of RULER's prompts; lm-eval writes a task's figure at each under the length as its metric.
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
    """What to run.

    Args:
        names: of a group, of one of its tasks ("garfa_six/mmlu"), or of any task or group that lm-eval knows.
        shots: of the last kind.

    Raises:
        ConfigError: a group that has no such task, or two that report one task differently.
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
    """The tasks that a task, group or tag of lm-eval's consists of.

    Args:
        index: `TaskManager.task_index`.

    Raises:
        ConfigError: a name that is not there; says which are like it.
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
    # A group may hold tasks that are written out in it.
    return [leaf for member in members for leaf in (leaves(index, member) if member in index else [member])]
