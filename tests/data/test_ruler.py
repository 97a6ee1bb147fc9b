"""RULER-style tasks: answers are re-derived from the text, frequencies by counting words."""

import math
import re
from collections import Counter
from itertools import islice

import pytest

from farsight.data.retrieval.needles import Haystack, count_tokens
from farsight.data.retrieval.ruler import (
    common_words,
    frequent_words,
    multi_value,
    variable_tracking,
    word,
    zeta_ranks,
)
from farsight.data.tokenizers.tokenizer import BytesTokenizer, train_sentencepiece
from farsight.errors import DataError

BYTES = BytesTokenizer()
SEEDS = range(8)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """A tokenizer whose tokens depend on their neighbours."""
    texts = [frequent_words(Haystack(seed), BYTES, 3000).prompt for seed in (1, 2)] + [
        variable_tracking(Haystack(seed), BYTES, 3000).prompt for seed in (3, 4)
    ]
    return train_sentencepiece(texts, 400, tmp_path_factory.mktemp("pieces"))


@pytest.mark.parametrize(("chains", "hops"), [(1, 4), (3, 2), (2, 1)])
def test_assignments_read_in_order_give_the_answers(chains, hops):
    """Interprets the text: variables have values before they are used, and the answers are all with the requested value."""
    for seed in SEEDS:
        sample = variable_tracking(Haystack(seed), BYTES, 2500, chains, hops)
        values: dict[str, str] = {}
        for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", sample.prompt):
            assert name not in values
            values[name] = source if source.isdecimal() else values[source]
        asked = re.findall(r"the value ([0-9]{5})", sample.prompt)[-1]
        assert sample.answers == tuple(name for name, value in values.items() if value == asked)
        assert len(sample.answers) == hops + 1
        assert len(values) == chains * (hops + 1)
        assert len(set(values.values())) == chains
        statements = [sample.prompt[start:stop] for start, stop in sample.evidence]
        assert all(re.fullmatch(r"VAR \w+ = (VAR )?\w+\.", statement) for statement in statements)
        assert len(statements) == len(values)


def test_all_values_of_a_name_are_asked_for():
    for seed in SEEDS:
        sample = multi_value(Haystack(seed), BYTES, 1500, values=3)
        name = re.search(r"passkeys of (\w+) are$", sample.prompt)[1]
        found = re.findall(rf"One passkey of {name} is ([0-9]{{5}})\.", sample.prompt)
        assert set(found) == set(sample.answers)
        assert len(found) == 3


@pytest.mark.parametrize(("tokens", "times", "other_times"), [(1500, 6, 1), (6000, 30, 3)])
def test_the_ten_common_words_are_those_that_counting_finds(tokens, times, other_times):
    for seed in SEEDS:
        sample = common_words(Haystack(seed), BYTES, tokens)
        counts = Counter(sample.prompt.split("\n\n")[1].split())
        # A word that fills the length may occur once more than the others.
        assert {w: n for w, n in counts.items() if n > other_times + 1} == dict.fromkeys(sample.answers, times)
        assert len(sample.answers) == 10
        assert len(counts) > 50
        assert sum(n != other_times for n in counts.values()) <= 10 + 4


@pytest.mark.parametrize("tokens", [2100, 2500, 9000])
def test_the_frequent_words_are_those_that_counting_finds(tokens):
    for seed in SEEDS:
        sample = frequent_words(Haystack(seed), BYTES, tokens)
        counts = Counter(sample.prompt.split("\n\n")[1].split())
        ranked = counts.most_common()
        assert ranked[0][0] == "..."
        assert {w for w, _ in ranked[1:4]} == set(sample.answers)
        assert ranked[3][1] > ranked[4][1]
        # Proportional to 1/k², up to rounding and the words that fill the length.
        total = sum(counts.values())
        for rank, (_, n) in enumerate(ranked[:6], start=1):
            assert n == pytest.approx(total * 6 / math.pi**2 / rank**2, abs=0.04 * total / rank + 2)


def test_ranks_keep_their_shares_at_every_length():
    counts: Counter[int] = Counter()
    for n, rank in enumerate(islice(zeta_ranks(), 3000), start=1):
        counts[rank] += 1
        assert counts[rank] <= counts[rank - 1] or rank == 1
        shares = {k: 1 / k**2 for k in counts}
        scale = n / sum(shares.values())
        if n % 500 == 0:  # each rank present has its share of n, rounded
            assert all(abs(counts[k] - scale * share) < 1 for k, share in shares.items() if k > 1)


def test_words_are_different_and_none_is_part_of_another():
    words = [word(7, number) for number in range(1200)]
    text = " ".join(words)
    assert all(text.count(w) == 1 for w in words)
    assert len({len(w) for w in words}) >= 6
    with pytest.raises(DataError, match="different words"):
        word(7, 96_000)


@pytest.mark.parametrize("task", [variable_tracking, multi_value, common_words, frequent_words])
def test_lengths_are_met_and_seeds_tell_prompts_apart(task, pieces):
    for tokenizer in (BYTES, pieces):
        found = [count_tokens(task(Haystack(seed), tokenizer, 2600), tokenizer) for seed in SEEDS]
        assert max(found) <= 2600
        assert min(found) >= 2600 - 45  # within a sentence, if nothing fills the rest
        assert found.count(2600) >= len(SEEDS) / 2
    assert task(Haystack(1), BYTES, 2600) == task(Haystack(1), BYTES, 2600)
    assert task(Haystack(1), BYTES, 2600) != task(Haystack(2), BYTES, 2600)
    with pytest.raises(DataError, match="20 tokens are too few"):
        task(Haystack(1), BYTES, 20)
