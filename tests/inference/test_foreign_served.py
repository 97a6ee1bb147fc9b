"""Models that only transformers builds behind the `transformers` object and the endpoint, with and without RiPRA."""

from argparse import Namespace

import pytest
import torch
from torch.testing import assert_close

from farsight.inference.generate.completions import encode_prompt, generate
from farsight.inference.hf_model import load as load_object
from farsight.inference.loading import load
from farsight.inference.serve.__main__ import main as serve_main
from tests.foreign import LENGTH, VOCABULARY, write
from tests.inference.served import serving

RIPRA = "ripra:limit=16,near=6,chunk=4"
OPTIONS = {"device": "cpu", "dtype": None, "scope_max": None, "chunk": 7, "trust_remote_code": False}
TOKENS = torch.tensor([[0] * 6 + [*range(40, 60)], [*range(70, 96)]])
MASK = torch.tensor([[0] * 6 + [1] * 20, [1] * 26])


@pytest.mark.parametrize("kind", ["mpt", "phi", "deepseek_v3"])
def test_the_object_equals_transformers(tmp_path, kind):
    """Logits of padded rows, greedy tokens, and logits after a cast to 16 bits, which rounds no frequencies."""
    theirs = write(tmp_path, kind)
    ours, kept = load_object(tmp_path), MASK.bool()
    with torch.no_grad():
        expected = [theirs(row[mask][None], use_cache=False).logits[0] for row, mask in zip(TOKENS, kept, strict=True)]
    assert_close(ours(TOKENS, attention_mask=MASK).logits[kept], torch.cat(expected), atol=5e-5, rtol=0)
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = ours.generate(input_ids=TOKENS, attention_mask=MASK, **settings)
    for row, mask, written in zip(TOKENS, kept, found, strict=True):
        alone = theirs.generate(row[mask][None], suppress_tokens=[*range(258, VOCABULARY)], **settings)
        assert written[TOKENS.shape[1] :].tolist() == alone[0, int(mask.sum()) :].tolist()
    half = load_object(tmp_path, dtype=torch.float16)
    assert_close(load_object(tmp_path).half()(TOKENS).logits, half(TOKENS).logits, atol=0, rtol=0)


@pytest.mark.parametrize("kind", ["mpt", "phi"])
def test_extended_answers_are_those_of_generate(tmp_path, kind):
    """From the object, and from the endpoint several at a time."""
    write(tmp_path, kind)
    plain, extended = (load(tmp_path, Namespace(**OPTIONS, extend=extend)) for extend in (None, RIPRA))
    texts = ["a river of seven red stones " * 2, "the blue under " * 4]
    prompts = [encode_prompt(extended.tokenizer, text) for text in texts]
    tokens_of = {}
    for name, loaded in (("plain", plain), ("extended", extended)):
        completions = generate(loaded.decoder, loaded.tokenizer, prompts, 8, end_tokens=())
        tokens_of[name] = [list(completion.tokens) for completion in completions]
    assert tokens_of["plain"] != tokens_of["extended"]

    model = load_object(tmp_path, extend=RIPRA)
    for prompt, expected in zip(prompts, tokens_of["extended"], strict=True):
        settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        assert model.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist() == expected
    with serving(extended, max_length=2 * LENGTH) as client:
        answers = client.complete(texts, max_tokens=8, logprobs=0)["choices"]
    written = generate(extended.decoder, extended.tokenizer, prompts, 8, end_tokens=extended.end_tokens)
    assert [answer["text"] for answer in answers] == [completion.text for completion in written]


def test_serve_takes_their_options(capsys):
    with pytest.raises(SystemExit):
        serve_main(["--help"])
    printed = capsys.readouterr().out
    assert "--quantization" in printed
    assert "--trust-remote-code" in printed
