"""The command `farsight harness`: tasks from local files, their groups, options and rejected input."""

import dataclasses
import json
import random
import sys
from pathlib import Path

import pytest
import torch

from farsight.configs.schema import NoRotary, Position, Scope
from farsight.errors import ConfigError
from farsight.evals.harness import __main__ as command
from farsight.evals.harness import run as harness
from farsight.evals.harness.data import LocalData, local_data
from farsight.evals.harness.model import HarnessModel
from farsight.evals.harness.table import table
from farsight.evals.harness.tasks import Benchmark, benchmarks
from tests.evals.harness_models import make_model, ours, requests, sentence

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.tasks import TaskManager  # noqa: E402

TASKS = Path(lm_eval.__file__).parent / "tasks"
FOLDERS = (
    "arc", "bbh", "benchmarks", "gpqa", "hellaswag", "humaneval", "lambada", "longbench", "mgsm", "minerva_math",
    "mmlu/default", "openbookqa", "piqa", "ruler", "super_glue", "truthfulqa", "winogrande",
)  # fmt: skip


def make_manager(*folders: Path) -> TaskManager:
    """lm-eval's index, limited to the tested tasks out of some fifteen thousand."""
    return TaskManager(include_defaults=False, include_path=[*(TASKS / name for name in FOLDERS), *folders])


@pytest.fixture(scope="module")
def index():
    return dict(make_manager().task_index)


@pytest.fixture(autouse=True)
def few_tasks(monkeypatch, index):
    def task_manager(include_path=None, metadata=None):
        manager = TaskManager(include_defaults=False, include_path=include_path, metadata=metadata)
        manager.task_index.update(index)
        return manager

    monkeypatch.setattr(harness, "task_manager", task_manager)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def twin(dense):
    from lm_eval.models.huggingface import HFLM

    return HFLM(str(dense), device="cpu", dtype="float32", batch_size=2)


