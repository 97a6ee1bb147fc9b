"""farsight probes: constructed codes of position, each layer trained alone, hidden states of transformers, the command."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from farsight.analysis.probes import measure as probes_measure
from farsight.analysis.probes.__main__ import main
from farsight.analysis.probes.measure import read_layers
from farsight.analysis.probes.position_probe import (
    PositionProbes,
    bucket_edges,
    draw_positions,
    guess_error,
    mean_by_bucket,
    split_sequences,
    train_probes,
)
from farsight.analysis.probes.settings import ProbeSettings
from farsight.analysis.sequences import read_sequences
from farsight.checkpoints.load import load_model
from farsight.configs.schema import Position, Tokenizer
from farsight.data.tokenizers.tokenizer import load_tokenizer
from farsight.errors import ConfigError
from farsight.inference.decoder import Decoder
from farsight.inference.loading import LoadedModel
from farsight.model.build import ModelConfig
from tests.checkpoints.test_convert import write_with_transformers
from tests.model.test_model import SMALL, fresh_model

L = 32
QUICK = ProbeSettings(length=L, width=64, epochs=15, batch=50, learning_rate=0.01, buckets=8)


def codes(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of a layer with one-hot positions, one with the position as a product of two features, one of noise: [3, T, L]."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(L, (tokens,), generator=generator)
    spelt = torch.nn.functional.one_hot(positions, L).float()
    sign = torch.randint(0, 2, (tokens,), generator=generator) * 2.0 - 1
    product = torch.zeros(tokens, L)
    product[:, 0], product[:, 1] = sign, sign * (positions - (L - 1) / 2) / L
    return torch.stack([spelt, product, torch.randn(tokens, L, generator=generator)]), positions


@pytest.mark.parametrize("target", ["number", "class"])
def test_what_probes_find(target):
    (learnt, at), (unseen, truth) = codes(1200, 0), codes(600, 1)

    def errors(**changes):
        probes = train_probes(learnt, at, dataclasses.replace(QUICK, target=target, **changes))
        return (probes.predict(unseen) - truth).abs().mean(1).tolist()

    guess = guess_error(at, truth)
    assert guess == pytest.approx(L / 4, rel=0.05)
    spelt, product, noise = errors()
    assert spelt < 0.5
    assert product < 3
    # By chance: the middle is L/4 away on average, a random position L/3.
    assert noise > 0.9 * guess
    spelt, product, noise = errors(probe="linear")
    assert spelt < 1
    # No linear map gives the number; classes can get the positions of one sign right, and not of the other.
    assert product > (0.9 * guess if target == "number" else 4.5)
    assert noise > 0.9 * guess


def by_hand(h_TD, at, settings, weights, biases):
    """Trains one layer's MLP made of torch's own layers, with the same initial weights and batches."""
    h_TD = (h_TD - h_TD.mean(0)) / h_TD.std(0, correction=0)
    first, second = (torch.nn.Linear(*weight.shape) for weight in weights)
    probe = torch.nn.Sequential(first, torch.nn.ReLU(), second)
    for layer, weight, bias in zip((first, second), weights, biases, strict=True):
        layer.weight.data, layer.bias.data = weight.T.clone(), bias[0].clone()
    optimizer = torch.optim.Adam(probe.parameters(), lr=settings.learning_rate)
    generator = torch.Generator().manual_seed(settings.seed + 1)
    batches = [
        b for _ in range(settings.epochs) for b in torch.randperm(len(at), generator=generator).split(settings.batch)
    ]
    for step, rows in enumerate(batches):
        optimizer.param_groups[0]["lr"] = settings.learning_rate * (1 - step / len(batches))
        optimizer.zero_grad()
        output = probe(h_TD[rows])
        if settings.target == "class":
            loss = torch.nn.functional.cross_entropy(output, at[rows])
        else:
            loss = (output[:, 0] - at[rows] / (L - 1)).abs().mean()
        loss.backward()
        optimizer.step()
    return probe(h_TD)


@pytest.mark.parametrize("target", ["number", "class"])
def test_all_layers_at_once_is_each_alone(target):
    learnt, at = codes(150, 0)
    learnt = 3 * learnt + 1 + 0.1 * torch.randn(learnt.shape, generator=torch.Generator().manual_seed(2))
    settings = dataclasses.replace(QUICK, epochs=2, target=target, width=16)
    start = PositionProbes(learnt, settings)
    together = train_probes(learnt, at, settings)
    outputs = together(learnt)
    for layer in range(3):
        # The gradient of an absolute value flips its sign at 0, so rounding alone can make longer runs diverge.
        expected = by_hand(
            learnt[layer], at, settings, [w[layer].data for w in start.weights], [b[layer].data for b in start.biases]
        )
        assert_close(outputs[layer], expected, rtol=1e-3, atol=1e-3)
        alone = train_probes(learnt[layer : layer + 1], at, settings)
        assert_close(alone(learnt[layer : layer + 1])[0], outputs[layer], rtol=1e-3, atol=1e-3)
    expected = outputs.argmax(-1).float() if target == "class" else (outputs[..., 0] * (L - 1)).clamp(0, L - 1)
    assert_close(together.predict(learnt), expected)


def test_a_sequence_is_learnt_from_or_held_out():
    trained, tested = split_sequences(10, 0.2, seed=0)
    assert sorted([*trained.tolist(), *tested.tolist()]) == list(range(10))
    assert len(tested) == 2
    assert any(split_sequences(10, 0.2, seed=seed)[1].tolist() != tested.tolist() for seed in range(1, 4))
    assert [len(part) for part in split_sequences(2, 0.01, seed=0)] == [1, 1]
    assert [len(part) for part in split_sequences(2, 0.99, seed=0)] == [1, 1]
    with pytest.raises(ConfigError, match="1 sequence: probes"):
        split_sequences(1, 0.2, seed=0)


def test_tokens_are_drawn_uniformly():
    drawn = draw_positions(4000, ProbeSettings(length=20, tokens_per_sequence=5, buckets=4))
    assert drawn.shape == (4000, 5)
    assert (drawn.diff(dim=1) > 0).all()
    counts = drawn.flatten().bincount(minlength=20)
    assert counts.min() > 900  # of 1,000 each, with a standard deviation of 27
    assert counts.max() < 1100
    everything = draw_positions(2, ProbeSettings(length=20, tokens_per_sequence=50, buckets=4))
    assert everything.tolist() == [list(range(20))] * 2


def test_buckets_against_a_loop():
    settings = ProbeSettings(length=11, buckets=4)
    generator = torch.Generator().manual_seed(0)
    distance, positions = torch.rand(3, 60, generator=generator), torch.randint(9, (60,), generator=generator)
    edges, got = bucket_edges(11, 4), mean_by_bucket(distance, positions, settings)
    assert (edges[0], edges[-1]) == (0, 11)
    for layer in range(3):
        for bucket in range(4):
            inside = [
                distance[layer, i].item()
                for i, at in enumerate(positions.tolist())
                if edges[bucket] <= at < edges[bucket + 1]
            ]
            if inside:
                assert got[layer, bucket].item() == pytest.approx(sum(inside) / len(inside))
            else:
                assert bucket == 3  # no position is 9 or more
                assert got[layer, bucket].isnan()


@pytest.fixture
def theirs(tmp_path):
    """A model directory written by transformers, with a tokenizer, and a text."""
    model = write_with_transformers(tmp_path / "m", "default", tied=False)
    load_tokenizer(Tokenizer(kind="bytes")).save(tmp_path / "m")
    (tmp_path / "text.txt").write_text("".join(f"{i} and {i * i}, then " for i in range(200)))
    return model


def test_reads_what_transformers_has(tmp_path, theirs):
    tokenizer = load_tokenizer(Tokenizer(kind="bytes"))
    model, config = load_model(tmp_path / "m")
    loaded = LoadedModel(tmp_path / "m", Decoder(model, config, None, chunk=13), tokenizer, 64)
    tokens = read_sequences(tmp_path / "text.txt", tokenizer, 48, 1)[0]
    kept = torch.tensor([0, 5, 12, 13, 47])
    hooked = []
    for layer in theirs.model.layers:
        layer.register_forward_hook(
            lambda _, inputs, output: hooked.append(output[0] if isinstance(output, tuple) else output)
        )
    with torch.no_grad():
        theirs(tokens[None])
        expected = [theirs.model.embed_tokens(tokens)[kept], *(h.view(48, -1)[kept] for h in hooked)]
    assert_close(read_layers(loaded, tokens, kept), torch.stack(expected), rtol=1e-4, atol=1e-5)
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in model.layers.values())


def test_states_go_with_their_positions(monkeypatch):
    """If states are the position itself, a probe reads every position, whichever tokens of a sequence were drawn."""
    kept = []
    monkeypatch.setattr(
        probes_measure,
        "read_layers",
        lambda _, tokens, at: kept.append(len(at)) or at.double()[None, :, None].repeat(2, 1, 3),
    )
    settings = ProbeSettings(
        length=64, probe="linear", tokens_per_sequence=9, epochs=40, learning_rate=0.03, batch=16, buckets=4
    )
    config = ModelConfig(SMALL, Position(), trained_length=64)
    loaded = LoadedModel(Path("m"), Decoder(fresh_model(config), config), None, 64)
    figures = probes_measure.probe_model(loaded, torch.zeros(20, 64, dtype=torch.long), settings)
    assert kept == [9] * 20
    assert figures["guess"] > 10
    assert max(layer["error"] for layer in figures["layers"]) < 0.5


def test_all_positions_at_the_papers_length():
    """SCOPE, B.1: 100 sequences of 1,024 tokens. Longer ones don't take more memory."""
    assert draw_positions(2, ProbeSettings(length=1024)).tolist() == [list(range(1024))] * 2
    assert draw_positions(2, ProbeSettings(length=4096)).shape == (2, 1024)


