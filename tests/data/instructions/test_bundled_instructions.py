"""The bundled instruction set: its code runs, its sums are right, and every row is read."""

import json
from difflib import SequenceMatcher
from fractions import Fraction
from itertools import combinations
from math import gcd, lcm, log2
from pathlib import Path

import pytest

from farsight.configs.finetuning import FinetuneConfig, InstructionData, InstructionJsonl
from farsight.configs.schema import Architecture
from farsight.data.instructions.conversations import to_conversation
from farsight.data.instructions.loader import build_instruction_loader
from farsight.data.tokenizers.tokenizer import BytesTokenizer

FOLDER = Path(__file__).parents[3] / "examples" / "instructions"


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text(encoding="ascii").splitlines()]


@pytest.mark.parametrize("row", rows("code"), ids=lambda row: row["messages"][0]["content"][:40])
def test_code_runs_and_does_what_it_says(row):
    answer = row["messages"][1]["content"]
    assert answer.startswith("```python\n")
    assert answer.endswith("\n```")
    names: dict = {}
    exec(answer.removeprefix("```python\n").removesuffix("```"), names)
    assert eval(row["check"], names) is True


def test_sums_come_out():
    def clock(minutes: int) -> str:
        return f"{minutes // 60:02}:{minutes % 60:02}"

    names = {"Fraction": Fraction, "gcd": gcd, "lcm": lcm, "log2": log2, "clock": clock}
    for row in rows("maths"):
        found = eval(row["check"], names)
        expected = row["answer"] if isinstance(found, str) else Fraction(row["answer"])
        assert found == expected or float(found) == pytest.approx(float(expected), rel=1e-12), row
        said = f"{float(expected):.2f}".removesuffix(".00") if isinstance(expected, Fraction) else expected
        assert row["answer"] in row["output"] or said in row["output"], row


def test_no_question_is_asked_twice():
    for name in ("code", "maths", "knowledge"):
        asked = [to_conversation(row, "auto").messages[0]["content"] for row in rows(name)]
        assert len(asked) >= 80
        for one, other in combinations(asked, 2):
            close = SequenceMatcher(None, one, other)
            assert close.real_quick_ratio() < 0.92 or close.quick_ratio() < 0.92 or close.ratio() < 0.92, (one, other)


def test_every_row_is_read_and_fits():
    config = FinetuneConfig(
        data=InstructionData(sources=(InstructionJsonl(path=str(FOLDER / "*.jsonl")),), overlong="error", held_out=0.0)
    )
    config.architecture = Architecture(vocab_size=BytesTokenizer.vocab_size)
    loader = build_instruction_loader(config, BytesTokenizer(), 0, 1)
    assert len(loader.conversations.keys) == sum(len(rows(name)) for name in ("code", "maths", "knowledge")) >= 240
