"""`farsight needle`: answers against a model's own forward pass, scores by hand, cells for models whose answers are known."""

import dataclasses
import json
import re
import shutil

import pytest
import torch

from farsight.checkpoints.load import load_model
from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.configs.schema import DynamicNtkRope, Position, Scope, Tokenizer
from farsight.data.retrieval.needles import Haystack, Sample, count_tokens
from farsight.data.retrieval.tasks import TASKS, MultiPasskey, first_number, parse_task, share_found
from farsight.data.tokenizers.tokenizer import BytesTokenizer, load_tokenizer
from farsight.errors import ConfigError
from farsight.evals.needle.__main__ import TASKS as TASK_NAMES
from farsight.evals.needle.__main__ import main
from farsight.evals.needle.measure import Grid, complete, measure, parse_depths
from farsight.inference.decoder import Decoder
from farsight.inference.generate.completions import Completion
from farsight.inference.loading import LoadedModel
from farsight.model.build import ModelConfig, set_length
from tests.model.test_model import SMALL, fresh_model

BYTES = dataclasses.replace(SMALL, vocab_size=320)
TOKENIZER = BytesTokenizer()
PASSKEY = parse_task("passkey")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Model directories "dense", trained at 400 tokens, and "scopes", trained at 200."""
    path = tmp_path_factory.mktemp("needle")
    load_tokenizer(Tokenizer(kind="bytes")).save(path / "tokenizer")
    for name, position, length in (("dense", Position(), 400), ("scopes", Position(heads=Scope()), 200)):
        config = ModelConfig(BYTES, position, trained_length=length)
        write_model_dir(path / name, config, fresh_model(config).state_dict(), tokenizer_dir=path / "tokenizer")
    return path


def loaded(config: ModelConfig, tmp_path, chunk: int = 64) -> LoadedModel:
    return LoadedModel(tmp_path, Decoder(fresh_model(config), config, chunk=chunk), TOKENIZER, config.trained_length)


def answering(monkeypatch, answer) -> list[str]:
    """Replaces the model with `answer`; returns a list that collects the prompts."""
    prompts: list[str] = []

    def generate(decoder, tokenizer, batch, new_tokens, **options):
        texts = [tokenizer.decode(prompt) for prompt in batch]
        prompts.extend(texts)
        return [Completion((), answer(text), "length") for text in texts]

    monkeypatch.setattr("farsight.evals.needle.measure.generate", generate)
    return prompts


def the_passkey(prompt: str) -> str:
    return re.findall("[0-9]{5}", prompt)[0]


def accuracies(figures, key: str = "cells") -> dict:
    return {(cell["length"], cell["depth"]): cell["accuracy"] for cell in figures[key]}


def test_scores():
    assert [first_number(text, ("12345",)) for text in (" 12345.", "is: 12345", " 123456", " 1234", "no")] == [
        1, 1, 0, 0, 0,
    ]  # fmt: skip
    assert first_number(" 54321 12345", ("12345",)) == 0
    assert share_found(" abcde, XYZ", ("ABCDE", "xyz", "q", "r")) == 0.5
    numbers = ("11111", "22222", "33333", "44444")
    assert MultiPasskey().score(" 44444, 33333, 22222 and 11111", numbers) == 1
    assert MultiPasskey().score(" 44444, 33333, 22222", numbers) == 0


def test_depths():
    assert parse_depths(["5"]) == (0, 0.25, 0.5, 0.75, 1)
    assert parse_depths(["1"]) == (0.5,)
    assert parse_depths(["0.7", "0"]) == (0, 0.7)
    for values, says in [(["0"], "1 or more"), (["1.5"], "its end"), (["a", "b"], "--depths a")]:
        with pytest.raises(ConfigError, match=says):
            parse_depths(values)


def test_help_names_every_task():
    assert list(TASKS) == list(TASK_NAMES)


@pytest.mark.parametrize("task", TASKS)
def test_each_task_gives_prompts_that_the_right_answers_solve(task):
    length, depth = 2400, 0.3
    parsed = parse_task(task)
    sample = parsed.sample(Haystack(5), TOKENIZER, length, depth if parsed.by_depth else None)
    assert length - 60 < count_tokens(sample, TOKENIZER) <= length
    assert parsed.score(f" {', '.join(sample.answers)}.", sample.answers) == 1
    assert parsed.score(" none of them", sample.answers) == 0
    if parsed.by_depth:
        place = sample.prompt.index(f"is {sample.answers[0]}.") / len(sample.prompt)
        assert place == pytest.approx(depth, abs=0.05)


def test_settings_of_tasks():
    assert parse_task("variable_tracking:chains=2,hops=6") == TASKS["variable_tracking"](chains=2, hops=6)
    for text, says in [
        ("paskey", "'passkey'"),
        ("multikey:kees=3", "'keys'"),
        ("multikey:keys=0", "1 or more"),
        ("multikey:keys=a", "NAME=NUMBER"),
        ("passkey:keys=2", "no option"),
    ]:
        with pytest.raises(ConfigError, match=says):
            parse_task(text)


@torch.no_grad()
def greedy(model, prompt: list[int], new_tokens: int) -> str:
    """Without a cache: reads the whole row again for each token."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1, : TOKENIZER.vocab_size].argmax()))
    return TOKENIZER.decode(tokens[len(prompt) :])


