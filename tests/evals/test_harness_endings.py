"""Ends of answers in lm-evaluation-harness, of a model with three end tokens, against lm-eval's own `HFLM`."""

import csv
import dataclasses
import json
import random
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Fast

from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.configs.schema import Position
from farsight.errors import ConfigError
from farsight.evals import loft
from farsight.inference.generate import __main__ as generate_command
from farsight.inference.generate.completions import generate
from farsight.model.build import ModelConfig, build_model
from tests.evals.harness_models import make_model, ours, requests, sentence
from tests.model.test_model import SMALL

BOS, ENDS, HEADER = "<|bos|>", ("<|end|>", "<|turn_end|>", "<|call_end|>"), "<|header|>"
SPECIAL = [BOS, *ENDS, HEADER]
TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{ raise_exception('there is no system here') }}{% endif %}
    {{- '<|header|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.last %}{{- '(thinks)\\n' }}{% endif %}
    {{- message.content | trim + '<|turn_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant\\n(thinks longer)\\n' }}{% endif %}
"""
"""Writes other words before an answer that is there than before one that it asks for."""
NEW = 16


def write_tokenizer(folder: Path, spaces: bool) -> Fast:
    """Bytes as tokens; with `spaces`, letters and a token for the space, which is left out where a text begins, as in Llama 2."""
    if spaces:
        pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(97, 123))]
        vocabulary = {piece: i for i, piece in enumerate(pieces)}
        fast = Fast(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
        fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        fast.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        fast = Fast(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    fast.post_processor = processors.TemplateProcessing(f"{BOS} $A", f"{BOS} $A $B", [(BOS, fast.token_to_id(BOS))])
    folder.mkdir()
    fast.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": ENDS[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "chat_template": TEMPLATE}))
    return fast


@pytest.fixture(scope="module", params=[False, True], ids=["bytes", "spaces"])
def path(request, tmp_path_factory) -> Path:
    """A model whose texts end at different places, at each of its end tokens."""
    folder = tmp_path_factory.mktemp("ends")
    fast = write_tokenizer(folder / "tokenizer", request.param)
    ends = [fast.token_to_id(token) for token in ENDS]
    (folder / "tokenizer" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    config = ModelConfig(dataclasses.replace(SMALL, vocab_size=320), Position(), trained_length=96)
    model = build_model(config)
    model.init_weights()
    generator = torch.Generator().manual_seed(4)
    likely = [fast.token_to_id(token) for token in ("▁" if request.param else "Ġ", *map(chr, range(97, 123)))]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15, generator=generator)
        head = torch.zeros_like(model.output.weight)
        head[likely] = 0.2 * torch.randn(len(likely), SMALL.dim, generator=generator)
        head[likely[0]] *= 1.5
        head[ends] = 0.3 * torch.randn(len(ends), SMALL.dim, generator=generator)
        model.output.weight.copy_(head)
    write_model_dir(folder / "model", config, model.state_dict(), tokenizer_dir=folder / "tokenizer")
    return folder / "model"


@pytest.fixture(scope="module")
def twin(path):
    """`HFLM` of the directory, by batch size."""
    from lm_eval.models.huggingface import HFLM

    return cache(lambda rows: HFLM(str(path), device="cpu", dtype="float32", batch_size=rows))


def contexts(count: int = 50) -> list[str]:
    rng = random.Random(5)
    return [sentence(rng, rng.randint(1, 11)) for _ in range(count)]


def answers(model, texts: list[str], until=()) -> list[str]:
    settings = {"until": list(until), "max_gen_toks": NEW, "do_sample": False}
    asked = [(text, {**settings, "until": list(until)}) for text in texts]
    return model.generate_until(requests("generate_until", asked), disable_tqdm=True)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4])
def test_answers_end_as_in_transformers(path, twin, rows):
    """Fifty answers, and half of them again with stop strings; one of these is an end token's text, where no decoded text has it."""
    model = ours(path, rows_at_once=rows)
    whole = answers(model, contexts())
    assert whole == answers(twin(rows), contexts())
    for until in ([" "], [max(whole, key=len)[1:3], "e", ENDS[0]]):
        found = answers(model, contexts(25), until)
        assert found == answers(twin(rows), contexts(25), until)
        assert 0 < sum(cut != text for cut, text in zip(found, whole, strict=False)) < 25
    # Texts do end at each of the three tokens and at many places, some at the last place alone.
    prompts = [model.tok_encode(context) for context in contexts()]
    model = model.model
    completions = generate(model.decoder, model.tokenizer, prompts, NEW, end_tokens=model.end_tokens)
    last = Counter(model.tokenizer.vocabulary[completion.tokens[-1]] for completion in completions)
    assert min(last[end] for end in ENDS) > 2
    assert len({len(completion.tokens) for completion in completions}) > 8
    assert any(completion.ended == "length" for completion in completions)


@pytest.mark.parametrize("path", [False], ids=["bytes"], indirect=True)
def test_other_commands_end_texts_at_the_same_places(path, twin, tmp_path, capsys):
    """`farsight generate`, prompts together and one alone, and `farsight loft`."""
    texts, expected = contexts(), answers(twin(4), contexts())
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    some = [str(path), "--device", "cpu"]
    command = [*some, "--new-tokens", str(NEW), "--rows", "4", "--json", str(tmp_path / "f.json")]
    generate_command.main([*command, "--prompts", str(tmp_path / "p.jsonl")])
    assert [row["text"] for row in json.loads((tmp_path / "f.json").read_text())["completions"]] == expected
    number = next(i for i, text in enumerate(expected) if 2 < len(text) < NEW)
    capsys.readouterr()
    generate_command.main([*command, "--prompt", texts[number]])
    assert capsys.readouterr().out == expected[number] + "\n"
    with (tmp_path / "p.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("prompt_id", "prompt"), *enumerate(texts)])
    command = [*some, "--prompts", str(tmp_path / "p.csv"), "--max-new-tokens", str(NEW), "--batch-size", "4"]
    loft.main([*command, "--out", str(tmp_path / "out.jsonl")])
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["metadata"]["text"] for line in lines] == expected


def test_settings_that_change_greedy_answers_are_named(path, caplog):
    generation = path / "generation_config.json"
    before = generation.read_text()
    generation.write_text(json.dumps({"repetition_penalty": 1.05, "num_beams": 1, "temperature": 0.6}))
    try:
        ours(path)
    finally:
        generation.write_text(before)
    assert "generation_config.json: repetition_penalty = 1.05 changes answers of transformers" in caplog.text
    assert "num_beams" not in caplog.text


def test_a_stop_string_may_be_a_special_token(path, twin):
    """Some tasks list the ends of several families' turns. In a larger batch `HFLM` reads on until every row has ended."""
    generation = path / "generation_config.json"
    before = generation.read_text()
    generation.write_text("{}")
    try:
        found = answers(ours(path, rows_at_once=4), contexts(20), ENDS)
        assert found != answers(ours(path, rows_at_once=4), contexts(20))
    finally:
        generation.write_text(before)
    assert found == answers(twin(1), contexts(20))


def test_a_chat_is_read_and_ends_as_in_transformers(path, twin):
    """Prompts, an answer to be continued, greedy answers and log-likelihoods; the template refuses the system's messages."""
    model, theirs = ours(path, chat=True, rows_at_once=4), twin(4)
    histories = [[{"role": "user", "content": text}] for text in contexts()]
    histories[1].insert(0, {"role": "system", "content": "Be short."})
    started = [[*history, {"role": "assistant", "content": " so "}] for history in histories]
    prompts = []
    for lm in (model, theirs):
        prompts.append([lm.apply_chat_template(history) for history in histories])
        prompts[-1] += [lm.apply_chat_template(history, add_generation_prompt=False) for history in started]
    assert prompts[0] == prompts[1]
    assert prompts[0][-1].endswith("(thinks)\nso")
    assert answers(model, prompts[0]) == answers(theirs, prompts[0])
    asked = requests("loglikelihood", [(prompt, choice) for prompt in prompts[0][40:60] for choice in ("yes", " no")])
    mine, other = (lm.loglikelihood(asked, disable_tqdm=True) for lm in (model, theirs))
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in other]
    assert [total for total, _ in mine] == pytest.approx([total for total, _ in other], abs=1e-4)


def test_messages_that_a_template_refuses(tmp_path):
    refuses = "{% if messages|length > 2 %}{{ raise_exception('too many') }}{% endif %}"
    model = ours(make_model(tmp_path, template=refuses + "{{ messages[-1].content }}"), chat=True)
    with pytest.raises(ConfigError, match=r"does not take a task's messages: refused by the chat template: .*too many"):
        model.apply_chat_template([{"role": "user", "content": "x"}] * 3)
    with pytest.raises(ConfigError, match=r"--chat: .* takes no question with its answer .*leave --chat out"):
        ours(make_model(tmp_path / "other", template="{{ raise_exception('no') }}"), chat=True)


def test_a_chat_s_answers_end_with_its_turns(path):
    """The template's end of turn, found by rendering, counts although generation_config.json does not list it."""
    everything, generation = ours(path, chat=True), path / "generation_config.json"
    before = generation.read_text()
    ends = json.loads(before)["eos_token_id"]
    generation.write_text(json.dumps({"eos_token_id": [ends[0], ends[2]]}))
    try:
        assert ours(path).end_tokens == {ends[0], ends[2]}
        model = ours(path, chat=True)
        assert model.end_tokens == set(ends)
        assert answers(model, contexts(20)) == answers(everything, contexts(20))
    finally:
        generation.write_text(before)