def test_command(tmp_path, theirs, capsys):
    folder, text, out = tmp_path / "m", tmp_path / "text.txt", tmp_path / "probes.json"
    common = ["--data", str(text), "--length", "32", "--sequences", "20", "--buckets", "4", "--device", "cpu"]
    main([str(folder), *common, "--json", str(out)])
    figures = json.loads(out.read_text())
    assert figures["tool"] == "analysis.probes"
    assert figures["model"] == str(folder)
    assert [layer["layer"] for layer in figures["layers"]] == [-1, 0, 1]
    assert figures["positions"] == [0, 8, 16, 24, 32]
    assert (figures["sequences"], figures["sequences_held_out"]) == (20, 4)
    assert figures["guess"] == pytest.approx(8, abs=0.1)
    for layer in figures["layers"]:
        # All tokens of all sequences are used, so buckets have equal weight.
        assert layer["error"] == pytest.approx(sum(layer["by_position"]) / 4)
    printed = capsys.readouterr().out
    assert f"{figures['layers'][0]['error']:.1f}" in printed
    assert "4 of 20 sequences of 32 held out" in printed

    (tmp_path / "copy").symlink_to(folder)
    picture = tmp_path / "p.png"
    main([str(folder), str(tmp_path / "copy"), *common, "--json", str(out), "--picture", str(picture)])
    both = json.loads(out.read_text())["models"]
    assert both[str(folder)] == figures  # same seed, same figures
    assert picture.read_bytes()[:4] == b"\x89PNG"

    for options, says in [
        (["--length", "1"], "--length 1: there is one position"),
        (["--buckets", "33"], "--buckets 33: set from 1 to the 32"),
        (["--sequences", "1"], "1 sequence: probes"),
        (["--length", "99999"], "set --length"),
    ]:
        with pytest.raises(SystemExit) as error:
            main([str(folder), *common, *options])
        assert says in str(error.value)
    for arguments, says in [
        ([str(folder)], "required: --data"),
        ([str(folder), *common, "--json", str(tmp_path)], "is a folder; name a file"),
        ([str(folder), *common, "--epochs", "0"], "0 must be at least 1"),
        ([str(folder), *common, "--held-out", "1"], "--held-out: 1 must be more than 0 and less than 1"),
        ([str(folder), *common, "--learning-rate", "0"], "--learning-rate: 0 must be more than 0"),
    ]:
        with pytest.raises(SystemExit):
            main(arguments)
        assert says in capsys.readouterr().err
