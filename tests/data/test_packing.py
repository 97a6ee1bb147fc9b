"""Packing against brute force: every token occurs once, every transition is trained once."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farsight.data.packing import IGNORE, POOL, Drawn, Packer, Rows
from farsight.errors import DataError

CUT, BEST_FIT = (False,), (True,)
PADDING = -1


def pack(
    lengths: list[int], seq_len: int, rows: int, mask_documents: bool = True, kinds: tuple[bool, ...] = CUT
) -> Rows:
    """Packs documents of the given lengths, repeated forever; token values count up and never repeat."""
    packed = Rows.empty(rows, seq_len)
    packer = packer_of(documents(lengths, kinds), kinds, mask_documents)
    for row in range(rows):
        packer.fill(packed, row)
    return packed


def packer_of(draw, kinds: tuple[bool, ...] = CUT, mask_documents: bool = True) -> Packer:
    return Packer(draw, mask_documents, PADDING, best_fit_share=sum(kinds) / len(kinds))


def documents(lengths: list[int], kinds: tuple[bool, ...] = CUT):
    """Draws documents of these lengths, of which those of a true kind are "best_fit"; both repeat forever."""
    first = 0
    turn = 0

    def draw() -> Drawn:
        nonlocal first, turn
        length = lengths[turn % len(lengths)]
        document = Drawn(np.arange(first, first + length), [turn], kinds[turn % len(kinds)])
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
        tokens = draw().tokens.tolist()
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
    documents_of=st.one_of(
        st.just(CUT), st.just(BEST_FIT), st.just((True, False, True)), st.just((False, False, True))
    ),
    lengths=lengths_of_documents,
    seq_len=st.integers(1, 17),
    stop=st.integers(0, 5),
)
def test_resume_gives_the_next_rows(documents_of, lengths, seq_len, stop):
    draw, drawn = documents(lengths, documents_of), []

    def recorded() -> Drawn:
        drawn.append(draw())
        return drawn[-1]

    packer = packer_of(recorded, documents_of)
    for row in range(stop):
        packer.fill(Rows.empty(stop, seq_len), row)
    waiting = json.loads(json.dumps(packer.waiting))
    later = iter([draw() for _ in range(200)])
    resumed = packer_of(lambda: next(later), documents_of)
    resumed.resume([(drawn[turn], packed) for (turn,), packed in waiting])
    whole, rows = pack(lengths, seq_len, stop + 3, kinds=documents_of), Rows.empty(3, seq_len)
    for row in range(3):
        resumed.fill(rows, row)
    for name in ("inputs", "labels", "positions", "document_starts"):
        np.testing.assert_array_equal(getattr(rows, name), getattr(whole, name)[stop:])


def test_resume_in_a_document_that_became_shorter_is_refused():
    packer = packer_of(documents([5]))
    with pytest.raises(DataError, match=r"6 tokens were read before now has 5: the data files were changed"):
        packer.resume([(documents([5])(), 6)])


def pieces_of(rows: Rows, row: int) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of each document or piece in a row, padding included."""
    starts = rows.document_starts[row]
    edges = [*np.flatnonzero(starts == np.arange(len(starts))), len(starts)]
    for begin, end in itertools.pairwise(edges):
        assert (starts[begin:end] == begin).all()
        np.testing.assert_array_equal(rows.positions[row, begin:end], np.arange(end - begin))
    return [(rows.inputs[row, a:b].tolist(), rows.labels[row, a:b].tolist()) for a, b in itertools.pairwise(edges)]


def best_fit_twin(lengths: list[int], kinds: tuple[bool, ...], seq_len: int, rows: int) -> list[list[list[int]]]:
    """Rows as lists of pieces, each a list of tokens: the rules of the module's docstring, on lists."""
    draw, pool, line, made = documents(lengths, kinds), [], [], []
    share = sum(kinds) / len(kinds)
    for _ in range(rows):
        row: list[list[int]] = []
        from_line = None
        while (room := seq_len - sum(map(len, row))) > 0:
            while len(pool) < POOL and sum(map(len, line)) < room:
                one = draw()
                (pool if one.best_fit else line).append(one.tokens.tolist())
            if from_line is None:
                in_line, in_pool = sum(map(len, line)), sum(map(len, pool))
                from_line = in_line >= seq_len and in_line * share >= in_pool * (1 - share)
            fitting = [] if from_line else [one for one in pool if len(one) <= room or not row]
            if fitting:
                longest = max(map(len, fitting))
                one = fitting[0] if not row else next(one for one in fitting if len(one) == longest)
                pool = [x for x in (one[room:] if x is one else x for x in pool) if x]
            elif line:
                one = line[0]
                line = [x for x in (one[room:], *line[1:]) if x]
            else:
                break
            row.append(one[:room])
        made.append(row)
    return made


