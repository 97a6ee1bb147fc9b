"""`farsight serve` under lm-eval's client, `local-completions`: its requests, and its reading of the answers, give the scores and
texts of `farsight harness`."""

import random
from types import SimpleNamespace

import pytest

from farsight.checkpoints.load import load_model
from farsight.data.tokenizers.tokenizer import load_tokenizer_dir
from farsight.inference.decoder import Decoder
from farsight.inference.loading import LoadedModel
from tests.evals.harness_models import make_model, ours, requests, sentence
from tests.inference.served import serving


def test_lm_evals_client_gets_the_results_of_the_harness(tmp_path):
    from lm_eval.models.openai_completions import LocalCompletionsAPI as Client

    path = make_model(tmp_path)
    model, config = load_model(path)
    loaded = LoadedModel(path, Decoder(model, config), load_tokenizer_dir(path), config.trained_length)
    harness, rng = ours(path), random.Random(0)
    plain = {"until": [], "max_gen_toks": 12, "do_sample": False}
    contexts = [sentence(rng, n) for n in (1, 7, 4)]
    answers = harness.generate_until(requests("generate_until", [(context, plain) for context in contexts]))
    asked = [(sentence(rng, n), " " + sentence(rng, m)) for n, m in ((3, 1), (8, 2), (1, 2), (2, 3))]
    asked += [(asked[0][0], choice) for choice in "ABCD"] + [(contexts[0], answers[0])]
    expected = harness.loglikelihood(requests("loglikelihood", asked), disable_tqdm=True)
    assert {greedy for _, greedy in expected} == {False, True}

    asker = SimpleNamespace(model=str(path), _max_gen_toks=256)
    pairs = [harness._encode_pair(*each) for each in asked]
    with serving(loaded) as client:
        payload = Client._create_payload(asker, [context + answer for context, answer in pairs])
        scored = client("/v1/completions", payload)
        payload = Client._create_payload(
            asker,
            [harness.tok_encode(context) for context in contexts],
            generate=True,
            gen_kwargs=dict(plain),
            eos="<|eos|>",
        )
        written = client("/v1/completions", payload)
    found = Client.parse_logprobs(scored, ctxlens=[len(context) for context, _ in pairs])
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [total for total, _ in found] == pytest.approx([total for total, _ in expected], abs=1e-4)
    assert Client.parse_generations(written) == answers
