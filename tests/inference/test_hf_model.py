"""The decoder behind the interface of `transformers`: against transformers' own models, and `generate` with extensions."""

import json

import pytest
import torch
import transformers

from farsight.configs.schema import Scope
from farsight.errors import ConfigError, UserError
from farsight.inference.generate.completions import generate
from farsight.inference.hf_model import load
from tests.inference.served import small_model, write

TOKENS = torch.tensor(
    [[257, 257, 257, 256, 40, 41, 90, 7], [256, 99, 12, 44, 45, 101, 3, 58], [257, 256, 8, 8, 9, 77, 1, 2]]
)
MASK = (TOKENS != 257).long()


@pytest.fixture(scope="module", params=[{}, {"heads": Scope()}], ids=["llama", "scope"])
def folder(request, tmp_path_factory):
    return write(small_model(**request.param), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ours(folder):
    return load(folder)


@pytest.fixture(scope="module")
def theirs(folder):
    code = "auto_map" in json.loads((folder / "config.json").read_text())
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=code, dtype=torch.float32).eval()


def test_logits_and_loss_equal_those_of_transformers(ours, theirs):
    """With padding on the left, on the right, and none."""
    for tokens, mask in ((TOKENS, MASK), (TOKENS.flip(1), MASK.flip(1)), (TOKENS, None)):
        kept = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
        with torch.no_grad():
            exact = theirs(tokens, attention_mask=mask).logits
        found = ours(tokens, attention_mask=mask).logits
        torch.testing.assert_close(found[kept], exact[kept], rtol=1e-4, atol=1e-4)
        last = ours(tokens, attention_mask=mask, logits_to_keep=2).logits
        torch.testing.assert_close(last, found[:, -2:])
        labels = tokens.masked_fill(~kept, -100)
        predicted = kept[:, 1:] & kept[:, :-1]
        logp = exact[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        output = ours(tokens, attention_mask=mask, labels=labels)
        assert float(output.loss) == pytest.approx(-float(logp[predicted].mean()), abs=1e-5)
        loss, logits = ours(tokens, attention_mask=mask, labels=labels, return_dict=False)
        assert loss == output.loss
        torch.testing.assert_close(logits, found)


def _criteria(count):
    class Enough(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            return torch.full((len(input_ids),), input_ids.shape[1] >= TOKENS.shape[1] + count)

    return transformers.StoppingCriteriaList([Enough()])


SETTINGS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "ends": {"eos_token_id": [26, 58, 5, 90]},
    "processors": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "criteria": {"stopping_criteria": _criteria(4)},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_generate_is_that_of_transformers(ours, theirs, name):
    written = []
    for model in (ours, theirs):
        torch.manual_seed(0)
        written.append(
            model.generate(
                input_ids=TOKENS, attention_mask=MASK, max_new_tokens=12, pad_token_id=257, **SETTINGS[name]
            ).tolist()
        )
    assert written[0] == written[1]
    assert len(written[0][0]) == TOKENS.shape[1] + (4 if name == "criteria" else 12)


def test_lengths_streamers_and_the_models_own_end_tokens(ours, folder, tmp_path, capsys):
    one = TOKENS[1:2]
    long = ours.generate(one, max_new_tokens=30)
    assert long.shape == (1, 38)
    assert ours.generate(one, max_length=20).tolist() == long[:, :20].tolist()
    assert ours.generate(one, generation_config=transformers.GenerationConfig(max_length=15)).shape == (1, 15)
    assert ours.generate(one).shape == (1, 28)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ours.generate(one, max_new_tokens=12, streamer=transformers.TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out == tokenizer.decode(long[0, 8:20]) + "\n"
    fields = ours.generate(one, max_new_tokens=3, return_dict_in_generate=True, output_scores=True)
    assert [int(scores.argmax()) for scores in fields.scores] == long[0, 8:11].tolist()

    ending = tmp_path / "ending"
    ending.mkdir()
    for path in folder.iterdir():
        (ending / path.name).write_bytes(path.read_bytes())
    settings = {"eos_token_id": [5, int(long[0, 12])], "max_new_tokens": 9, "do_sample": False}
    (ending / "generation_config.json").write_text(json.dumps(settings))
    first = long[0, 8:].tolist().index(int(long[0, 12]))
    assert load(ending).generate(one).tolist() == long[:, : 8 + first + 1].tolist()


@pytest.mark.parametrize("extend", ["ripra:chunk=4", "self_extend:group=4,window=8", "adagrope", "gali", "yarn:4"])
def test_extensions_write_what_farsight_generate_writes(extend, tmp_path):
    folder = write(small_model(trained=32), tmp_path)
    extended, model = small_model(extend, trained=32), load(str(folder), extend=extend)
    prompts = [list(range(30, 30 + n)) for n in (50, 70)]
    tokens = torch.tensor([[0] * 20 + prompts[0], prompts[1]])
    mask = torch.tensor([[0] * 20 + [1] * 50, [1] * 70])
    found = model.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=8)[:, 70:].tolist()
    expected = generate(extended.decoder, extended.tokenizer, prompts, 8, end_tokens=())
    assert found == [list(completion.tokens) for completion in expected]
    plain = generate(small_model(trained=32).decoder, extended.tokenizer, prompts, 8, end_tokens=())
    assert expected != plain


def test_casting_leaves_frequencies_alone(ours, folder):
    """In half precision and back, weights have rounded, and frequencies have not."""
    half = load(folder, dtype=torch.float16)
    assert half.dtype == torch.float16
    cast = load(folder).half()
    assert {p.dtype for p in cast.parameters()} == {torch.float16}
    assert torch.equal(cast.inner.rope_frequencies, ours.inner.rope_frequencies)
    assert torch.equal(cast(TOKENS).logits, half(TOKENS).logits)
    assert cast.to("cpu").device.type == "cpu"
    with pytest.raises(UserError, match=r"dtype = int8: write one of float32, bfloat16, float16"):
        load(folder, dtype="int8")
    with pytest.raises(ConfigError, match="there is no method 'rippra'"):
        load(folder, extend="rippra")


REFUSED = {
    "beams": ({"num_beams": 2}, "beam search is not supported; set num_beams=1"),
    "assisted": ({"prompt_lookup_num_tokens": 3}, "assisted generation is not supported"),
    "short": ({"max_length": 8}, "max_length = 8 leaves nothing after 8 tokens; set max_new_tokens"),
    "padded": ({"attention_mask": MASK.flip(1)}, "a row is padded on the right; set padding_side = 'left'"),
    "hole": ({"attention_mask": torch.tensor([[1, 0] + [1] * 6] * 3)}, "attention_mask: row 0 must be one sequence"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_decoder_cannot_do_is_refused(ours, name):
    options, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        ours.generate(TOKENS, **options)
    assert ours.generate(TOKENS[:1], max_new_tokens=1).shape == (1, 9)


@pytest.mark.parametrize("name", ["use_cache", "output_attentions", "output_hidden_states", "inputs_embeds"])
def test_arguments_of_forward_that_would_be_ignored_are_refused(ours, name):
    with pytest.raises(UserError, match=f"{name} is not supported"):
        ours(TOKENS, **{name: True})
    with pytest.raises(UserError, match="save_pretrained"):
        ours.save_pretrained("somewhere")
