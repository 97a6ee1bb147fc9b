"""Ways to call exported models, under the oldest and the newest `transformers`: caches, decoding, `Trainer`, what is returned."""

import json
import runpy

import pytest
import torch

from farsight.checkpoints.load import load_model
from farsight.checkpoints.model_dir.hf_config import TRANSFORMERS
from farsight.configs.schema import Alibi, Lasp, LayerRule, Position, Scope, SlidingWindow, Tokenizer
from farsight.data.tokenizers.tokenizer import load_tokenizer
from farsight.model import attention
from farsight.model.build import set_length
from farsight.model.context import OwnKV
from tests.checkpoints.elsewhere import ROOT, VERSIONS, export, run_elsewhere
from tests.checkpoints.test_export import MIXED, POSITIONS

EACH_LAYER_ITS_OWN = Position(
    heads=Scope(),
    lasp=Lasp(anchor_layers=2),
    rules=(LayerRule(layers="1", bias=Alibi()), LayerRule(layers="2", heads=SlidingWindow(window=5))),
)
JOBS = {"called": "call", "llama": "as_llama", "answers": "answer", "trained": "train", "trained_mixed": "train"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    parent = tmp_path_factory.mktemp("called")
    load_tokenizer(Tokenizer(kind="bytes")).save(parent / "tokenizer")
    return parent, {
        "called": export(parent / "called", EACH_LAYER_ITS_OWN),
        "llama": export(parent / "llama", POSITIONS["nope"]),
        "answers": export(parent / "answers", MIXED, tokenizer_dir=parent / "tokenizer", vocab_size=260),
        "trained": export(parent / "trained", POSITIONS["scope_lasp"]),
        "trained_mixed": export(parent / "trained_mixed", MIXED),
    }


@pytest.fixture(scope="module", params=VERSIONS)
def version(request):
    return request.param


@pytest.fixture(scope="module")
def results(exported, version):
    parent, _ = exported
    return run_elsewhere({parent / name: job for name, job in JOBS.items()}, version)


def test_caches_and_inputs_do_not_change_logits(results):
    given = results["called"]
    for name in ("embedded", "static_parts", "dynamic_parts", "eager"):
        torch.testing.assert_close(given[name], given["whole"], atol=1e-4, rtol=0, msg=name)
    for name in ("kept", "kept_before_4_50"):
        torch.testing.assert_close(given[name], given["whole"][:, -3:], atol=1e-5, rtol=0, msg=name)
    torch.testing.assert_close(given["picked"], given["whole"][:, [5, 11]], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("greedy_static", "greedy"),
        ("padded_static", "padded"),
        ("beams", "beams_uncached"),
        ("beams_static", "beams_uncached"),
        ("looked_up", "single"),
        ("assisted", "single"),
    ],
)
def test_every_way_to_decode_writes_the_same(results, one, other):
    assert torch.equal(results["called"][one], results["called"][other])


def test_embeddings_continue_as_their_tokens_do(results):
    given = results["called"]
    assert torch.equal(given["from_embeddings"], given["greedy"][:, 20:])
    assert torch.equal(given["single"], given["greedy"][:1])
    assert not torch.equal(given["beams"], given["greedy"])


def test_checkpointing_leaves_every_gradient_as_it_is(results):
    given = results["called"]
    grads = {name.removeprefix("plain_grad."): grad for name, grad in given.items() if name.startswith("plain_grad.")}
    assert len(grads) == 4 * 9 + 3
    for name, grad in grads.items():
        assert grad.abs().max() > 0, name
        torch.testing.assert_close(given[f"reentrant_grad.{name}"], grad, msg=name)
        torch.testing.assert_close(given[f"not_grad.{name}"], grad, msg=name)


