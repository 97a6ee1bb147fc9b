"""Scores and answers of our models in lm-evaluation-harness, against lm-eval's own `HFLM` on the exported directory."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from farsight.checkpoints.load import load_model
from farsight.configs.schema import NoRotary, Position, Scope, Tokenizer
from farsight.data.instructions.chat import LLAMA_3
from farsight.data.tokenizers.tokenizer import load_tokenizer
from farsight.errors import ConfigError
from tests.evals.harness_models import make_model, ours, requests, sentence


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def twin(dense):
    from lm_eval.models.huggingface import HFLM

    return HFLM(str(dense), device="cpu", dtype="float32", batch_size=2)


def test_log_likelihoods_equal_those_of_transformers(dense, twin):
    """Contexts of unequal length, empty, ending in a space, longer than the model's limit; answers of one token and of several."""
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
    """A generation_config.json may list several, as for Llama 3's chat models. An end token that is not special is a part of the
    answer, since only special tokens are left out."""
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
    assert found == theirs
    assert found == ["".join(text.partition(end)[:2]) for text in whole]
    # Without that file transformers takes what config.json lists.
    (path / "generation_config.json").unlink()
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, "eos_token_id": [257, ord(end)]}))
    assert ours(path).generate_until(asked) == found


def test_a_chat_s_answers_end_with_its_turns(tmp_path):
    """The template's end of turn is one token if the tokenizer has it."""
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
