"""`farsight serve`: answers over plain HTTP against the forward pass and `generate`, whole and as streams."""

import dataclasses

import pytest
import torch

from farsight.errors import ConfigError
from farsight.inference.generate.completions import encode_prompt, generate
from farsight.inference.sampling import Sampling
from farsight.inference.serve.run import describe
from tests.inference.served import serving, small_model

TEXTS = ["red stone", "a river of seven", "the blue under"]


@pytest.fixture(scope="module")
def loaded():
    return small_model()


@pytest.fixture(scope="module")
def client(loaded):
    with serving(loaded) as client:
        yield client


def expected(loaded, text, new_tokens=12, **sampling):
    """The text that `farsight generate` writes."""
    prompt = encode_prompt(loaded.tokenizer, text)
    settings = Sampling(**sampling)
    (completion,) = generate(loaded.decoder, loaded.tokenizer, [prompt], new_tokens, settings)
    return completion.text


def test_greedy_answers_are_those_of_the_uncached_forward(client, loaded):
    """For a text, its token ids, and several of them."""
    answers = {}
    for text in TEXTS:
        tokens = encode_prompt(loaded.tokenizer, text)
        with torch.no_grad():
            for _ in range(10):
                logits_V = loaded.decoder.model(torch.tensor([tokens]))[0, -1]
                tokens.append(int(logits_V[: loaded.tokenizer.vocab_size].argmax()))
        answers[text] = loaded.tokenizer.decode(tokens[-10:])
    assert len(set(answers.values())) == 3
    for text, answer in answers.items():
        for prompt in (text, encode_prompt(loaded.tokenizer, text)):
            found = client.complete(prompt, max_tokens=10)
            assert found["choices"][0]["text"] == answer
            assert found["choices"][0]["finish_reason"] == "length"
            read = len(text) + 1
            assert found["usage"] == {"prompt_tokens": read, "completion_tokens": 10, "total_tokens": read + 10}
    found = client.complete(list(answers), max_tokens=10)["choices"]
    assert [(choice["index"], choice["text"]) for choice in found] == list(enumerate(answers.values()))


def test_samples_are_seeded_and_stop_where_they_are_told(client, loaded):
    body = {"prompt": "red", "max_tokens": 12, "temperature": 1.5, "top_p": 0.9, "seed": 5, "n": 3}
    found = [choice["text"] for choice in client("/v1/completions", body)["choices"]]
    # Choice i draws from seed + i.
    assert found == [expected(loaded, "red", temperature=1.5, top_p=0.9, seed=5 + i) for i in range(3)]
    assert len(set(found)) == 3
    del body["seed"]
    assert client("/v1/completions", body)["choices"] != client("/v1/completions", body)["choices"]
    whole = expected(loaded, "red")
    for stop in (whole[4:6], [whole[4:6], "never written"]):
        choice = client.complete("red", max_tokens=12, stop=stop)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (whole[: whole.index(whole[4:6])], "stop")


def test_conversations_take_the_template_and_end_with_the_turn(client, loaded, monkeypatch):
    messages = [{"role": "system", "content": "be red"}, {"role": "user", "content": [{"type": "text", "text": "so"}]}]
    text = "<|bos|>system: be red<|eos|><|bos|>user: so<|eos|><|bos|>assistant: "
    (encoded,) = loaded.tokenizer.encode_rendered([text])
    (whole,) = generate(loaded.decoder, loaded.tokenizer, [encoded.ids.tolist()], 8)
    body = {"messages": messages, "temperature": 0, "max_tokens": 8}
    choice = client("/v1/chat/completions", body)["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": whole.text}
    # Without max_tokens an answer may fill the context.
    unlimited = client("/v1/chat/completions", {**body, "max_tokens": None})
    assert unlimited["usage"]["total_tokens"] == 96
    events = client.events("/v1/chat/completions", {**body, "n": 2, "stream_options": {"include_usage": True}})
    *pieces, last = events
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 16
    for number in range(2):
        own = [event["choices"][0] for event in pieces if event["choices"][0]["index"] == number]
        assert "".join(piece["delta"]["content"] for piece in own) == whole.text
        assert [piece["delta"].get("role") for piece in own] == ["assistant"] + [None] * (len(own) - 1)
        assert [piece["finish_reason"] for piece in own] == [None] * (len(own) - 1) + ["length"]
        assert len(own) > 3

    eos = whole.tokens[3]
    monkeypatch.setattr(loaded.tokenizer, "eos_id", eos)
    ends = small_model()
    ends.tokenizer.special_tokens = {"<|bos|>": 256, "<|eos|>": eos}
    with serving(dataclasses.replace(ends, decoder=loaded.decoder)) as other:
        (encoded,) = ends.tokenizer.encode_rendered([text])
        found = other("/v1/chat/completions", body)
        prompt = encoded.ids.tolist()
        (plain,) = generate(loaded.decoder, ends.tokenizer, [prompt], 8, end_tokens={eos})
        assert found["choices"][0]["message"]["content"] == plain.text


