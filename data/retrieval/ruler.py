"""Tasks in the manner of RULER (Hsieh et al., 2024, arXiv:2404.06654): a prompt of an exact length and what answers it.

Beside finding a needle, they ask to follow assignments from variable to variable, and to tell which of thousands of words
came most often. All text is made up from a seed, with the numbers of RULER's thirteen tasks as defaults; prompts are
completed, as in `farsight needles`, by answers with commas between them. The same seed gives the same words at every length.
"""

from bisect import insort
from collections.abc import Iterator, Sequence
from itertools import count, islice
from math import prod

from farsight.data.order import hash64, permutation, shuffled
from farsight.data.retrieval.needles import (
    INTRODUCTION_OF_MANY,
    Haystack,
    Sample,
    draw_names,
    fit,
    fraction,
    passkeys,
    prompt,
)
from farsight.data.sources.documents import DataError
from farsight.data.tokenizers.tokenizer import Tokenizer

COMMON, COMMON_TIMES, OTHER_TIMES = 10, 30, 3
"""Words that are common in a list, how often each of them stands in it, and how often each other word."""
SHORT_LIST, SHORT_COMMON_TIMES, SHORT_OTHER_TIMES = 4096, 6, 1
"""Below so many tokens it is these."""

NOISE = "..."
"""In place of the most frequent word: it is not asked for."""
FREQUENT = 3
"""Words that are asked for."""
LEAST_OCCURRENCES = 300
"""Of a coded text: the third word asked for then comes four times more often than the word after it."""

_VARIABLES, _PLACES, _WORDS, _ORDER = 11, 12, 13, 14
"""Set what is drawn from one seed apart."""

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_VARIABLE_LENGTH = 5

# No word is part of another: a first letter stands nowhere else but in an ending, and no ending begins another one.
_FIRST, _VOWELS, _INNER = "bcdfghjkpt", "aeiou", "lmnrvw"
_ENDINGS = ("k", "p", "t", "x", "sk", "sp", "st", "ft")
_SYLLABLES = (1, 2, 2, 3, 2, 2, 3, 2)
"""Inner syllables of the words, by their number: words of many lengths can fill a text exactly."""


def variable_tracking(haystack: Haystack, tokenizer: Tokenizer, tokens: int, chains: int = 1, hops: int = 4) -> Sample:
    """Chains of assignments at any depth, in their order; asked for is every variable of the first chain, by its value.

    Args:
        tokens: of prompt and answer together.
        chains: of different values, mixed with one another.
        hops: assignments in a chain from one variable to the next.
    """
    seed = haystack.seed
    values = passkeys(haystack, chains)
    drawn = _variables(seed, chains * (hops + 1))
    names = [drawn[chain * (hops + 1) :][: hops + 1] for chain in range(chains)]
    needles = []
    for chain, value in enumerate(values):
        depths = sorted(fraction(seed, _PLACES, chain, hop) for hop in range(hops + 1))
        for hop, depth in enumerate(depths):
            source = f"VAR {names[chain][hop - 1]}" if hop else value
            needles.append((depth, f"VAR {names[chain][hop]} = {source}."))
    introduction = "Variables are given values in the text below. Keep track of them."
    subject = f"he variables with the value {values[0]} are"
    question = (
        f"Question: Which variables have the value {values[0]}, directly or from another variable? Answer: T{subject}"
    )

    def build(sentences: Sequence[str]) -> Sample:
        return prompt(introduction, sentences, needles, question, *names[0])

    return fit(haystack, build, tokenizer, tokens)


def multi_value(haystack: Haystack, tokenizer: Tokenizer, tokens: int, values: int = 4) -> Sample:
    """Several passkeys of one name at any depth, and all of them asked for.

    Args:
        tokens: of prompt and answer together.
    """
    (name,) = draw_names(haystack, 1)
    numbers = passkeys(haystack, values)
    depths = any_depths(haystack, values)
    needles = [(depth, f"One passkey of {name} is {number}.") for depth, number in zip(depths, numbers, strict=True)]
    question = f"Question: What are all the passkeys of {name}? Answer: The passkeys of {name} are"

    def build(sentences: Sequence[str]) -> Sample:
        return prompt(INTRODUCTION_OF_MANY, sentences, needles, question, *numbers)

    return fit(haystack, build, tokenizer, tokens)


def any_depths(haystack: Haystack, needles: int) -> list[float]:
    """A depth for each needle, drawn from the haystack's seed."""
    return [fraction(haystack.seed, _PLACES, needle) for needle in range(needles)]


