"""Tasks modelled on RULER (Hsieh et al., 2024, arXiv:2404.06654): prompts of an exact length, with their answers.

Besides finding a needle, they ask to follow assignments from variable to variable, and to find the most frequent of thousands
of words. All text is generated from a seed, with the parameters of RULER's thirteen tasks as defaults; as in `farsight needles`,
the answers complete the prompt, separated by commas. The same seed gives the same words at every length.
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
from farsight.data.tokenizers.tokenizer import Tokenizer
from farsight.errors import DataError

COMMON, COMMON_TIMES, OTHER_TIMES = 10, 30, 3
"""Number of common words in a list, occurrences of each, and occurrences of each other word."""
SHORT_LIST, SHORT_COMMON_TIMES, SHORT_OTHER_TIMES = 4096, 6, 1
"""Below `SHORT_LIST` tokens, the occurrences are these."""

NOISE = "..."
"""Stands for the most frequent word, which is not asked for."""
FREQUENT = 3
"""Number of words asked for."""
LEAST_OCCURRENCES = 300
"""Fewest words of a coded text: the least frequent answer then occurs four times more than the next word."""

_VARIABLES, _PLACES, _WORDS, _ORDER = 11, 12, 13, 14
"""Separate the random draws from one seed."""

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_VARIABLE_LENGTH = 5

# No word is part of another: first letters occur elsewhere only in endings, and no ending is a prefix of another.
_FIRST, _VOWELS, _INNER = "bcdfghjkpt", "aeiou", "lmnrvw"
_ENDINGS = ("k", "p", "t", "x", "sk", "sp", "st", "ft")
_SYLLABLES = (1, 2, 2, 3, 2, 2, 3, 2)
"""Inner syllables of each word, by word number modulo 8: words of many lengths can fill a text exactly."""


def variable_tracking(haystack: Haystack, tokenizer: Tokenizer, tokens: int, chains: int = 1, hops: int = 4) -> Sample:
    """A prompt with chains of assignments at random depths, in order; asks for all variables with the first chain's value.

    Args:
        tokens: length of prompt and answer together.
        chains: number of chains, each with its own value, interleaved.
        hops: assignments from variable to variable in a chain.
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
    """A prompt with several passkeys of one name at random depths, which asks for all of them.

    Args:
        tokens: length of prompt and answer together.
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
    """A random depth for each needle, from the haystack's seed."""
    return [fraction(haystack.seed, _PLACES, needle) for needle in range(needles)]


def common_words(haystack: Haystack, tokenizer: Tokenizer, tokens: int) -> Sample:
    """A list in which ten words occur 30 times each and all others three times; asks for the ten.

    Below 4,096 tokens, they occur six times and once. Only the haystack's seed is used.

    Args:
        tokens: length of prompt and answer together.
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
    """A text of invented words, the k-th with frequency proportional to 1/k²; asks for the three most frequent.

    The most frequent of all is noise, three dots, and doesn't count. Only the haystack's seed is used.

    Args:
        tokens: length of prompt and answer together.
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
    """An endless sequence of ranks 1, 2, …: among the first n, rank k occurs n times its share ∝ 1/k², rounded.

    The j-th occurrence of rank k has its turn at (2j − 1) · k² (Webster's method), lower ranks first at equal turns: so a
    higher rank never occurs more often than a lower one.
    """
    turns = [(1, 1, 1)]  # (turn, rank, occurrence), sorted
    for _ in count():
        _, rank, time = turns.pop(0)
        yield rank
        insort(turns, ((2 * time + 1) * rank**2, rank, time + 1))
        if time == 1:
            insort(turns, ((rank + 1) ** 2, rank + 1, 1))


def word(seed: int, number: int) -> str:
    """An invented word for each number; none is part of another.

    Raises:
        DataError: `number` is too large: there are no more words.
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
    """A haystack whose sentences are the other words of a list."""

    def __init__(self, seed: int, times: int):
        super().__init__(seed)
        self.times = times

    def sentence(self, number: int) -> str:
        return word(self.seed, COMMON + number // self.times)


class _CodedText(Haystack):
    """A haystack whose sentences are the words of a coded text after its first `LEAST_OCCURRENCES`."""

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
