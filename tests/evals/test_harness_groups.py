"""The groups of `farsight harness`: tasks, shots and metrics of the papers, against lm-eval's own files."""

from pathlib import Path

import pytest

from farsight.evals.harness.tasks import benchmarks, leaves, named_groups
from farsight.launch.ablation.evaluations import read_evaluations
from tests.evals.test_harness import make_manager


@pytest.fixture(scope="module")
def index():
    return dict(make_manager().task_index)


def written_keys(index: dict, name: str) -> set[str]:
    """ "METRIC,FILTER" of a task or group, from lm-eval's YAML files."""
    config = index[name].cfg
    if index[name].kind.name == "GROUP":
        entries = config["aggregate_metric_list"]
        filters = {entry["metric"]: entry.get("filter_list", "none") for entry in entries}
        return {f"{metric},{each}" for metric, f in filters.items() for each in ([f] if isinstance(f, str) else f)}
    names = [each["name"] for each in config.get("filter_list") or [{"name": "none"}]]
    metrics = []
    for entry in config["metric_list"]:
        metric = str(entry["metric"])
        metrics += [f"pass@{k}" for k in entry["k"]] if metric.endswith(".pass_at_k") else [metric]
    return {f"{metric},{each}" for metric in metrics for each in names}


@pytest.mark.parametrize("group", named_groups())
def test_groups_name_tasks_and_metrics_that_lm_eval_has(index, group):
    for benchmark in named_groups(lengths=(4096, 131072))[group]:
        assert benchmark.metric in written_keys(index, benchmark.task), benchmark
        found = leaves(index, benchmark.task)
        assert all(index[leaf].kind.name == "TASK" for leaf in found)
        if index[benchmark.task].kind.name == "GROUP":  # what is averaged is what each of them writes
            assert all(benchmark.metric in written_keys(index, leaf) for leaf in found)
        for leaf in found:  # examples that a task lists must suffice
            own = index[leaf].cfg.get("num_fewshot")
            assert own is None or own == benchmark.shots, leaf


def test_groups_are_those_of_the_papers(index):
    def figures(group: str) -> list[tuple[str, int | None]]:
        return [(each.task, each.shots) for each in named_groups()[group]]

    assert figures("scope_nlu") == [
        ("gpqa_main_zeroshot", 0), ("piqa", 0), ("truthfulqa_mc2", 0), ("boolq", 0), ("lambada_openai", 0),
        ("openbookqa", 0), ("bbh", 3), ("winogrande", 5), ("hellaswag", 10), ("arc_challenge", 25),
    ]  # fmt: skip
    assert dict(figures("garfa_six")) == {
        "mmlu": 5, "gpqa_main_zeroshot": 0, "humaneval_plus": 0, "minerva_math": 4, "mgsm_direct_en": 8, "arc_challenge": 25,
    }  # fmt: skip
    assert len(leaves(index, "mmlu")) == 57
    assert len(leaves(index, "bbh")) == 27
    assert len(leaves(index, "minerva_math")) == 7
    assert sum(len(leaves(index, task)) for task, _ in figures("longbench")) == 21
    english = {leaf for task, _ in figures("longbench") for leaf in leaves(index, task)} - {
        "longbench_multifieldqa_zh", "longbench_dureader", "longbench_vcsum", "longbench_lsht", "longbench_passage_retrieval_zh",
    }  # fmt: skip
    assert {task for task, _ in figures("longbench_en")} == english
    assert sorted(task for task, _ in figures("ruler")) == sorted(leaves(index, "ruler"))


def test_the_ablation_s_evaluations_are_those_of_the_group():
    """Each runs one of the six tasks, and reads its figure from this harness's output."""
    evaluations = read_evaluations(Path(__file__).parents[2] / "configs/finetune/evaluations/paper.toml")[1:]
    asked = []
    for evaluation in evaluations:
        words = evaluation.command.split()
        (benchmark,) = benchmarks([words[words.index("--tasks") + 1]])
        assert evaluation.value == f"results.{benchmark.label}.value"
        assert words[:3] == ["farsight", "harness", "{model}"]
        assert "--run-code" not in words  # nobody has agreed to it yet
        asked.append(benchmark)
    assert asked == list(named_groups()["garfa_six"])
