"""Packing against brute force: every token occurs once, every transition is trained once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farsight.data.packing import IGNORE, Packer, Rows
from farsight.errors import DataError


def pack(lengths: list[int], seq_len: int, rows: int, mask_documents: bool) -> Rows:
    """Packs documents of the given lengths, repeated forever; token values count up and never repeat."""
    packed = Rows.empty(rows, seq_len)
    packer = Packer(documents(lengths), mask_documents)
    for row in range(rows):
        packer.fill(packed, row)
    return packed


def documents(lengths: list[int]):
    first = 0
    turn = 0

    def draw() -> np.ndarray:
        nonlocal first, turn
        length = lengths[turn % len(lengths)]
        document = np.arange(first, first + length)
        first += length
        turn += 1
        return document

    return draw


lengths_of_documents = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@settings(deadline=None)
@given(lengths=lengths_of_documents, seq_len=st.integers(1, 17), rows=st.integers(1, 8))
def test_masked_rows_equal_a_token_by_token_construction(lengths, seq_len, rows):
    packed = pack(lengths, seq_len, rows, mask_documents=True)
    draw = documents(lengths)
    run: list[tuple[int, int, int]] = []  # token, label, document
    for number in range(rows * seq_len):
        tokens = draw().tolist()
        run += [(a, b, number) for a, b in zip(tokens, [*tokens[1:], IGNORE], strict=True)]
    for row in range(rows):
        piece = run[row * seq_len : (row + 1) * seq_len]
        starts = [next(i for i in range(seq_len) if piece[i][2] == document) for _, _, document in piece]
        np.testing.assert_array_equal(packed.inputs[row], [token for token, _, _ in piece])
        np.testing.assert_array_equal(packed.labels[row], [label for _, label, _ in piece])
        np.testing.assert_array_equal(packed.document_starts[row], starts)
        np.testing.assert_array_equal(packed.positions[row], np.arange(seq_len) - starts)


@settings(deadline=None)
@given(lengths=lengths_of_documents, seq_len=st.integers(1, 17), rows=st.integers(1, 8))
def test_unmasked_rows_are_one_run_of_tokens(lengths, seq_len, rows):
    packed = pack(lengths, seq_len, rows, mask_documents=False)
    run = np.arange(rows * seq_len + 1)
    np.testing.assert_array_equal(packed.inputs.ravel(), run[:-1])
    np.testing.assert_array_equal(packed.labels.ravel(), run[1:])
    np.testing.assert_array_equal(packed.positions, np.tile(np.arange(seq_len), (rows, 1)))
    assert not packed.document_starts.any()


@settings(deadline=None)
@given(lengths=lengths_of_documents, seq_len=st.integers(1, 17))
def test_every_transition_is_trained_exactly_once(lengths, seq_len):
    rows = sum(lengths) // seq_len + 2
    packed = pack(lengths, seq_len, rows, mask_documents=True)
    trained = [(a, b) for a, b in zip(packed.inputs.ravel(), packed.labels.ravel(), strict=True) if b != IGNORE]
    ends = set(np.cumsum(lengths * (rows * seq_len)).tolist())
    assert trained == [(a, a + 1) for a in range(rows * seq_len) if a + 1 not in ends]


@settings(deadline=None)
@given(
    lengths=lengths_of_documents,
    seq_len=st.integers(1, 17),
    stop=st.integers(0, 5),
    mask_documents=st.booleans(),
)
def test_resume_gives_the_next_rows(lengths, seq_len, stop, mask_documents):
    whole = pack(lengths, seq_len, stop + 3, mask_documents)
    draw = documents(lengths)
    drawn = []

    def recorded() -> np.ndarray:
        drawn.append(draw())
        return drawn[-1]

    packer = Packer(recorded, mask_documents)
    for row in range(stop):
        packer.fill(Rows.empty(stop, seq_len), row)

    again = iter(drawn[-1:])
    resumed = Packer(lambda: next(again, None) if stop and not used else draw(), mask_documents)
    used: list[int] = []
    if stop:
        resumed.resume(packer.offset)
        used.append(1)
    rows = Rows.empty(3, seq_len)
    for row in range(3):
        resumed.fill(rows, row)
    for name in ("inputs", "labels", "positions", "document_starts"):
        np.testing.assert_array_equal(getattr(rows, name), getattr(whole, name)[stop:])


def test_resume_in_a_document_that_became_shorter_is_refused():
    packer = Packer(documents([5]), mask_documents=True)
    with pytest.raises(DataError, match=r"6 tokens were read before now has 5: the data files were changed"):
        packer.resume(6)


def test_layout_of_the_docstring():
    a, b, c, d, e, f, g = range(7)
    draw = iter([np.array([a, b, c, d, e]), np.array([f, g]), np.array([9, 9])])
    packer = Packer(lambda: next(draw), mask_documents=True)
    rows = Rows.empty(2, 4)
    packer.fill(rows, 0)
    packer.fill(rows, 1)
    assert rows.inputs.tolist() == [[a, b, c, d], [e, f, g, 9]]
    assert rows.labels.tolist() == [[b, c, d, e], [IGNORE, g, IGNORE, 9]]
    assert rows.positions.tolist() == [[0, 1, 2, 3], [0, 0, 1, 0]]
    assert rows.document_starts.tolist() == [[0, 0, 0, 0], [0, 1, 1, 3]]
    assert [array.dtype for array in (rows.inputs, rows.labels, rows.positions)] == [np.int64] * 3
    assert rows.document_starts.dtype == np.int32
