"""Probing a single layer, against transformers with its tables replaced and against models built with that layer changed."""

import copy
import dataclasses
import json
import math

import pytest
import torch
from torch.testing import assert_close
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from farsight.analysis.layer_probes import measure
from farsight.analysis.layer_probes.__main__ import main
from farsight.analysis.layer_probes.measure import Measurement, probe_layers
from farsight.analysis.layer_probes.one_layer import RopeProbe, mean_loss, noise_after, probed
from farsight.checkpoints.load import load_model
from farsight.checkpoints.model_dir.api import write_model_dir
from farsight.configs.schema import (
    Alibi,
    DynamicNtkRope,
    Garfa,
    GarfaLayer,
    Lasp,
    LayerRule,
    LongRope,
    NoRotary,
    Position,
    Rope,
    Scope,
    Tokenizer,
    YarnRope,
)
from farsight.data.tokenizers.tokenizer import BytesTokenizer, load_tokenizer
from farsight.errors import ConfigError
from farsight.evals.perplexity.measure import perplexity_by_length
from farsight.evals.windows import Windows
from farsight.inference.decoder import Decoder
from farsight.inference.loading import LoadedModel
from farsight.model.build import ModelConfig
from farsight.model.llama import Llama
from tests.checkpoints.test_convert import write_with_transformers
from tests.evals.test_needle import answering, the_passkey
from tests.inference.test_extensions import logits_of
from tests.model.test_model import SMALL, fresh_model

LENGTH = 40
TOKENS = torch.randint(96, (1, LENGTH), generator=torch.Generator().manual_seed(3))
WITH_GARFA = Garfa(layers=(GarfaLayer(1, (1.0, -2.0)),))
POSITIONS = {
    "rope": Position(rotary=Rope(theta=100.0)),
    "yarn": Position(rotary=YarnRope(theta=100.0, factor=4.0, original_length=10)),
    "lasp": Position(rotary=YarnRope(theta=100.0), lasp=Lasp(b_min=100.0, b_max=900.0, anchor_layers=1)),
    "dynamic": Position(rotary=DynamicNtkRope(theta=100.0, factor=4.0, original_length=10)),
    "longrope": Position(
        rotary=LongRope(theta=100.0, short_factor=(1.0,) * 4, long_factor=(1.0, 2.0, 3.0, 4.0), original_length=16)
    ),
    "garfa": Position(rotary=Rope(theta=100.0), garfa=WITH_GARFA),
    "garfa_queries": Position(rotary=Rope(theta=100.0), garfa=dataclasses.replace(WITH_GARFA, queries=True)),
    "scopes_and_alibi": Position(rotary=Rope(theta=100.0), heads=Scope(), rules=(LayerRule(layers="1", bias=Alibi()),)),
}


def decoder_of(position: Position, chunk: int = 16, **architecture) -> Decoder:
    config = ModelConfig(dataclasses.replace(SMALL, **architecture), position, trained_length=LENGTH)
    model = fresh_model(config)
    with torch.no_grad():
        for _, attention in model.attentions():  # make its output matter beside the token's own embedding
            attention.wv.weight.mul_(8)
            attention.wo.weight.mul_(8)
    return Decoder(model, config, chunk=chunk)


def loss_with_layer(decoder: Decoder, **changed) -> float:
    """The loss over the whole sequence at once, of a model built with layer 1 changed and the same weights."""
    layers = list(decoder.config.layers())
    layers[1] = dataclasses.replace(layers[1], **changed)
    model = Llama(decoder.config.architecture, layers, sinusoidal=False, length=LENGTH)
    model.load_state_dict(decoder.model.state_dict())
    with torch.no_grad():
        return float(model.eval()(TOKENS[:, :-1], labels=TOKENS[:, 1:])) / (LENGTH - 1)


@pytest.mark.parametrize("kind", POSITIONS)
def test_masked_and_with_another_base_it_is_a_model_with_that_layer(kind):
    decoder = decoder_of(POSITIONS[kind])
    rotary, plain = decoder.config.layers()[1].rotary, loss_with_layer(decoder)
    larger = loss_with_layer(decoder, rotary=dataclasses.replace(rotary, theta=rotary.theta * 3))
    assert mean_loss(probed(decoder, RopeProbe(1, base=3.0)), TOKENS) == pytest.approx(larger, abs=1e-5)
    assert abs(larger - plain) > 1e-4
    if kind not in ("yarn", "lasp"):  # a layer without rotation lacks their temperature
        masked = loss_with_layer(decoder, rotary=NoRotary(), garfa=None)
        assert mean_loss(probed(decoder, RopeProbe(1, masked=True)), TOKENS) == pytest.approx(masked, abs=1e-5)
        assert abs(masked - plain) > 1e-4
    assert mean_loss(decoder, TOKENS) == pytest.approx(plain, abs=1e-5)
    assert mean_loss(probed(decoder, RopeProbe(1)), TOKENS) == mean_loss(decoder, TOKENS)