def test_pieces_of_a_stream_join_to_the_answer(client, loaded):
    for fields in ({}, {"stop": expected(loaded, "red")[5:7]}, {"echo": True}):
        body = {"prompt": ["red", "x"], "temperature": 0, "max_tokens": 12, **fields}
        whole = client("/v1/completions", body)
        events = client.events("/v1/completions", body)
        for number in range(2):
            own = [event["choices"][0] for event in events if event["choices"][0]["index"] == number]
            assert "".join(piece["text"] for piece in own) == whole["choices"][number]["text"]
            assert own[-1]["finish_reason"] == whole["choices"][number]["finish_reason"]
        assert {event["id"] for event in events} == {events[0]["id"]}


def test_a_stream_never_cuts_a_character(loaded):
    """The model is made to write é, ü … byte by byte."""
    written = "héllo wörld — 漢字 "
    forced = list(written.encode())
    other = small_model()
    other.tokenizer.eos_id = None

    def head(h_BLD, labels=None):
        place = head.calls % len(forced)
        head.calls += 1
        return torch.nn.functional.one_hot(torch.tensor([[forced[place]]]), 320).float()

    head.calls = 0
    other.decoder.model.head = head
    with serving(other) as client:
        events = client.events("/v1/completions", {"prompt": "x", "temperature": 0, "max_tokens": len(forced)})
    pieces = [event["choices"][0]["text"] for event in events]
    assert "".join(pieces) == written
    assert "漢" in pieces


def test_log_probabilities_are_those_of_the_forward_pass(client, loaded):
    tokens = encode_prompt(loaded.tokenizer, "red stone, and longer than a chunk")
    answers = [
        client.complete([tokens, tokens[:9]], max_tokens=4, logprobs=2, echo=True),
        client.complete([tokens, tokens[:9]], max_tokens=4, logprobs=2),
    ]
    for number, prompt in enumerate((tokens, tokens[:9])):
        choices = [answer["choices"][number] for answer in answers]
        written = list(choices[1]["text"].encode())
        everything = [*prompt, *written]
        with torch.no_grad():
            logp_LV = loaded.decoder.model(torch.tensor([everything]))[0].log_softmax(-1)
        exact = logp_LV[:-1].gather(-1, torch.tensor(everything[1:])[:, None])[:, 0].tolist()
        found = choices[0]["logprobs"]
        assert found["tokens"] == ["<|bos|>", *map(chr, everything[1:])]
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        assert found["token_logprobs"][1:] == pytest.approx(exact, abs=1e-4)
        assert choices[1]["logprobs"]["token_logprobs"] == pytest.approx(exact[-4:], abs=1e-4)
        text = choices[0]["text"]
        assert text == loaded.tokenizer.decode(prompt) + choices[1]["text"]
        for offset, token in list(zip(found["text_offset"], found["tokens"], strict=True))[1:]:
            assert text[offset : offset + len(token)] == token
        for top, logp_V, own in zip(found["top_logprobs"][1:], logp_LV[:-1], found["token_logprobs"][1:], strict=True):
            assert max(top.values()) == pytest.approx(float(logp_V.max()), abs=1e-4)
            assert own in top.values()
    chat = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 3}
    logs = client("/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 2})["choices"][0]["logprobs"]
    for log in logs["content"]:
        assert log["logprob"] == log["top_logprobs"][0]["logprob"] > log["top_logprobs"][1]["logprob"]
        assert bytes(log["bytes"]).decode() == log["token"]
    nothing = client.complete(tokens, max_tokens=0, logprobs=1, echo=True)["choices"][0]
    assert len(nothing["logprobs"]["tokens"]) == len(tokens)
    assert nothing["text"] == loaded.tokenizer.decode(tokens)


@pytest.mark.parametrize("extend", ["ripra:chunk=4", "yarn:4"])
def test_extensions_answer_as_generate_does(extend):
    text = "a long text that goes past the window of the model, " * 2
    plain, extended = small_model(trained=48), small_model(extend, trained=48)
    answer = expected(extended, text)
    assert answer != expected(plain, text)
    with serving(extended, max_length=160) as client:
        assert client.complete(text, max_tokens=12)["choices"][0]["text"] == answer


def test_templates_come_from_a_file_too(tmp_path, loaded):
    path = tmp_path / "template.jinja"
    path.write_text("{% for m in messages %}{{ m['content'] }}<|eos|>{% endfor %}")
    served = describe(loaded, "other", 50, 4, path)
    assert (served.name, served.max_length, served.turn_end) == ("other", 50, loaded.tokenizer.eos_id)
    with pytest.raises(ConfigError, match=r"missing\.jinja: it can't be read"):
        describe(loaded, None, None, 4, tmp_path / "missing.jinja")
    path.write_text("{{ raise_exception('no') }}")
    with pytest.raises(ConfigError, match=r"takes no question with its answer .* set another --chat-template"):
        describe(loaded, None, None, 4, path)
