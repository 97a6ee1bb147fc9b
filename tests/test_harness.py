"""lm-evaluation-harness on our models: offline, from local files, against lm-eval's own `HFLM` on the exported directory."""

import dataclasses
import json
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch

from checkpoints.model_dir import load_model, write_model_dir
from configs.check import ConfigError
from configs.schema import NoRotary, Position, Scope, Tokenizer
from data.chat import LLAMA_3
from data.tokenizer import load_tokenizer, load_tokenizer_dir
from evals import harness
from evals.decoder import Decoder
from evals.harness_data import LocalData, local_data
from evals.harness_model import HarnessModel, Reading
from evals.harness_tasks import Benchmark, benchmarks
from evals.model_options import LoadedModel
from model.build import ModelConfig, build_model
from tests.test_model import SMALL

lm_eval = pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

TASKS = Path(lm_eval.__file__).parent / "tasks"
FOLDERS = (
    "arc", "bbh", "benchmarks", "gpqa", "hellaswag", "humaneval", "lambada", "longbench", "mgsm", "minerva_math",
    "mmlu/default", "openbookqa", "piqa", "ruler", "super_glue", "truthfulqa", "winogrande",
)  # fmt: skip
WORDS = (
    "the",
    "a",
    "of",
    "red",
    "blue",
    "seven",
    "river",
    "stone",
    "walks",
    "sings",
    "quickly",
    "under",
    "not",
    "because",
)


def make_manager(*folders: Path) -> TaskManager:
    """lm-eval's index of the tasks that are tested, and not of all fifteen thousand."""
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


def make_model(folder: Path, position: Position | None = None, template: str | None = None) -> Path:
    """A model directory whose answers are ASCII: the bytes of random ones would be no text."""
    tokenizer = load_tokenizer(Tokenizer(kind="bytes"))
    tokenizer.chat_template = template
    tokenizer.save(folder / "tokenizer")
    config = ModelConfig(dataclasses.replace(SMALL, vocab_size=320), position or Position(), trained_length=96)
    model = build_model(config)
    model.init_weights()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15, generator=generator)
        model.output.weight[127:] = 0
    write_model_dir(folder / "model", config, model.state_dict(), tokenizer_dir=folder / "tokenizer")
    return folder / "model"


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("dense"))


def ours(path: Path, **reading) -> HarnessModel:
    model, config = load_model(path)
    loaded = LoadedModel(path, Decoder(model, config, chunk=32), load_tokenizer_dir(path), config.trained_length)
    return HarnessModel(loaded, Reading(**{"max_length": config.trained_length, "rows_at_once": 3, **reading}))


@pytest.fixture(scope="module")
def twin(dense):
    from lm_eval.models.huggingface import HFLM

    return HFLM(str(dense), device="cpu", dtype="float32", batch_size=2)


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


def test_log_likelihoods_equal_those_of_transformers(dense, twin):
    """Contexts of unequal length, empty, ending in a space, longer than the model reads; answers of one token and of many."""
    rng = random.Random(0)
    asked = [(sentence(rng, n), " " + sentence(rng, m)) for n, m in ((3, 1), (9, 4), (1, 2), (14, 3), (40, 2))]
    asked += [(sentence(rng, 6), choice) for choice in "ABCD"] + [("", "the river"), ("red ", "stone")]
    model = ours(dense)
    mine, theirs = (lm.loglikelihood(requests("loglikelihood", asked), disable_tqdm=True) for lm in (model, twin))
    assert model.truncated == 1
    for (total, greedy), (their_total, their_greedy) in zip(mine, theirs, strict=True):
        assert total == pytest.approx(their_total, abs=1e-4)
        assert greedy == their_greedy
    best = model.generate_until(requests("generate_until", [("so", {"until": [], "max_gen_toks": 5})]))[0]
    for lm in (model, twin):  # what greedy decoding writes, is said to be greedy
        (_, greedy), (_, other) = lm.loglikelihood(requests("loglikelihood", [("so", best), ("so", best[::-1])]))
        assert greedy
        assert not other


def test_rolling_log_likelihoods_equal_those_of_transformers(dense, twin):
    rng = random.Random(1)
    asked = [(sentence(rng, n),) for n in (2, 30, 75)]
    mine, theirs = (
        lm.loglikelihood_rolling(requests("loglikelihood_rolling", asked), disable_tqdm=True)
        for lm in (ours(dense), twin)
    )
    # A text of several windows sums several hundred tokens.
    assert mine == pytest.approx(theirs, abs=1e-4 * 5)
    assert len(asked[2][0]) > 4 * 96


