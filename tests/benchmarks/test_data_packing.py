"""The benchmark of the data: lengths as its docstring says, and figures of small rows."""

import json
from itertools import islice

import numpy as np
import pytest

from farsight.benchmarks.data import packing, padding
from farsight.benchmarks.data.__main__ import main


def test_lengths_are_those_of_the_docstring():
    drawn = np.array([*islice(packing.lengths(0), 1_000_000)])
    assert drawn.mean() == pytest.approx(1020, rel=0.03)
    assert drawn[drawn > 4096].sum() / drawn.sum() == pytest.approx(0.32, abs=0.01)


def test_small_rows(tmp_path, monkeypatch):
    for name, value in {
        "RANKS": 2,
        "MICRO_BATCHES": 2,
        "LANES": 4,
        "ROWS": 3,
        "ROW_TOKENS": (4096,),
        "LONG": 2048,
        "POOLS": (8,),
    }.items():
        monkeypatch.setattr(packing, name, value)
    main(["packing", "--rounds", "1", "--json", str(tmp_path / "out.json")])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    by_kind = {row["packing"]: row for row in rows if row["what"] == "packing" and "min_tokens" not in row}
    assert by_kind["cut"]["padding"] == by_kind["best_fit"]["cut_documents"] == 0
    assert by_kind["cut"]["cut_documents"] > 0.02
    assert 0 < by_kind["best_fit"]["padding"] < 0.05
    imbalance = [row for row in rows if row["what"] == "imbalance"]
    assert {row["over"] for row in imbalance} == {"DP 2", "CP 2, zigzag", "CP 2, contiguous"}
    for row in imbalance:
        assert 1 <= row["balanced"] <= row["as_read"]
        assert row.get("exchanged", 1) <= row["balanced"]


def test_padding_of_rows_that_are_not_packed():
    """Two global batches of four rows, in micro-batches of two, padded by hand to multiples of 8."""
    lengths = np.array([[10, 100, 12, 90], [1024, 20, 1020, 8]])
    before, after = 4 * 104 + 4 * 1024, 2 * 104 + 2 * 16 + 2 * 1024 + 2 * 24
    assert padding.padded(lengths, 2) == {
        "global": before,
        "micro": 2 * 104 + 2 * 96 + 4 * 1024,
        "sorted": after,
    }