@pytest.mark.parametrize(
    "position",
    [Position(), Position(heads=Scope()), Position(rotary=DynamicNtkRope(factor=4.0, original_length=128))],
    ids=["dense", "scopes", "dynamic NTK"],
)
def test_answers_equal_a_loop_over_the_models_forward(position, tmp_path):
    """Prompts and answers of unequal length, in batches."""
    config = ModelConfig(BYTES, position, trained_length=128)
    own = loaded(config, tmp_path)
    text = "The sun is up. A long and winding road leads home. " * 4
    answers = ("12345", "7", "54321", "8", "9")
    samples = [Sample(text[: 150 + 9 * n], (answer,), ()) for n, answer in enumerate(answers)]
    found = complete(own.decoder, TOKENIZER, samples, rows_at_once=2)
    for sample, text in zip(samples, found, strict=True):
        prompt, budget = [TOKENIZER.bos_id, *sample.prompt.encode()], len(sample.answers[0]) + 2
        set_length(own.decoder.model, config, len(prompt) + budget)
        assert text == greedy(own.decoder.model, prompt, budget)
    assert len(set(found)) > 2


def test_answers_end_with_any_of_the_model_s_end_tokens(folder, tmp_path):
    command = ["--lengths", "300", "--depths", "1", "--trials", "1", "--new-tokens", "20", "--device", "cpu"]
    main([str(folder / "dense"), *command, "--json", str(tmp_path / "f.json")])
    (wrong,) = json.loads((tmp_path / "f.json").read_text())["wrong"]
    middle = next(n for n, letter in enumerate(wrong["found"]) if n and ord(letter) < 128)
    end, before = wrong["found"][middle], wrong["found"][:middle]
    assert end not in before
    path = shutil.copytree(folder / "dense", tmp_path / "model")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, ord(end)]}))
    main([str(path), *command, "--json", str(tmp_path / "f.json")])
    assert json.loads((tmp_path / "f.json").read_text())["wrong"][0]["found"] == before


