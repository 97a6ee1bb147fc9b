"""The benchmark's own check: torchtitan's trainer is the independent source of every loss."""

import json

import pytest

from farsight.benchmarks.train_step import main

pytestmark = pytest.mark.slow


def test_our_losses_equal_torchtitans(tmp_path, capfd):
    main(["--rounds", "1", "--rows", "1", "--seq-len", "64", "--json", str(tmp_path / "out.json")])
    result = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    titan, _, ours = result["rows"]
    assert [titan["what"], ours["what"]] == ["torchtitan", "farsight"]
    assert len(ours["losses"]) == 3
    assert ours["losses"] == pytest.approx(titan["losses"], rel=1e-5)
    assert result["ratio"] == ours["tokens_per_second"] / titan["tokens_per_second"]
    assert "losses equal" in capfd.readouterr().out
