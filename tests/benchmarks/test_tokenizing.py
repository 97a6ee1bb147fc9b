"""The benchmark sees a thread that holds the interpreter's lock, and refuses calls whose ids differ."""

import ctypes
import json

import numpy as np
import pytest

from farsight.benchmarks import tokenizing


def test_a_held_lock_is_seen():
    """`PyDLL` keeps the lock while a C function runs, here usleep, 0.2 s."""
    taken, block = tokenizing.longest_block(lambda: ctypes.PyDLL(None).usleep(200_000))
    assert taken > 0.19
    assert block > 0.15


def test_calls_agree_and_a_wrong_one_is_refused(tmp_path, monkeypatch, capsys):
    text = tokenizing.read_text(50_000)
    assert len(text.encode()) == 50_000
    tokenizing.train(text, tmp_path)
    monkeypatch.setattr(tokenizing, "read_text", lambda size: text)
    out = tmp_path / "out.json"
    tokenizing.main(["--rounds", "1", "--tokenizer", str(tmp_path), "--json", str(out)])
    result = json.loads(out.read_text())
    assert result["bytes"] == 50_000
    assert [row["what"] for row in result["rows"]] == [
        "nothing",
        "encode",
        "encode_batch_fast",
        "encode_array",
        "packing",
    ]
    assert f"{result['tokens']:,} tokens; 1 rounds: " in capsys.readouterr().out

    tokenizer = tokenizing.HuggingFaceTokenizer(tmp_path / "tokenizer.json")
    monkeypatch.setattr(tokenizer, "encode_array", lambda text: np.zeros(3, np.int64))
    with pytest.raises(RuntimeError, match="encode_array and encode give different ids"):
        tokenizing.measure(tokenizer, text, 1)