def piqa_rows(folder: Path, number: int = 12) -> Path:
    rng = random.Random(5)
    rows = [
        {"goal": sentence(rng, 5), "sol1": sentence(rng, 3), "sol2": sentence(rng, 4), "label": rng.randrange(2)}
        for _ in range(number)
    ]
    (folder / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "piqa.jsonl"


def test_a_task_runs_offline_from_a_file(dense, twin, tmp_path, capsys):
    """PIQA by the command, and the same accuracy from scores of `HFLM`, normalised by characters as in lm-eval."""
    rows = piqa_rows(tmp_path)
    out = tmp_path / "figures.json"
    common = ["--device", "cpu", "--json", str(out), "--batch-size", "4"]
    command.main([str(dense), "--tasks", "scope_nlu/piqa", "--data", f"piqa={rows}", *common])
    figures = json.loads(out.read_text())

    right, right_normalised = [], []
    for row in map(json.loads, rows.read_text().splitlines()):
        choices = [row["sol1"], row["sol2"]]
        asked = [(f"Question: {row['goal']}\nAnswer:", f" {choice}") for choice in choices]
        scores = [total for total, _ in twin.loglikelihood(requests("loglikelihood", asked), disable_tqdm=True)]
        right.append(scores.index(max(scores)) == row["label"])
        lengths = [len(choice) for choice in choices]
        normalised = [score / length for score, length in zip(scores, lengths, strict=True)]
        right_normalised.append(normalised.index(max(normalised)) == row["label"])
    accuracy = sum(right) / len(right)
    assert 0 < accuracy < 1
    (entry,) = figures["results"].values()
    assert entry["value"] == pytest.approx(accuracy)
    assert entry["metrics"]["acc_norm,none"] == pytest.approx(sum(right_normalised) / len(right))
    spread = torch.tensor(right, dtype=torch.float64).std().item() / len(right) ** 0.5
    assert entry["stderr"] == pytest.approx(spread)
    assert (entry["metric"], entry["shots"], entry["n"]) == ("acc,none", 0, 12)
    assert figures["mean"] == figures["means"]["scope_nlu"] == entry["value"]
    assert (figures["model"], figures["max_length"], figures["truncated"]) == (str(dense), 96, 0)
    assert f"{accuracy:.4f}" in capsys.readouterr().out


NLU_ROWS = {
    "gpqa_main_zeroshot": {
        "Question": "q", "Correct Answer": "x", "Incorrect Answer 1": "a", "Incorrect Answer 2": "b", "Incorrect Answer 3": "c",
    },
    "piqa": {"goal": "g", "sol1": "a", "sol2": "b", "label": 0},
    "truthfulqa_mc2": {
        "question": "q", "mc1_targets": {"choices": ["a", "b"], "labels": [1, 0]},
        "mc2_targets": {"choices": ["a", "b"], "labels": [1, 0]},
    },
    "boolq": {"question": "is it", "passage": "It is.", "idx": 0, "label": 1},
    "lambada_openai": {"text": "the dog runs home"},
    "openbookqa": {"question_stem": "stem", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "A"},
    "winogrande": {"sentence": "The _ is big", "option1": "cat", "option2": "dog", "answer": "1"},
    "hellaswag": {
        "activity_label": "Run", "ctx_a": "A man runs.", "ctx_b": "he", "endings": ["stops", "b", "c", "d"], "label": "0",
    },
    "arc_challenge": {"question": "q?", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "A"},
}  # fmt: skip
"""One row of each task, with the fields that its config reads."""


def test_scope_s_tasks_run_offline(dense, tmp_path):
    """Every task that scores log-likelihoods, with its shots; here the right answer is the likely one."""
    for task, row in NLU_ROWS.items():
        (tmp_path / f"{task}.jsonl").write_text(json.dumps(row) + "\n")
        (tmp_path / f"{task}.fewshot.jsonl").write_text((json.dumps(row) + "\n") * 25)
    right = {" x", " a", " yes", " home", " is big", " stops"}
    shots, model = [], ours(dense)

    def loglikelihood(asked):
        shots.extend(
            request.args[0].count("\n\n") for request in asked if request.task_name in ("winogrande", "arc_challenge")
        )
        letters = {request.args[1]: request.args[0] for request in asked if request.task_name == "gpqa_main_zeroshot"}
        right.update(answer for answer, prompt in letters.items() if f"{answer.strip()} x\n" in prompt)
        likely = [r.args[1] in right and not r.args[0].endswith("The dog") for r in asked]
        return [(0.0 if each else -9.0, each) for each in likely]

    model.loglikelihood = loglikelihood
    chosen = [benchmark for benchmark in benchmarks(["scope_nlu"]) if benchmark.task != "bbh"]
    figures = harness.run_tasks(model, harness.task_manager(), chosen, local_data([], tmp_path))
    assert figures["results"].keys() == NLU_ROWS.keys()
    for task, row in figures["results"].items():
        assert (row["value"], row["n"]) == (pytest.approx(1.0, abs=1e-3), 1), task
    assert sorted(shots) == [5, 5, 25, 25]
    assert "perplexity,none" in figures["results"]["lambada_openai"]["metrics"]


def test_answers_are_cached_and_several_models_compared(dense, tmp_path, capsys, monkeypatch):
    rows = piqa_rows(tmp_path, 5)
    out, common = (
        tmp_path / "figures.json",
        ["--device", "cpu", "--tasks", "piqa", "--data", f"piqa={rows}", "--limit", "3"],
    )
    cached = [str(dense), *common, "--cache", str(tmp_path / "answers.db"), "--json", str(out)]
    command.main(cached)
    first = json.loads(out.read_text())
    assert first["results"]["piqa"]["n"] == first["limit"] == 3
    with monkeypatch.context() as patch:
        patch.setattr(HarnessModel, "_loglikelihood_tokens", lambda *_, **__: pytest.fail("asked again"))
        command.main(cached)
    assert json.loads(out.read_text())["results"] == first["results"]
    other = make_model(tmp_path / "other", Position(rotary=NoRotary()))
    command.main([str(dense), str(other), *common, "--json", str(out)])
    models = json.loads(out.read_text())["models"]
    assert list(models) == [str(dense), str(other)]
    assert models[str(dense)] == first
    assert str(other) in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main([str(dense), str(other), *common, "--cache", str(tmp_path / "answers.db")])
    assert "can't share one" in capsys.readouterr().err


def test_examples_come_from_their_file_or_are_never_the_question(dense, tmp_path):
    rows = [{"goal": f"goal {i}", "sol1": f"one {i}", "sol2": f"two {i}", "label": 0} for i in range(4)]
    questions, examples = tmp_path / "piqa.jsonl", tmp_path / "piqa.fewshot.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    examples.write_text("".join(json.dumps({**row, "goal": f"example {i}"}) + "\n" for i, row in enumerate(rows)))
    for data, example in ((LocalData(questions), "goal"), (LocalData(questions, examples), "example")):
        prompts, model = [], ours(dense, max_length=500)
        model.loglikelihood = lambda asked, prompts=prompts: (
            prompts.extend(r.args[0] for r in asked) or [(0.0, False)] * 8
        )
        harness.run_tasks(model, harness.task_manager(), [Benchmark("piqa", 3)], {"piqa": data})
        assert len(prompts) == 8
        for prompt in prompts:
            *shown, asked = prompt.split("\n\n")
            assert len(set(shown)) == 3
            assert all(text.startswith(f"Question: {example} ") for text in shown)
            assert asked.startswith("Question: goal ")
            assert asked.split("\n")[0] not in [text.split("\n")[0] for text in shown]


def test_mgsm_is_read_under_the_key_that_it_writes_and_own_groups_are_averaged(dense, tmp_path):
    """The answer is the last number that the model writes, made right in two of three questions."""
    rows = [{"question": f"Question: {i}?", "answer": f"{i}", "answer_number": i} for i in (10, 20, 30)]
    (tmp_path / "mgsm_direct_en.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    piqa_rows(tmp_path, 6)
    (tmp_path / "own.yaml").write_text(
        "group: own\ntask: [piqa, own_piqa]\naggregate_metric_list:\n  - metric: acc\n    weight_by_size: true\n"
    )
    (tmp_path / "own_piqa.yaml").write_text(f"include: {TASKS / 'piqa/piqa.yaml'}\ntask: own_piqa\n")
    (tmp_path / "own_piqa.jsonl").write_text("".join((tmp_path / "piqa.jsonl").read_text().splitlines(True)[:2]))
    model = ours(dense)
    model.generate_until = lambda asked: ["first 7, so 10", "20.", "31"]
    model.loglikelihood = lambda asked: [(float(r.args[1].startswith(" t")), True) for r in asked]
    manager = harness.task_manager(include_path=tmp_path)
    chosen = benchmarks(["garfa_six/mgsm_direct_en", "own"])
    data = local_data([f"mgsm_direct_en={tmp_path / 'mgsm_direct_en.jsonl'}"], tmp_path)
    chosen[0] = dataclasses.replace(chosen[0], shots=2)
    figures = harness.run_tasks(model, manager, chosen, data)
    mgsm, own = figures["results"]["mgsm_direct_en"], figures["results"]["own"]
    assert mgsm["metric"] == "exact_match,flexible-extract"
    assert mgsm["value"] == pytest.approx(2 / 3)
    assert mgsm["metrics"]["exact_match,remove_whitespace"] == pytest.approx(
        1 / 3
    )  # "20." alone, but for its full stop
    assert own["n"] == 8  # six questions, and two of them again
    alone = harness.run_tasks(model, harness.task_manager(), [Benchmark("piqa")], {"piqa": data["piqa"]})["mean"]
    twice = harness.run_tasks(model, manager, [Benchmark("own_piqa")], {"own_piqa": data["own_piqa"]})["mean"]
    assert own["value"] == pytest.approx((6 * alone + 2 * twice) / 8)
    assert figures["means"] == {"garfa_six": mgsm["value"]}
    assert figures["mean"] == pytest.approx((mgsm["value"] + own["value"]) / 2)


def test_ruler_is_reported_by_length(dense, tmp_path):
    """Each length's figure covers only that length's prompts, which here come from a file with lm-eval's fields."""
    rows = [
        {"input": "the key is", "outputs": [answer], "gen_prefix": "It is", "max_length": length}
        for length, answer in ((4096, "7"), (4096, "8"), (8192, "7"))
    ]
    for task in ("niah_single_1", "niah_single_2"):
        (tmp_path / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = ours(dense)
    model.generate_until = lambda asked: ["7"] * len(asked)
    chosen = [b for b in benchmarks(["ruler"], lengths=(4096, 8192)) if b.task in ("niah_single_1", "niah_single_2")]
    # The module that makes RULER's prompts needs packages that are not installed; the tasks are lm-eval's.
    include = tmp_path / "ruler"
    include.mkdir()
    text = (TASKS / "ruler/niah_single_1.yaml").read_text()
    kept = [line for line in text.splitlines() if not line.startswith("custom_dataset")]
    (include / "common_utils.py").write_text((TASKS / "ruler/common_utils.py").read_text())
    for task in ("niah_single_1", "niah_single_2"):
        (include / f"{task}.yaml").write_text("\n".join(kept).replace("task: niah_single_1", f"task: {task}"))
    manager = harness.task_manager()
    manager.task_index.update(TaskManager(include_defaults=False, include_path=include).task_index)
    figures = harness.run_tasks(model, manager, chosen, local_data([], tmp_path))
    assert {name: (row["value"], row["n"]) for name, row in figures["results"].items()} == {
        "niah_single_1@4096": (0.5, 2), "niah_single_2@4096": (0.5, 2),
        "niah_single_1@8192": (1.0, 1), "niah_single_2@8192": (1.0, 1),
    }  # fmt: skip
    assert figures["means"] == {"ruler@4096": 0.5, "ruler@8192": 1.0}
    limited = harness.run_tasks(model, manager, chosen, local_data([], tmp_path), limit=1)
    assert {(row["value"], row["n"]) for row in limited["results"].values()} == {(1.0, 1)}
    assert limited["means"] == {"ruler@4096": 1.0, "ruler@8192": 1.0}
    longer = [dataclasses.replace(chosen[0], length=16384)]
    with pytest.raises(ConfigError, match="niah_single_1: its rows have no prompt with a max_length of 16384"):
        harness.run_tasks(model, manager, longer, local_data([], tmp_path))


def test_ruler_runs_no_program_of_a_model_s_directory(tmp_path):
    own = make_model(tmp_path / "own", Position(heads=Scope()))
    harness._refuse_tokenizer_code(own)
    written = json.loads((own / "config.json").read_text())
    assert "AutoConfig" in written["auto_map"]
    with (own / "modeling_farsight.py").open("a") as file:
        file.write("print('mine')\n")
    ruler = [str(own), "--device", "cpu", "--tasks", "ruler/niah_single_1"]
    with pytest.raises(SystemExit, match=r"config\.json: its auto_map names a program for AutoConfig"):
        command.main(ruler)
    (own / "config.json").write_text(json.dumps({**written, "auto_map": {}}))
    settings = json.loads((own / "tokenizer_config.json").read_text())
    for auto_map in ({"AutoTokenizer": ["code.Slow", None]}, ["code.Slow", None]):
        (own / "tokenizer_config.json").write_text(json.dumps({**settings, "auto_map": auto_map}))
        with pytest.raises(SystemExit, match="auto_map names a program for AutoTokenizer"):
            command.main(ruler)


def test_a_metric_that_is_not_written_costs_its_own_figure_alone(dense, tmp_path, caplog):
    data = {"piqa": LocalData(piqa_rows(tmp_path, 2))}
    chosen = [Benchmark("piqa", 0, "f1,none")]
    figures = harness.run_tasks(ours(dense), harness.task_manager(), chosen, data)
    assert (figures["results"]["piqa"]["value"], figures["mean"]) == (None, None)
    assert "piqa has no figure: lm-eval wrote no f1,none, but acc,none" in caplog.text
    assert "f1,none" in table(figures)


def test_what_is_asked_for_is_checked(dense, tmp_path, index, monkeypatch):
    rows = piqa_rows(tmp_path)
    manager = harness.task_manager()
    with pytest.raises(ConfigError, match=r"helaswag.*Did you mean hellaswag"):
        harness.run_tasks(ours(dense), manager, benchmarks(["helaswag"]))
    with pytest.raises(ConfigError, match=r"garfa_six/piqa: garfa_six has mmlu"):
        benchmarks(["garfa_six/piqa"])
    with pytest.raises(ConfigError, match=r"arc_challenge.*acc_norm,none.*acc,none"):
        benchmarks(["scope_nlu", "garfa_six"])
    with pytest.raises(ConfigError, match=r"humaneval_plus.*--run-code"):
        harness.run_tasks(ours(dense), manager, benchmarks(["garfa_six/humaneval_plus"]))
    with pytest.raises(SystemExit, match=r"--data piqa=…: --tasks does not run piqa"):
        command.main([str(dense), "--tasks", "boolq", "--data", f"piqa={rows}"])
    with pytest.raises(SystemExit, match=r"--data mmlu=…: mmlu is a group"):
        command.main([str(dense), "--tasks", "garfa_six/mmlu", "--data", f"mmlu={rows}"])
    for wrong in (["--chunk", "0"], ["--shots", "3"], ["--lengths", "4096"]):
        with pytest.raises(SystemExit) as refused:
            command.main([str(dense), "--tasks", "garfa_six/mmlu", *wrong])
        assert refused.value.code == 2, wrong
    rows.write_text('{"question": "?"}\n')
    with pytest.raises(ConfigError, match=r"piqa could not be loaded.*goal.*--data TASK=FILE"):
        harness.run_tasks(ours(dense), harness.task_manager(), benchmarks(["piqa"]), {"piqa": LocalData(rows)})
    with pytest.raises(ConfigError, match=r"piqa\.fewshot\.jsonl holds examples of piqa"):
        local_data([f"piqa.fewshot={rows.rename(tmp_path / 'piqa.fewshot.jsonl')}"], None)
    with pytest.raises(ConfigError, match="no such file"):
        local_data(["piqa=nowhere.jsonl"], None)


def test_without_a_network_the_error_names_the_option(dense, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"boolq could not be loaded.*--data TASK=FILE"):
        harness.run_tasks(ours(dense), harness.task_manager(), benchmarks(["boolq"]))


def test_without_lm_eval_the_error_says_what_to_install(monkeypatch, dense):
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[eval\]'"):
        harness.task_manager()