def test_cells_hold_the_share_of_right_answers(folder, monkeypatch, capsys):
    """A model that ignores the second half of a prompt, and one that is wrong on every third passkey."""
    answering(monkeypatch, lambda p: f" {the_passkey(p[: len(p) // 2] + ' 00000')}.")
    command = [
        str(folder / "dense"),
        "--device",
        "cpu",
        "--lengths",
        "800",
        "400",
        "--trials",
        "4",
        "--depths",
        "0",
        "0.3",
        "1",
    ]
    main([*command, "--json", str(folder / "f.json"), "--picture", str(folder / "p.png")])
    figures = json.loads((folder / "f.json").read_text())
    assert accuracies(figures) == {(n, d): float(d < 0.5) for n in (400, 800) for d in (0, 0.3, 1)}
    assert all(cell["trials"] == 4 for cell in figures["cells"])
    assert figures["mean"] == pytest.approx(2 / 3)
    assert figures["trained_length"] == 400
    assert [(w["depth"], w["found"]) for w in figures["wrong"]] == 8 * [(1, " 00000.")]
    assert (folder / "p.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert re.search(r"30.0 +100.0 +100.0\n +100.0 +0.0 +0.0\n", printed)

    prompts = answering(monkeypatch, lambda p: the_passkey(p) if int(the_passkey(p)) % 3 else "none")
    main([*command, "--json", str(folder / "f.json")])
    figures = json.loads((folder / "f.json").read_text())
    right = [int(the_passkey(prompt)) % 3 > 0 for prompt in prompts]
    assert figures["mean"] == pytest.approx(sum(right) / len(right))
    assert 0 < sum(right) < len(right) == 24


def test_a_length_a_trial_and_a_model_more_change_no_prompt(folder, monkeypatch):
    prompts = answering(monkeypatch, the_passkey)
    command = ["--device", "cpu", "--depths", "2", "--lengths"]
    main([str(folder / "dense"), *command, "400", "--trials", "2"])
    few = set(prompts)
    assert len(few) == 4
    prompts.clear()
    main([str(folder / "dense"), *command, "300", "400", "--trials", "3"])
    assert few < set(prompts)
    own = set(prompts)
    prompts.clear()
    main([str(folder / "scopes"), *command, "300", "400", "--trials", "3"])
    assert set(prompts) == own
    prompts.clear()
    main([str(folder / "dense"), *command, "400", "--trials", "2", "--seed", "1"])
    assert few.isdisjoint(prompts)


def test_scopes_past_the_trained_length_are_measured_both_ways(folder, monkeypatch):
    seen = []

    def generate(decoder, tokenizer, batch, new_tokens, **options):
        decoder.start([len(batch[0])], new_tokens)
        widest = max(max(attention.scopes) for _, attention in decoder.model.attentions())
        seen.append((round(decoder.model.length, -2), widest))
        answers = [the_passkey(tokenizer.decode(prompt)) for prompt in batch]
        return [Completion((), a if widest >= decoder.model.length else "", "length") for a in answers]

    monkeypatch.setattr("farsight.evals.needle.measure.generate", generate)
    models = [str(folder / "scopes"), str(folder / "dense")]
    options = ["--device", "cpu", "--lengths", "200", "800", "--depths", "0.5", "0.9", "--trials", "2"]
    main([*models, *options, "--json", str(folder / "f.json"), "--picture", str(folder / "p.png")])
    models = json.loads((folder / "f.json").read_text())["models"]
    scopes, dense = models.values()
    assert {at for at in seen if at[1] < 10**6} == {(200, 200), (800, 200), (800, 800)}
    assert accuracies(scopes) == {(200, 0.5): 1, (200, 0.9): 1, (800, 0.5): 0, (800, 0.9): 0}
    assert set(accuracies(scopes, "cells_scope_length").values()) == {1}
    assert (scopes["mean"], scopes["mean_scope_length"]) == (0.5, 1)
    assert scopes["wrong_scope_length"] == []
    assert dense["mean"] == 1
    assert "cells_scope_length" not in dense
    # The model stays as it was trained.
    model, config = load_model(folder / "scopes")
    own = LoadedModel(folder, Decoder(model, config), TOKENIZER, 200)
    measure(own, Grid(PASSKEY, (400,), (0.5,), 1))
    assert model.length == 200


def test_processes_share_the_questions(tmp_path, monkeypatch):
    config = ModelConfig(BYTES, Position(), trained_length=300)
    own = loaded(config, tmp_path)
    answering(monkeypatch, lambda p: the_passkey(p) if int(the_passkey(p)) % 2 else "")
    grid = Grid(PASSKEY, (200, 300), (0.0, 1.0), trials=5)
    whole = measure(own, grid)
    shares: list[list] = []

    def gather(everyone, part):
        shares.append(part)
        everyone[: len(shares)] = shares

    monkeypatch.setattr("farsight.evals.needle.measure.dist.all_gather_object", gather)
    for rank in range(7):
        figures = measure(own, grid, rank=rank, world=7)
    assert sum(map(len, shares)) == 20
    assert figures == whole


def test_tasks_without_depth_and_lengths_that_are_too_short(folder, monkeypatch, capsys):
    answering(monkeypatch, lambda p: "")
    command = [str(folder / "scopes"), "--device", "cpu", "--task", "variable_tracking", "--trials", "1"]
    main([*command, "--lengths", "900", "1200", "--json", str(folder / "f.json"), "--picture", str(folder / "p.png")])
    figures = json.loads((folder / "f.json").read_text())
    assert accuracies(figures) == {(900, None): 0, (1200, None): 0}
    assert len(figures["wrong"][0]["expected"]) == 5
    assert (folder / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit) as refused:
        main([*command, "--lengths", "100"])
    least = int(re.search(r"--lengths 100: .* take ([0-9,]+)\.", str(refused.value))[1].replace(",", ""))
    main([*command, "--lengths", str(least)])  # another seed: its answers are as long
    with pytest.raises(SystemExit, match="--lengths"):
        main([*command, "--lengths", str(least - 1)])
    capsys.readouterr()
    main([*command, "--lengths", "900", "--show"])
    prompt, _, answers = capsys.readouterr().out.strip().partition("\n\n→ ")
    assert prompt.endswith("are")
    assert all(f"VAR {name} = " in prompt for name in answers.split(", "))


def test_a_haystack_of_ones_own(folder, monkeypatch):
    (folder / "h.txt").write_text("Call me anything. Some years ago I went to sea.\n" * 3)
    prompts = answering(monkeypatch, the_passkey)
    main(
        [
            str(folder / "dense"),
            "--device",
            "cpu",
            "--lengths",
            "400",
            "--haystack",
            str(folder / "h.txt"),
            "--trials",
            "1",
        ]
    )
    assert len(prompts) == 10
    assert all("Some years ago I went to sea." in prompt for prompt in prompts)
