"""The order simulation against written-out matrices, and order awareness of models known to have it or not."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
import torch

from farsight.analysis.order_awareness import measure as order_measure
from farsight.analysis.order_awareness.measure import changes, measure
from farsight.analysis.order_awareness.permutations import oldest_exchanged, reordered, spans
from farsight.analysis.order_simulation.__main__ import main
from farsight.analysis.order_simulation.simulate import (
    draw_picks,
    heads_for,
    through_layer,
    unique_ratios,
    window_sizes,
)
from farsight.configs.schema import NoRotary, Position, Rope, SlidingWindow
from farsight.errors import ConfigError
from farsight.inference.decoder import Decoder
from farsight.inference.loading import LoadedModel
from farsight.model.build import ModelConfig
from farsight.model.position.rope import RopeFrequencies, rope_tables
from tests.model.test_model import SMALL, fresh_model

NOPE = Position(rotary=NoRotary())


def test_a_layer_is_a_matrix_with_a_pick_for_each_head():
    """v M computed row by row, against v times the dense matrix (the paper's Figure 24)."""
    generator = np.random.default_rng(0)
    for length, windows in itertools.product((5, 32), ([2, 4, 8, 16, 32], [1, 32], [32, 16, 11])):
        picks = draw_picks(length, windows, generator)
        dense = np.eye(length, dtype=np.int64)
        for head, window in enumerate(windows):
            for row in range(length):
                assert max(0, row - window + 1) <= picks[head, row] <= row
                dense[row, picks[head, row]] += 1
        v = generator.integers(0, 5, length)
        np.testing.assert_array_equal(through_layer(v, picks), v @ dense)


def test_the_windows_are_the_papers():
    assert window_sizes(512, heads_for(512)) == {
        "scope": [2, 4, 8, 16, 32, 64, 128, 256, 512],
        "uniform": [math.ceil(512 / i) for i in range(1, 10)],
        "nope-1": [512] * 8 + [1],
        "nope": [512] * 9,
    }
    assert window_sizes(100, 4, [3.0])["gamma=3"] == [3, 9, 27, 81]
    assert window_sizes(100, 4, [8.0])["gamma=8"] == [8, 64, 100, 100]


def test_scope_comes_first_and_nope_last(tmp_path):
    """The ranking of SCOPE's Figure 10 at ten layers, and the ratios of an independent program, each the mean of ten trials.

    Single trials of NoPE have a spread of 0.04, so two means of ten may differ by 0.05.
    """
    known = {512: (1.000, 0.988, 0.841, 0.746), 4096: (1.000, 0.964, 0.689, 0.591)}
    main(["--json", str(tmp_path / "f.json")])
    found = json.loads((tmp_path / "f.json").read_text())["configurations"]
    for length, expected in known.items():
        ratios = [c["ratio"][-1] for c in found if c["length"] == length]
        assert [c["windows"] for c in found if c["length"] == length] == ["scope", "uniform", "nope-1", "nope"]
        assert ratios == sorted(ratios, reverse=True)
        assert len(set(ratios)) == 4
        assert np.allclose(ratios, expected, atol=0.05)


def test_coefficients_that_would_overflow_are_refused():
    with pytest.raises(ConfigError, match="--layers 40: with 5 heads"):
        unique_ratios(32, [2, 4, 8, 16, 32], 40, np.random.default_rng(0))


def test_spans_and_permutations():
    assert spans(20) == [2, 4, 8, 16, 20]
    assert spans(16) == [2, 4, 8, 16]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.arange(20)
    for keep_last in (True, False):
        for _ in range(50):
            other = reordered(tokens, 5, keep_last, generator)
            assert not torch.equal(other, tokens)
            assert torch.equal(other[:15], tokens[:15])
            assert torch.equal(other.sort().values, tokens)
            assert not keep_last or other[-1] == tokens[-1]
    assert oldest_exchanged(tokens, 5).tolist() == [*range(15), 16, 15, 17, 18, 19]
    assert oldest_exchanged(torch.tensor([1, 7, 7, 8, 2]), 4).tolist() == [1, 8, 7, 7, 2]
    assert oldest_exchanged(torch.tensor([1, 7, 7, 2]), 3) is None
    assert oldest_exchanged(tokens, 2) is None
    assert reordered(tokens, 2, True, generator) is None
    assert reordered(torch.tensor([3, 7, 7, 7]), 3, False, generator) is None


def model_of(position: Position, n_layers: int) -> tuple:
    config = ModelConfig(dataclasses.replace(SMALL, n_layers=n_layers), position, trained_length=16)
    return fresh_model(config).double(), config


def test_one_layer_without_positions_sees_a_set():
    """Tokens before the last can be permuted without effect; a second layer sees prefixes, and RoPE distances."""
    tokens = torch.randperm(96, generator=torch.Generator().manual_seed(0))[:16]
    generator = torch.Generator().manual_seed(1)
    others = torch.stack([reordered(tokens, 16, True, generator) for _ in range(20)])
    assert changes(Decoder(*model_of(NOPE, 1)), tokens, others).max() < 1e-15
    assert changes(Decoder(*model_of(NOPE, 2), chunk=5), tokens, others)[1].min() > 1e-11
    assert changes(Decoder(*model_of(Position(rotary=Rope()), 1)), tokens, others).min() > 1e-9


def test_a_window_of_two_knows_who_came_just_before():
    """Lemma 2.2 for one layer, reaching a token further with each: layer l notices changes in the last l + 1 tokens only."""
    decoder = Decoder(*model_of(Position(rotary=NoRotary(), heads=SlidingWindow(window=2)), 3), chunk=7)
    tokens = torch.arange(16)
    others = torch.stack([tokens[[*range(12), *order, 15]] for order in itertools.permutations((12, 13, 14))][1:])
    for layer, change in enumerate(changes(decoder, tokens, others)):
        seen = tokens[14 - layer : 15].expand(len(others), -1)
        expected = (others[:, 14 - layer : 15] != seen).any(1)
        assert torch.equal(change > 1e-14, expected), layer
        assert change[~expected].eq(0).all()


def test_tokens_at_the_start_can_be_kept_in_place(monkeypatch):
    model, config = model_of(Position(rotary=Rope()), 1)
    tokens_SL, read = torch.arange(9)[None], []
    noted = lambda decoder, tokens_L, others: read.append(others) or torch.ones(1, len(others))  # noqa: E731
    monkeypatch.setattr(order_measure, "changes", noted)
    model_given = LoadedModel("m", Decoder(model, config), None, 16)
    assert [row["tokens"] for row in order_measure.measure(model_given, tokens_SL, 5, first=1)["spans"]] == [2, 4, 8]
    assert {int(others[0, 0]) for others in read} == {0}
    assert {tuple(sorted(row.tolist())) for others in read for row in others} == {tuple(range(9))}
    read.clear()
    order_measure.measure(model_given, tokens_SL, 50)
    assert {int(first) for others in read for first in others[:, 0]} != {0}


def test_the_state_is_that_of_the_last_block():
    """Against the blocks applied by hand."""
    model, config = model_of(Position(rotary=Rope()), 2)
    rows = torch.stack([torch.arange(10), torch.tensor([0, 2, 1, *range(3, 10)])])
    h = model.tok_embeddings(rows)
    tables = []
    frequencies = RopeFrequencies(model.rope_frequencies[0], model.attention_factors[0])
    for block in model.layers.values():
        h = block(h, rope_tables(torch.arange(10)[None], frequencies))
        tables.append(h[:, -1])
    with torch.no_grad():
        expected = [(h[1] - h[0]).norm() / h[0].norm() for h in tables]
        assert torch.allclose(
            changes(Decoder(model, config), rows[0], rows[1:])[:, 0], torch.stack(expected), rtol=1e-3
        )


@pytest.mark.slow
def test_horizon(tmp_path):
    """None for one layer without positions; everything for RoPE and for more such layers; the reach for windows.

    With a window of w, each layer sees w − 1 tokens further back than the one before. An exchange of tokens that are both
    out of reach goes unnoticed.
    """
    torch.manual_seed(0)
    tokens = torch.stack([torch.randperm(96)[:32] for _ in range(2)])
    window = Position(rotary=Rope(), heads=SlidingWindow(window=4))
    for position, layers, horizon in (
        (NOPE, 1, 1),
        (Position(rotary=Rope()), 2, 32),
        (NOPE, 3, 32),
        (window, 1, 4),
        (window, 3, 8),
    ):
        model, config = model_of(position, layers)
        loaded = LoadedModel(tmp_path, Decoder(model, config), None, 32)
        figures = measure(loaded, tokens, permutations=6)
        assert figures["horizon"] == horizon
        assert [row["tokens"] for row in figures["spans"]] == [2, 4, 8, 16, 32]
        assert figures["spans"][0]["change"] is None
        assert figures["spans"][-1]["distinguished"] == (
            1.0 if horizon == 32 else figures["spans"][-1]["distinguished"]
        )
        assert all(row["distinguished_all"] > 0 for row in figures["spans"])
    # A window of four in three layers sees 10 tokens: an exchange 16 tokens back changes nothing, a nearer one does.
    assert figures["spans"][3]["exchange"] == 0
    assert figures["spans"][3]["change"] > 1e-9
    assert [figures["layers"][str(layer)]["horizon"] for layer in range(3)] == [4, 8, 8]