@settings(deadline=None, max_examples=200)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=90),
    kinds=st.lists(st.booleans(), min_size=1, max_size=5).map(tuple),
    seq_len=st.integers(1, 40),
    rows=st.integers(1, 12),
)
def test_best_fit_equals_a_twin_on_lists(lengths, kinds, seq_len, rows):
    packed = pack(lengths, seq_len, rows, kinds=kinds)
    for row, expected in enumerate(best_fit_twin(lengths, kinds, seq_len, rows)):
        found, room = pieces_of(packed, row), seq_len - sum(map(len, expected))
        if room:
            assert found.pop() == ([PADDING] * room, [IGNORE] * room)
        assert [tokens for tokens, _ in found] == expected


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=90),
    seq_len=st.integers(1, 40),
    rows=st.integers(1, 30),
)
def test_no_document_that_fits_is_cut_and_every_token_is_trained_once(lengths, seq_len, rows):
    packed, draw, seen, padding, cut = Rows.empty(rows, seq_len), documents(lengths, BEST_FIT), [], 0, 0
    drawn = []
    packer = packer_of(lambda: drawn.append(draw()) or drawn[-1], BEST_FIT)
    for row in range(rows):
        done = packer.fill(packed, row)
        padding, cut = padding + done.padding, cut + done.cut
    trained = []
    for row in range(rows):
        for tokens, labels in pieces_of(packed, row):
            if tokens[0] == PADDING:
                padding -= len(tokens)
                continue
            seen += tokens
            trained += [(a, b) for a, b in zip(tokens, labels, strict=True) if b != IGNORE]
            whole = next(one.tokens for one in drawn if tokens[0] in one.tokens)
            if len(whole) <= seq_len:
                assert tokens == whole.tolist()
            cut -= tokens[-1] != whole[-1]
    assert padding == cut == 0
    left = [token for (turn,), begin in packer.waiting for token in drawn[turn].tokens[begin:].tolist()]
    assert sorted(seen + left) == list(range(sum(len(one.tokens) for one in drawn)))
    ends = {one.tokens[-1] for one in drawn}
    assert sorted(trained) == [(token, token + 1) for token in sorted(seen) if token not in ends]
    assert len(packer.waiting) <= POOL


def test_no_document_waits_forever():
    """A document of 6 tokens never is the longest one, nor fits next to one of 7, in a row of 10."""
    lengths = [6] + [7, 3] * 100
    packed = pack(lengths, 10, POOL, kinds=BEST_FIT)
    assert 0 in packed.inputs


@pytest.mark.parametrize("best_fit", [1, 5, 9])
def test_shares_are_those_of_the_draws_from_the_first_rows_on(best_fit):
    """The line does not go first while the pool fills up, nor does either grow."""
    kinds = (True,) * best_fit + (False,) * (10 - best_fit)
    draw, packed, share = documents([20, 7, 31], kinds), Rows.empty(600, 64), best_fit / 10
    packer, fit = packer_of(draw, kinds), []
    kind_of = np.concatenate(
        [np.full(len(one.tokens), one.best_fit) for one in iter_of(documents([20, 7, 31], kinds), 3000)]
    )
    for row in range(600):
        assert packer.fill(packed, row).padding == 0
        fit.append(kind_of[packed.inputs[row]].mean())
        assert abs(np.sum(fit) - share * len(fit)) < 5
    assert len(packer.waiting) < POOL


def iter_of(draw, count: int):
    return (draw() for _ in range(count))


def test_layout_of_the_docstring():
    a, b, c, d, e, f, g = range(7)
    draw = iter([np.array([a, b, c, d, e]), np.array([f, g]), np.array([9, 9])])
    packer = packer_of(lambda: Drawn(next(draw), []))
    rows = Rows.empty(2, 4)
    packer.fill(rows, 0)
    packer.fill(rows, 1)
    assert rows.inputs.tolist() == [[a, b, c, d], [e, f, g, 9]]
    assert rows.labels.tolist() == [[b, c, d, e], [IGNORE, g, IGNORE, 9]]
    assert rows.positions.tolist() == [[0, 1, 2, 3], [0, 0, 1, 0]]
    assert rows.document_starts.tolist() == [[0, 0, 0, 0], [0, 1, 1, 3]]
    assert [array.dtype for array in (rows.inputs, rows.labels, rows.positions)] == [np.int64] * 3
    assert rows.document_starts.dtype == np.int32


def test_best_fit_layout_of_the_docstring():
    a, b, c, d, e, f, g = range(7)
    draw = iter([np.array([a, b, c]), np.array([d, e, f]), np.array([g]), *[np.array([8, 8, 8])] * 99])
    packer = Packer(lambda: Drawn(next(draw), [], best_fit=True), mask_documents=True, padding_id=9, best_fit_share=1)
    rows = Rows.empty(2, 4)
    assert [packer.fill(rows, row) for row in range(2)] == [(0, 0), (1, 0)]
    assert rows.inputs.tolist() == [[a, b, c, g], [d, e, f, 9]]
    assert rows.labels.tolist() == [[b, c, IGNORE, IGNORE], [e, f, IGNORE, IGNORE]]
    assert rows.positions.tolist() == [[0, 1, 2, 0]] * 2
    assert rows.document_starts.tolist() == [[0, 0, 0, 3]] * 2
