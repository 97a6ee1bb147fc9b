"""What `benchmarks.decode` compares: its two sides agree before they are timed, and it would say so if they did not."""

import pytest

from farsight.benchmarks import decode

pytestmark = pytest.mark.slow

SMALL = {"n_layers": 1, "vocab_size": 512}


def test_both_sides_agree(monkeypatch):
    result = decode.measure(length=96, tokens=2, rounds=1, architecture=SMALL)
    assert result["logits_agree_to"] <= decode.TOLERANCE
    found = {(row["what"], row["cache"]): row for row in result["rows"]}
    rolling, dense = found["SCOPE, sorted", "rolling"], found["SCOPE, sorted", "dense and mask"]
    assert rolling["cache_bytes"] < dense["cache_bytes"]
    assert rolling["ratio"] == pytest.approx(rolling["tokens_per_second"] / dense["tokens_per_second"])
    # Theirs has no room for tokens to come: what was there, and all that were written but the last.
    written = (1 + decode.WARM_UP + 1) * 2
    assert found["RoPE", "transformers"]["cache_bytes"] == 2 * 16 * 64 * 4 * (96 + written)

    monkeypatch.setattr(decode, "TOLERANCE", -1.0)
    with pytest.raises(RuntimeError, match="logits with the rolling and the dense cache differ"):
        decode.measure(length=96, tokens=2, rounds=1, architecture=SMALL)