@pytest.mark.parametrize("kind", ["default", "yarn", "llama3"])
def test_masked_and_coarsened_equal_transformers_with_one_layers_tables_replaced(kind, tmp_path):
    theirs = write_with_transformers(tmp_path / "m", kind, tied=False)
    model, config = load_model(tmp_path / "m")
    decoder, rotary = Decoder(model.eval(), config, chunk=16), LlamaRotaryEmbedding(copy.deepcopy(theirs.config))
    expected, found = [], []
    for layer, probe in [(layer, p) for layer in range(2) for p in ({"masked": True}, {"group": 3}, {"group": 999})]:
        positions = torch.tensor([[0 if "masked" in probe else m // probe["group"] for m in range(LENGTH - 1)]])
        tables = rotary(torch.zeros(1), positions)
        hook = theirs.model.layers[layer].self_attn.register_forward_pre_hook(
            lambda _, args, kwargs, tables=tables: (args, {**kwargs, "position_embeddings": tables}), with_kwargs=True
        )
        with torch.no_grad():
            logits = theirs(TOKENS[:, :-1]).logits[0]
        hook.remove()
        expected.append(float(torch.nn.functional.cross_entropy(logits.double(), TOKENS[0, 1:])))
        found.append(mean_loss(probed(decoder, RopeProbe(layer, **probe)), TOKENS))
    assert found == pytest.approx(expected, abs=1e-5)
    assert expected[0::3] == expected[2::3]  # with k above the length every token is at 0
    assert len({round(value, 4) for value in expected}) == 4


@pytest.mark.parametrize("kind", ["yarn", "lasp", "garfa", "garfa_queries"])
def test_rows_of_unequal_length_read_in_chunks_and_decoded(kind):
    """Against a one-layer model whose tokens are given the positions floor(m / 3)."""
    position = POSITIONS[kind]
    if position.garfa is not None:
        position = dataclasses.replace(
            position, garfa=dataclasses.replace(position.garfa, layers=(GarfaLayer(0, (1.0, -2.0)),))
        )
    decoder = decoder_of(position, chunk=7, n_layers=1)
    prompts, new = [TOKENS[0, :20], TOKENS[0, 5:18]], TOKENS[:, 30:34].expand(2, -1)
    found = logits_of(probed(decoder, RopeProbe(0, group=3)), prompts, new)
    for row, prompt in enumerate(prompts):
        tokens = torch.cat((prompt, new[row]))[None]
        with torch.no_grad():
            expected = decoder.model(tokens, positions=torch.arange(tokens.shape[1])[None] // 3)
            plain = decoder.model(tokens)
        assert_close(found[row], expected[0, -5:], atol=2e-5, rtol=0)
        assert (expected - plain)[0, -5:].abs().max() > 1e-2


def loaded(position: Position) -> LoadedModel:
    decoder = decoder_of(position)
    return LoadedModel(None, decoder, BytesTokenizer(), LENGTH)


def test_layers_without_rope_are_given_the_models_own_figures(monkeypatch):
    position = Position(rotary=Rope(theta=100.0), rules=(LayerRule(layers="1", rotary=NoRotary()),))
    model, measured = loaded(position), []
    own = measure.mean_loss
    monkeypatch.setattr(measure, "mean_loss", lambda *given: measured.append(1) or own(*given))
    found = probe_layers(model, Measurement(TOKENS), "coarsen", (1, 4))
    assert len(measured) == 1 + 2 * 2
    assert [(entry["layer"], entry["factor"]) for entry in found["layers"]] == [
        (n, k) for k in (1, 4) for n in range(3)
    ]
    by = {(entry["layer"], entry["factor"]): entry for entry in found["layers"]}
    assert [by[layer, 1]["perplexity"] for layer in range(3)] == [found["baseline"]["perplexity"]] * 3
    assert by[1, 4] == {"layer": 1, "rotates": False, "factor": 4, **found["baseline"]}
    assert abs(by[0, 4]["perplexity"] - found["baseline"]["perplexity"]) > 1e-3
    with pytest.raises(ConfigError, match="--probe mask: no layer of the model rotates"):
        probe_layers(loaded(Position(rotary=NoRotary())), Measurement(TOKENS), "mask")


def test_noise():
    """Its size relative to each token's root mean square, and that it is reproducible."""
    h_BLD = (
        torch.randn(2, 3, 4000, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 30.0, 0.1])[:, None]
    )
    block = torch.nn.Identity()
    with noise_after(block, 0.5, seed=1):
        first, second = block(h_BLD) - h_BLD, block(h_BLD) - h_BLD
    assert_close(first.std(-1) / (h_BLD.square().mean(-1).sqrt()), torch.full((2, 3), 0.5), rtol=0.05, atol=0)
    assert not torch.equal(first, second)  # successive calls go on drawing
    assert torch.equal(block(h_BLD), h_BLD)

    model, measurement = loaded(Position(rotary=NoRotary())), Measurement(TOKENS)
    none = probe_layers(model, measurement, "noise", (0.0,))
    assert {entry["perplexity"] for entry in none["layers"]} == {none["baseline"]["perplexity"]}
    once, again, other = (probe_layers(model, measurement, "noise", (0.5,), seed) for seed in (1, 1, 2))
    assert once == again
    assert once["baseline"] == other["baseline"]
    for one, two in zip(once["layers"], other["layers"], strict=True):
        assert len({one["perplexity"], two["perplexity"], once["baseline"]["perplexity"]}) == 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model directory with a tokenizer, and a text."""
    path = tmp_path_factory.mktemp("probed")
    load_tokenizer(Tokenizer(kind="bytes")).save(path / "tokenizer")
    rules = (LayerRule(layers="0", rotary=NoRotary()),)
    config = ModelConfig(
        dataclasses.replace(SMALL, vocab_size=320), Position(rotary=Rope(theta=100.0), rules=rules), trained_length=64
    )
    write_model_dir(path / "model", config, fresh_model(config).state_dict(), tokenizer_dir=path / "tokenizer")
    (path / "text.txt").write_text("".join(f"line {i}: {i * i % 97}\n" for i in range(40)))
    return path


def test_the_command(folder, tmp_path, monkeypatch, capsys):
    prompts = answering(monkeypatch, the_passkey)
    command = [str(folder / "model"), "--data", str(folder / "text.txt"), "--device", "cpu", "--sequences", "3"]
    extra = ["--passkey", "1", "--passkey-length", "260", "--json", str(tmp_path / "f.json")]
    main([*command, "--probe", "mask", *extra, "--picture", str(tmp_path / "f.svg")])
    figures, printed = json.loads((tmp_path / "f.json").read_text()), capsys.readouterr().out
    assert figures["tool"] == "analysis.layer_probes"
    assert (figures["probe"], figures["length"], figures["sequences"], figures["passkey_length"]) == (
        "mask",
        64,
        3,
        260,
    )
    assert [(entry["layer"], entry["rotates"]) for entry in figures["layers"]] == [(0, False), (1, True), (2, True)]
    # One prompt at each of ten depths, for the model and the two layers that rotate; 260 bytes include the answer.
    assert len(prompts) == 3 * 10
    assert all(entry["passkey"] == 1.0 for entry in [figures["baseline"], *figures["layers"]])
    assert "(no rotation)" in printed
    assert (tmp_path / "f.svg").stat().st_size

    # Against farsight perplexity with all positions in one bucket.
    model, config = load_model(folder / "model")
    tokens = torch.tensor(BytesTokenizer().encode((folder / "text.txt").read_text()))
    whole = perplexity_by_length(model.eval(), config, [tokens], [64], Windows(limit=3, buckets=1))
    assert figures["baseline"]["perplexity"] == pytest.approx(whole["buckets"]["64"][0], rel=1e-5)
    masked = mean_loss(Decoder(model, config, RopeProbe(2, masked=True)), tokens[: 3 * 64].view(3, 64))
    assert figures["layers"][2]["perplexity"] == pytest.approx(math.exp(masked), rel=1e-5)

    main([*command, "--probe", "coarsen", "--factors", "2", "16", "--picture", str(tmp_path / "c.svg")])
    assert "coarsen 16" in capsys.readouterr().out


def test_figures_that_are_no_number_are_null(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "mean_loss", lambda *_: math.nan)
    command = [str(folder / "model"), "--data", str(folder / "text.txt"), "--device", "cpu", "--probe", "noise"]
    main([*command, "--json", str(tmp_path / "f.json"), "--picture", str(tmp_path / "f.svg")])
    assert json.loads((tmp_path / "f.json").read_text())["baseline"] == {"perplexity": None}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--probe", "mask"], "the following arguments are required: --data"),
        (["--probe", "mask", "--data", "x", "--factors", "2"], "--factors goes with --probe coarsen"),
        (["--probe", "coarsen", "--data", "x", "--noise", "2"], "--noise goes with --probe noise"),
        (["--probe", "noise", "--data", "x", "--noise", "-1"], "--noise: -1 must be at least 0"),
        (["--probe", "mask", "--data", "x", "--rows", "2"], "--rows goes with --passkey N"),
    ],
)
def test_options_that_do_not_go_together(options, said, capsys):
    with pytest.raises(SystemExit):
        main(["m", *options])
    assert said in capsys.readouterr().err
