"""The benchmark of RiPRA's decoding, on a small model."""

import json

import pytest

from farsight.benchmarks import ripra_decode
from farsight.configs.schema import Position, Rope
from farsight.model.build import ModelConfig
from tests.model.test_model import SMALL, fresh_model


@pytest.fixture
def small(monkeypatch):
    def model_of(layers, trained, device):
        config = ModelConfig(SMALL, Position(rotary=Rope(theta=100.0)), trained_length=trained)
        return fresh_model(config), config

    monkeypatch.setattr(ripra_decode, "model_of", model_of)
    monkeypatch.setattr(ripra_decode, "TRAINED", 64)


def test_rows(small, tmp_path):
    ripra_decode.main(["--contexts", "200", "300", "--rounds", "2", "--json", str(tmp_path / "f.json")])
    found = json.loads((tmp_path / "f.json").read_text())
    assert [(row["context"], row["what"]) for row in found["rows"]] == [
        (context, what) for context in (200, 300) for what in ("plain", "self_extend", "ripra")
    ]
    assert 0 < found["agreement"] <= 1e-3
    for row in found["rows"]:
        assert row["tokens_per_second"] == pytest.approx(1 / row["median_s"])
        keys = 2 * 3 * 2 * (row["context"] + 4) * 8 * 4
        fingerprints = 2 * -(-(row["context"] + 4) // 256) * 2 * 8 * 4 if row["what"] == "ripra" else 0
        assert row["cache_bytes"] == keys + fingerprints
    plain, self_extend, ripra = found["rows"][:3]
    assert ripra["over_plain"] == pytest.approx(ripra["median_s"] / plain["median_s"] - 1)
    assert ripra["over_self_extend"] == pytest.approx(ripra["median_s"] / self_extend["median_s"] - 1)


def test_nothing_is_timed_where_logits_differ(small, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # where the traceback goes
    logits = ripra_decode.Decoder.logits
    calls = iter(range(10**6))
    monkeypatch.setattr(ripra_decode.Decoder, "logits", lambda self, h: logits(self, h) + 0.1 * next(calls))
    with pytest.raises(SystemExit, match="differ by"):
        ripra_decode.main(["--contexts", "100"])