def test_answers_equal_greedy_ones_of_transformers(dense, twin):
    rng = random.Random(2)
    contexts = [sentence(rng, n) for n in (1, 7, 30, 4)]
    plain = {"until": [], "max_gen_toks": 20, "do_sample": False}
    model = ours(dense)
    whole = model.generate_until(requests("generate_until", [(c, plain) for c in contexts]))
    assert whole == twin.generate_until(requests("generate_until", [(c, dict(plain)) for c in contexts]))
    assert model.truncated == 1
    stops = [text[8:10] for text in whole]
    asked = [(c, {**plain, "until": [stop]}) for c, stop in zip(contexts, stops, strict=True)]
    cut = model.generate_until(requests("generate_until", asked))
    assert cut == twin.generate_until(requests("generate_until", asked))
    assert cut == [text[: text.index(stop)] for text, stop in zip(whole, stops, strict=True)]


def test_several_end_tokens_end_answers_as_in_transformers(dense, twin, tmp_path):
    """A generation_config.json may list several, as that of Llama 3's chat models does. `HFLM` writes an ordinary end token's
    text, as it leaves out special tokens alone."""
    from lm_eval.models.huggingface import HFLM

    plain = {"until": [], "max_gen_toks": 20, "do_sample": False}
    asked = requests("generate_until", [(sentence(random.Random(2), n), plain) for n in (1, 7, 4)])
    whole = ours(dense).generate_until(asked)
    end = whole[0][8]
    assert end not in whole[0][:8]
    path = Path(shutil.copytree(dense, tmp_path / "model"))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, ord(end)]}))
    theirs = HFLM(str(path), device="cpu", dtype="float32", batch_size=2).generate_until(asked)
    found = ours(path).generate_until(asked)
    assert found == [text.partition(end)[0] for text in whole]
    assert [text.removesuffix(end) for text in theirs] == found
    assert theirs[0] == found[0] + end
    # Without that file transformers takes what config.json lists.
    (path / "generation_config.json").unlink()
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, "eos_token_id": [257, ord(end)]}))
    assert ours(path).generate_until(asked) == found


def test_a_chat_s_answers_end_with_its_turns(tmp_path):
    """The template's turn end is a token of its own where the tokenizer has it as one."""
    tokenizer = load_tokenizer(Tokenizer(kind="bytes"))
    turns = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    path = make_model(tmp_path, template=turns)
    assert ours(path, chat=True).end_tokens == {tokenizer.eos_id}
    ending = turns.replace("eos_token", "bos_token")  # a special token that ends no text by itself
    path = make_model(tmp_path / "other", template=ending)
    assert ours(path).end_tokens == {tokenizer.eos_id}
    assert ours(path, chat=True).end_tokens == {tokenizer.eos_id, tokenizer.bos_id}


def test_sampled_answers_follow_their_settings(dense, caplog):
    model = ours(dense)
    settings = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0}
    drawn = model.generate_until(requests("generate_until", [("so", settings)] * 4))
    assert len(set(drawn)) == 4
    assert drawn == model.generate_until(requests("generate_until", [("so", settings)] * 4))
    cold = model.generate_until(requests("generate_until", [("so", {**settings, "top_p": 1e-6, "num_beams": 2})]))
    greedy = model.generate_until(requests("generate_until", [("so", {"until": [], "max_gen_toks": 12})]))
    assert cold == greedy
    assert "num_beams" in caplog.text
    with pytest.raises(ConfigError, match=r"256 tokens.*--max-length 96"):
        model.generate_until(requests("generate_until", [("so", {"until": []})]))


@pytest.mark.parametrize("truncate", ["left", "middle"])
def test_long_contexts_lose_their_beginning_or_their_middle(dense, truncate):
    model = ours(dense, truncate=truncate, max_length=20, bos=False)
    context, answer = sentence(random.Random(3), 12), " red"
    room = 20 + 1 - len(answer)
    kept = context[-room:] if truncate == "left" else context[: room // 2] + context[-(room - room // 2) :]
    asked = requests("loglikelihood", [(context, answer), (kept, answer)])
    (cut, _), (short, _) = model.loglikelihood(asked, disable_tqdm=True)
    assert cut == pytest.approx(short, abs=1e-5)
    assert model.truncated == 1


def test_bos_comes_first_where_the_tokenizer_has_it(dense):
    bos = 256
    assert ours(dense).tok_encode("ab") == [bos, 97, 98]
    assert ours(dense, bos=False).tok_encode("ab") == [97, 98]
    assert ours(dense).prefix_token_id == bos


def test_chat_prompts_are_those_of_transformers(tmp_path):
    from transformers import AutoTokenizer

    path = make_model(tmp_path, template=LLAMA_3)
    model, theirs = ours(path, chat=True), AutoTokenizer.from_pretrained(path)
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 2?"}]
    prompt = model.apply_chat_template(messages)
    assert prompt == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert model.tok_encode(prompt) == theirs.encode(prompt, add_special_tokens=False)  # one bos, as a token
    messages.append({"role": "assistant", "content": "It is"})
    assert model.apply_chat_template(messages, add_generation_prompt=False) == prompt + "It is"
    with pytest.raises(ConfigError, match="no chat template"):
        ours(make_model(tmp_path / "plain"), chat=True)


def test_a_model_with_scopes_is_scored_as_by_its_forward(tmp_path):
    path = make_model(tmp_path, Position(heads=Scope(), rotary=NoRotary()))
    rng = random.Random(4)
    asked = [(sentence(rng, n), " " + sentence(rng, 3)) for n in (2, 12, 8)]
    model, _ = load_model(path)
    scores = ours(path).loglikelihood(requests("loglikelihood", asked), disable_tqdm=True)
    for (context, answer), (total, _) in zip(asked, scores, strict=True):
        ids = torch.tensor([[256, *(context + answer).encode()]])
        with torch.no_grad():
            log_p = model(ids)[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])
        assert total == pytest.approx(float(log_p[-len(answer) :].sum()), abs=1e-4)