def test_attention_weights_follow_from_queries_keys_and_what_heads_see(exported, results, monkeypatch):
    """The equation written out, with the rotated queries and keys of our model."""
    parent, _ = exported
    model, config = load_model(parent / "called")
    set_length(model, config, 40)
    seen = []

    class Recorded(OwnKV):
        def attend(self, q_BLNH, visibility, backend):
            seen.append((q_BLNH, self.k_BLKH))
            return super().attend(q_BLNH, visibility, backend)

    monkeypatch.setattr(attention, "OwnKV", Recorded)
    with torch.no_grad():
        model(torch.randint(96, (2, 40), generator=torch.Generator().manual_seed(1)))
    distance = torch.arange(40)[:, None] - torch.arange(40)
    for layer, position in enumerate(config.layers()):
        q_BLNH, k_BLKH = seen[layer]
        for head, scope in enumerate(position.scopes):
            scores = q_BLNH[:, :, head].double() @ k_BLKH[:, :, head // 2].double().mT / 8**0.5
            if layer == 1:
                scores -= 2.0 ** -(head + 1) * distance
            scores[:, (distance < 0) | (distance >= scope)] = -torch.inf
            given = results["called"]["weights"][layer][:, head]
            torch.testing.assert_close(given, scores.softmax(-1).float(), atol=1e-5, rtol=1e-4, msg=f"{layer}, {head}")


def test_hidden_states_and_attentions_are_llama_s(results):
    """The same weights in `transformers`' Llama and in our modelling file with dense heads and one RoPE."""
    given = results["llama"]
    assert given["ours_states"].shape == (4, 2, 20, 64)  # after the embedding and after each layer
    assert given["ours_weights"].shape == (3, 2, 8, 20, 20)
    for name in (
        "states",
        "weights",
        "inner_states",
        "inner_weights",
        "padded_weights",
        "step_weights",
        "step_states",
        "tuple",
    ):
        assert given[f"ours_{name}"].shape == given[f"llama_{name}"].shape, name
        torch.testing.assert_close(given[f"ours_{name}"], given[f"llama_{name}"], atol=1e-5, rtol=1e-4, msg=name)
    torch.testing.assert_close(given["by_config"], given["ours_states"], atol=1e-5, rtol=1e-4)


def test_harnesses_find_what_they_expect_of_generate(exported, results):
    """Left-padded batches, a pre-filled cache, stop tokens from the model's own settings, flash attention by name, bf16, a
    device map."""
    parent, configs = exported
    result = results["answers"]
    assert result["stops"].tolist() == [257]
    text = b"the river runs under seven stones"
    assert result["ids"][0].tolist() == [256, *text[-23:]]

    model, config = load_model(parent / "answers")[0], configs["answers"]

    def greedy(ids: list[int]) -> list[int]:
        written: list[int] = []
        while len(written) < 12 and 257 not in written:
            set_length(model, config, len(ids) + len(written))
            with torch.no_grad():
                written.append(int(model(torch.tensor([ids + written]))[0, -1].argmax()))
        return written

    assert result["prefilled"][0].tolist() == greedy(result["ids"][0].tolist())
    assert result["short"][0].tolist() == [256, *b"a stone"]
    short = greedy([256, *b"a stone"])
    assert result["padded"][1].tolist()[: len(short)] == short
    assert result["padded"][0].tolist() == greedy([256, *text])
    error = (result["bf16_logits"] - result["logits"]).abs().max()
    assert error < 0.05 * result["logits"].abs().max()
    assert result["bf16_answer"].shape[1] > result["ids"].shape[1]


@pytest.mark.parametrize("name", ["trained", "trained_mixed"])
def test_a_plain_trainer_takes_the_steps_that_the_equations_give(exported, results, version, name):
    parent, _ = exported
    model, config = load_model(parent / name)
    set_length(model, config, 40)
    for step in range(2):
        rows, labels = (results[name][key][4 * step : 4 * step + 4] for key in ("rows", "labels"))
        log_p = model(rows)[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:, None].clamp(0))[..., 0]
        counts = labels[:, 1:] != -100
        loss = -log_p[counts].sum() / counts.sum()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter -= 0.1 * grad
    trained = load_model(parent / f"{name}-trained-{version}")[0]
    start = load_model(parent / name)[0]
    for key, value in trained.state_dict().items():
        moved = value - start.state_dict()[key]
        expected = model.state_dict()[key] - start.state_dict()[key]
        torch.testing.assert_close(moved, expected, atol=2e-6, rtol=1e-3, msg=lambda text, key=key: f"{key}: {text}")


def test_card_and_config_name_the_versions_that_the_tests_run(exported):
    oldest, newest = TRANSFORMERS
    parent, _ = exported
    assert json.loads((parent / "called" / "config.json").read_text())["transformers_version"] == oldest
    card = (parent / "called" / "README.md").read_text()
    assert f"tested with transformers {oldest} and {newest}" in card
    assert f"transformers=={newest}\n" in (ROOT / "constraints.txt").read_text()
    assert f"TRANSFORMERS := {oldest}\n" in (ROOT / "Makefile").read_text()


def test_an_older_transformers_is_told_which_one_it_takes(exported, monkeypatch):
    parent, _ = exported
    import transformers  # here, since it may have put another module in its place

    monkeypatch.setattr(transformers, "__version__", "4.45.2")
    with pytest.raises(ImportError, match=r"needs transformers 4\.46 or later, and 4\.45\.2 is installed: pip install"):
        runpy.run_path(str(parent / "called" / "modeling_farsight.py"))