def common_words(haystack: Haystack, tokenizer: Tokenizer, tokens: int) -> Sample:
    """A list in which ten words stand 30 times each and all others three times; asked for are the ten.

    Below 4,096 tokens it is six times and once. Of the haystack, only the seed counts.

    Args:
        tokens: of prompt and answer together.
    """
    short = tokens < SHORT_LIST
    times, other_times = (SHORT_COMMON_TIMES, SHORT_OTHER_TIMES) if short else (COMMON_TIMES, OTHER_TIMES)
    seed = haystack.seed
    common = [word(seed, number) for number in range(COMMON)]

    def build(others: Sequence[str]) -> Sample:
        question = "Question: Which ten words stand most often in the list? Answer: The ten words are"
        text = _mixed(seed, [*common * times, *others])
        return Sample(f"Below is a list of words. Some stand in it often.\n\n{text}\n\n{question}", tuple(common), ())

    return fit(_OtherWords(seed, other_times), build, tokenizer, tokens)


def frequent_words(haystack: Haystack, tokenizer: Tokenizer, tokens: int) -> Sample:
    """A text of made-up words whose k-th comes in proportion to 1/k²; asked for are the three most frequent.

    The most frequent of all is noise, three dots. Of the haystack, only the seed counts.

    Args:
        tokens: of prompt and answer together.
    """
    seed = haystack.seed
    least = [_coded(seed, rank) for rank in islice(zeta_ranks(), LEAST_OCCURRENCES)]
    answers = tuple(_coded(seed, rank) for rank in range(2, 2 + FREQUENT))

    def build(more: Sequence[str]) -> Sample:
        question = "Question: Which three words come most often in the coded text, dots left aside? Answer: The three words are"
        text = _mixed(seed, [*least, *more])
        return Sample(f"Below is a coded text. Some of its words come often.\n\n{text}\n\n{question}", answers, ())

    return fit(_CodedText(seed), build, tokenizer, tokens)


def zeta_ranks() -> Iterator[int]:
    """Ranks 1, 2, …, endlessly: among the first n, each rank k comes as often as n words in proportion to 1/k² have it, rounded.

    The j-th of rank k has its turn at (2j − 1) · k² (Webster's method), the lower rank first where turns are equal: a
    higher rank never comes more often than a lower one.
    """
    turns = [(1, 1, 1)]  # when, rank, how manieth; in order
    for _ in count():
        _, rank, time = turns.pop(0)
        yield rank
        insort(turns, ((2 * time + 1) * rank**2, rank, time + 1))
        if time == 1:
            insort(turns, ((rank + 1) ** 2, rank + 1, 1))


def word(seed: int, number: int) -> str:
    """A made-up word; each number has its own, and none is part of another.

    Raises:
        DataError: more words than there are.
    """
    syllables = _SYLLABLES[number % len(_SYLLABLES)]
    parts = [_FIRST, _VOWELS, *[_INNER, _VOWELS] * syllables, _ENDINGS]
    size = prod(map(len, parts))
    if number >= size:
        raise DataError(f"{number:,} different words: there are no more; ask for a shorter text.")
    drawn, letters = shuffled(number, size, hash64(seed, _WORDS)), []
    for part in parts:
        drawn, which = divmod(drawn, len(part))
        letters.append(part[which])
    return "".join(letters)


class _OtherWords(Haystack):
    """A list's other words, one after the other, in place of sentences."""

    def __init__(self, seed: int, times: int):
        super().__init__(seed)
        self.times = times

    def sentence(self, number: int) -> str:
        return word(self.seed, COMMON + number // self.times)


class _CodedText(Haystack):
    """The words of a coded text after the least that it has, in place of sentences."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self._ranks = islice(zeta_ranks(), LEAST_OCCURRENCES, None)
        self._known: list[str] = []

    def sentence(self, number: int) -> str:
        while len(self._known) <= number:
            self._known.append(_coded(self.seed, next(self._ranks)))
        return self._known[number]


def _coded(seed: int, rank: int) -> str:
    return NOISE if rank == 1 else word(seed, rank)


def _mixed(seed: int, words: Sequence[str]) -> str:
    return " ".join(words[i] for i in permutation(len(words), hash64(seed, _ORDER)))


def _variables(seed: int, number: int) -> list[str]:
    found: list[str] = []
    for draw in count():
        if len(found) == number:
            break
        drawn, letters = hash64(seed, _VARIABLES, draw), []
        for _ in range(_VARIABLE_LENGTH):
            drawn, which = divmod(drawn, len(_LETTERS))
            letters.append(_LETTERS[which])
        name = "".join(letters)
        if name not in found:
            found.append(name)
    return found