def piqa_rows(folder: Path, number: int = 12) -> Path:
    rng = random.Random(5)
    rows = [
        {"goal": sentence(rng, 5), "sol1": sentence(rng, 3), "sol2": sentence(rng, 4), "label": rng.randrange(2)}
        for _ in range(number)
    ]
    (folder / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "piqa.jsonl"


def test_a_task_runs_offline_from_a_file(dense, twin, tmp_path, capsys):
    """PIQA by the command, and the same accuracy from scores of `HFLM`, normalised as lm-eval says: by characters."""
    rows = piqa_rows(tmp_path)
    out = tmp_path / "figures.json"
    common = ["--device", "cpu", "--json", str(out), "--batch-size", "4"]
    harness.main([str(dense), "--tasks", "scope_nlu/piqa", "--data", f"piqa={rows}", *common])
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
"""A row of each, with the fields that the task's config reads."""


def test_scope_s_tasks_run_offline(dense, tmp_path):
    """Every task that asks for log-likelihoods, with its shots; the answer that is right is the likely one here."""
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
    harness.main(cached)
    first = json.loads(out.read_text())
    assert first["results"]["piqa"]["n"] == first["limit"] == 3
    with monkeypatch.context() as patch:
        patch.setattr(HarnessModel, "_loglikelihood_tokens", lambda *_, **__: pytest.fail("asked again"))
        harness.main(cached)
    assert json.loads(out.read_text())["results"] == first["results"]
    other = make_model(tmp_path / "other", Position(rotary=NoRotary()))
    harness.main([str(dense), str(other), *common, "--json", str(out)])
    models = json.loads(out.read_text())["models"]
    assert list(models) == [str(dense), str(other)]
    assert models[str(dense)] == first
    assert str(other) in capsys.readouterr().out
    with pytest.raises(SystemExit):
        harness.main([str(dense), str(other), *common, "--cache", str(tmp_path / "answers.db")])
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
    """The answer is the last number that the model writes, which here is made to be right in two of three."""
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
    """Each length's figure is of that length's prompts alone; they come from a file here, with the fields that lm-eval's have."""
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
        harness.main(ruler)
    (own / "config.json").write_text(json.dumps({**written, "auto_map": {}}))
    settings = json.loads((own / "tokenizer_config.json").read_text())
    for auto_map in ({"AutoTokenizer": ["code.Slow", None]}, ["code.Slow", None]):
        (own / "tokenizer_config.json").write_text(json.dumps({**settings, "auto_map": auto_map}))
        with pytest.raises(SystemExit, match="auto_map names a program for AutoTokenizer"):
            harness.main(ruler)


def test_a_metric_that_is_not_written_costs_its_own_figure_alone(dense, tmp_path, caplog):
    data = {"piqa": LocalData(piqa_rows(tmp_path, 2))}
    chosen = [Benchmark("piqa", 0, "f1,none")]
    figures = harness.run_tasks(ours(dense), harness.task_manager(), chosen, data)
    assert (figures["results"]["piqa"]["value"], figures["mean"]) == (None, None)
    assert "piqa has no figure: lm-eval wrote no f1,none, but acc,none" in caplog.text
    assert "f1,none" in harness.table(figures)


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
        harness.main([str(dense), "--tasks", "boolq", "--data", f"piqa={rows}"])
    with pytest.raises(SystemExit, match=r"--data mmlu=…: mmlu is a group"):
        harness.main([str(dense), "--tasks", "garfa_six/mmlu", "--data", f"mmlu={rows}"])
    for wrong in (["--chunk", "0"], ["--shots", "3"], ["--lengths", "4096"]):
        with pytest.raises(SystemExit) as refused:
            harness.main([str(dense), "--tasks", "garfa_six/mmlu", *wrong])
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
    with pytest.raises(ConfigError, match=r"pip install '\.\[eval\]'"):
        harness.task_manager()
