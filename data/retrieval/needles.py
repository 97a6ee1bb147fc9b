"""Needles in a haystack: prompts of an exact length that ask for something that stands somewhere in their text.

    farsight needles --out needles.jsonl --documents 1000 --tokens 512 --seed 0

A haystack is endless text, made up here from a seed or read from a user's file. A task says how to make a prompt of a number
of its sentences (`build`), and `fit` finds how many fill a length in tokens, for any tokenizer:

    haystack = Haystack(seed=7)
    sample = passkey(haystack, tokenizer, tokens=4096, depth=0.3)

What is drawn (numbers, names) follows from the haystack's seed alone, so that a seed gives the same question at every length
and depth. Depth is a share of the haystack's characters: 0 before its first sentence, 1 after its last.
"""

import itertools
import re
import textwrap
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from farsight.data.order import hash64, shuffled
from farsight.data.sources.documents import DataError
from farsight.data.tokenizers.tokenizer import Tokenizer

NAMES = (
    "amber", "cobalt", "crimson", "emerald", "indigo", "ivory", "jade", "lilac", "maroon", "ochre", "olive", "pearl",
    "ruby", "saffron", "scarlet", "silver", "teal", "topaz", "umber", "violet",
)  # fmt: skip
"""Names of passkeys; no word of a made-up haystack."""

SEGMENTS = ("part one", "part two", "part three", "part four")
"""Names of the passkeys in the four segments of the multi-passkey task."""

INTRODUCTION = "A passkey is hidden in the text below. Find it and remember it."
INTRODUCTION_OF_MANY = "Several passkeys are hidden in the text below. Find them and remember them."

_ADJECTIVES = (
    "bright", "broad", "calm", "cold", "dark", "deep", "dry", "gentle", "green", "heavy", "high", "late", "narrow",
    "pale", "quiet", "soft",
)  # fmt: skip
_NOUNS = (
    "boat", "bridge", "cloud", "field", "forest", "garden", "hill", "house", "lake", "market", "mill", "path",
    "river", "road", "stone", "tower",
)  # fmt: skip
_VERBS = (
    "crossed", "faced", "followed", "found", "hid", "joined", "kept", "left", "met", "passed", "reached", "saw",
    "shaped", "showed", "touched", "watched",
)  # fmt: skip
_PLACES = (
    "above", "behind", "below", "beside", "near", "over", "past", "under",
)  # fmt: skip
_TIMES = (
    "At dawn", "At night", "In spring", "In the rain", "In winter", "Once again", "One day", "That year",
)  # fmt: skip
_PATTERNS = (
    ("The", _ADJECTIVES, _NOUNS, _VERBS, "the", _NOUNS),
    (_TIMES, "the", _NOUNS, _VERBS, "a", _ADJECTIVES, _NOUNS),
    ("The", _NOUNS, _PLACES, "the", _NOUNS, "was", _ADJECTIVES),
    (_TIMES, "the", _ADJECTIVES, _NOUNS, _VERBS, "the", _NOUNS, _PLACES, "the", _NOUNS),
    ("The", _NOUNS, "and", "the", _NOUNS, _VERBS, "a", _ADJECTIVES, _NOUNS, _PLACES, "the", _NOUNS),
)
"""A sentence's words: as given, or one of a list."""

_LONGEST_SENTENCE = 400
"""Characters; what a user's text has between two ends of sentences is cut at this."""

_TAILS = 64
"""Sentences that are tried for a haystack's end."""

_NUMBERS, _WHICH_NAMES, _SENTENCES = 1, 2, 3
"""Set what is drawn from one seed apart."""


@dataclass(frozen=True)
class Sample:
    """A prompt, and what a right answer to it holds."""

    prompt: str
    """Ends so that the answer follows after a space."""
    answers: tuple[str, ...]
    evidence: tuple[tuple[int, int], ...]
    """Where the needles stand in the prompt: first character and the one after the last, in the prompt's order."""


class Haystack:
    """Endless text, sentence by sentence.

    Args:
        seed: makes up the text; of a text given, the sentence to begin with.
        text: a user's own, cut into sentences; it begins again after its end.

    Raises:
        DataError: a text without words.
    """

    def __init__(self, seed: int, text: str | None = None):
        self.seed = seed
        self.text = text
        self._own = None if text is None else _split(text)
        if self._own is not None and not self._own:
            raise DataError("the haystack's text is empty; give a file with text, or none to have it made up.")

    def sentence(self, number: int) -> str:
        """The sentence of a number; they count from 0."""
        drawn = hash64(self.seed, _SENTENCES, 0 if self._own else number)
        if self._own:
            return self._own[(drawn + number) % len(self._own)]
        drawn, which = divmod(drawn, len(_PATTERNS))
        words = []
        for part in _PATTERNS[which]:
            if isinstance(part, str):
                words.append(part)
            else:
                drawn, which = divmod(drawn, len(part))
                words.append(part[which])
        return " ".join(words) + "."

    def sentences(self, count: int) -> list[str]:
        """The first `count` sentences."""
        return [self.sentence(number) for number in range(count)]


Build = Callable[[Sequence[str]], Sample]
"""Makes a prompt of the sentences of a haystack."""


def place(sentences: Sequence[str], needles: Sequence[tuple[float, str]]) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Puts needles between sentences, each at the boundary nearest to its depth.

    Args:
        needles: depth and text of each. Those at one boundary stand in the order of their depths, then of the list.

    Returns:
        The text, and each needle's span of characters in it, in the order of the list.

    Raises:
        DataError: a depth outside 0 … 1.
    """
    ends = [0, *itertools.accumulate(len(sentence) + 1 for sentence in sentences)]
    at: list[int] = []
    for depth, _ in needles:
        if not 0 <= depth <= 1:
            raise DataError(f"depth = {depth}: 0 is the start of the haystack and 1 its end; set a number between.")
        after = bisect_left(ends, depth * ends[-1])
        before = max(after - 1, 0)
        at.append(after if ends[after] - depth * ends[-1] < depth * ends[-1] - ends[before] else before)
    spans = [(0, 0)] * len(needles)
    parts: list[str] = []
    length = done = 0
    for number in sorted(range(len(needles)), key=lambda number: (at[number], needles[number][0])):
        new = sentences[done : at[number]]
        length += sum(len(sentence) + 1 for sentence in new)
        text = needles[number][1]
        spans[number] = (length, length + len(text))
        parts += [*new, text]
        length += len(text) + 1
        done = at[number]
    return " ".join([*parts, *sentences[done:]]), tuple(spans)


def prompt(
    introduction: str, sentences: Sequence[str], needles: Sequence[tuple[float, str]], question: str, *answers: str
) -> Sample:
    """A prompt of an introduction, a haystack with needles, and a question, a blank line between them.

    Args:
        needles: depth and text of each.
        question: ends in the words that the answer follows.
    """
    text, spans = place(sentences, needles)
    start = len(introduction) + 2
    evidence = tuple(sorted((first + start, stop + start) for first, stop in spans))
    return Sample(f"{introduction}\n\n{text}\n\n{question}", answers, evidence)


def answer_tokens(sample: Sample, tokenizer: Tokenizer) -> int:
    """Tokens of the answers, written one after the other with commas and a full stop."""
    return len(tokenizer.encode(f" {', '.join(sample.answers)}."))


def count_tokens(sample: Sample, tokenizer: Tokenizer) -> int:
    """Tokens of a sample's prompt, with bos where the tokenizer has it, and of its answer."""
    return (tokenizer.bos_id is not None) + len(tokenizer.encode(sample.prompt)) + answer_tokens(sample, tokenizer)


def most(size: Callable[[int], int], limit: int) -> int:
    """The largest n ≥ 0 with size(n) ≤ limit, for a size that grows about evenly with n; it is called a few times.

    Raises:
        DataError: size(0) is too large.
    """
    low, least = 0, size(0)
    if least > limit:
        raise DataError(f"{limit:,} tokens are too few: without any haystack the prompt and its answer take {least:,}.")
    at_low, high, rate = least, 0, 0.0
    while not high or high - low > 1:
        # Where it should be, and one further when the last guess fitted: that closes in from both sides.
        guess = low + 1 + int((limit - at_low) / rate) if rate else 1
        guess = max(low + 1, guess if not high else min(guess, high - 1))
        value = size(guess)
        rate = (value - least) / guess
        if value <= limit:
            low, at_low = guess, value
        else:
            high = guess
    return low


def fit(haystack: Haystack, build: Build, tokenizer: Tokenizer, tokens: int) -> Sample:
    """The sample with the most of a haystack that has, with bos and its answer (`count_tokens`), at most `tokens` tokens.

    In place of the haystack's last sentence comes one of those after it, or two, that fill the length, if there are such:
    then the sample has exactly `tokens` tokens, as is the rule. Else it is as near as whole sentences allow.

    Raises:
        DataError: fewer tokens than the prompt needs without any haystack.
    """
    count = most(lambda n: count_tokens(build(haystack.sentences(n)), tokenizer), tokens)
    sentences = haystack.sentences(count)
    sample = build(sentences)
    missing = tokens - count_tokens(sample, tokenizer)
    if not missing or not count:
        return sample
    # The tail that should take the last sentence's place; what it really takes, the whole prompt says.
    by_size: dict[int, str] = {}
    for number in range(count, count + _TAILS):
        sentence = haystack.sentence(number)
        by_size.setdefault(_sentence_tokens(sentence, tokenizer), sentence)
    wanted = _sentence_tokens(sentences[-1], tokenizer) + missing
    tails = [[by_size[wanted]]] if wanted in by_size else []
    tails += [[by_size[a], by_size[wanted - a]] for a in by_size if wanted - a in by_size]
    for tail in tails[:3]:
        filled = build([*sentences[:-1], *tail])
        if count_tokens(filled, tokenizer) == tokens:
            return filled
    return sample


def passkey(haystack: Haystack, tokenizer: Tokenizer, tokens: int, depth: float) -> Sample:
    """One passkey of five digits in a haystack (Mohtashami and Jaggi, 2023).

    Args:
        tokens: of prompt and answer together.
        depth: 0 … 1.
    """
    (number,) = passkeys(haystack, 1)

    def build(sentences: Sequence[str]) -> Sample:
        return prompt(INTRODUCTION, sentences, [(depth, needle(number))], asked(), number)

    return fit(haystack, build, tokenizer, tokens)


def named_passkeys(
    haystack: Haystack, tokenizer: Tokenizer, tokens: int, depths: Sequence[float], ask: int | None = None
) -> Sample:
    """Several passkeys with names in a haystack, asked for one or for all.

    Args:
        tokens: of prompt and answer together.
        depths: of each, 0 … 1.
        ask: the one asked for, counted from 0; None asks for all of them.

    Raises:
        DataError: more passkeys than there are names.
    """
    return _named(haystack, tokenizer, tokens, draw_names(haystack, len(depths)), depths, ask)


def multi_passkey(haystack: Haystack, tokenizer: Tokenizer, tokens: int) -> Sample:
    """A passkey anywhere in each of the haystack's four equal segments, and all four asked for (RiPRA, 4.2.3).

    Args:
        tokens: of prompt and answer together.
    """
    depths = [(segment + fraction(haystack.seed, segment)) / len(SEGMENTS) for segment in range(len(SEGMENTS))]
    return _named(haystack, tokenizer, tokens, SEGMENTS, depths, None)


def _named(
    haystack: Haystack,
    tokenizer: Tokenizer,
    tokens: int,
    names: Sequence[str],
    depths: Sequence[float],
    ask: int | None,
) -> Sample:
    numbers = passkeys(haystack, len(names))
    needles = [(depth, needle(number, name)) for depth, name, number in zip(depths, names, numbers, strict=True)]
    question, answers = (asked(*names), numbers) if ask is None else (asked(names[ask]), numbers[ask : ask + 1])

    def build(sentences: Sequence[str]) -> Sample:
        return prompt(INTRODUCTION_OF_MANY, sentences, needles, question, *answers)

    return fit(haystack, build, tokenizer, tokens)


def needle(number: str, *names: str) -> str:
    """The sentences that tell a passkey; they say it twice, as Mohtashami and Jaggi's do."""
    return f"{stated(*names)} {number}. Remember {number}."


def stated(*names: str) -> str:
    """The words before the number of a passkey, or before the numbers of several."""
    of = f" of {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else f" of {names[0]}" if names else ""
    return f"The passkeys{of} are" if len(names) > 1 else f"The passkey{of} is"


def asked(*names: str) -> str:
    """A question for passkeys, up to the first word of the answer."""
    statement = stated(*names)
    subject, verb = statement[1:].rsplit(" ", 1)
    return f"Question: What {verb} t{subject}? Answer: {statement}"


def passkeys(haystack: Haystack, count: int) -> tuple[str, ...]:
    """Different numbers of five digits that the haystack does not hold."""
    found: list[str] = []
    for draw in itertools.count():
        if len(found) == count:
            return tuple(found)
        number = str(10_000 + hash64(haystack.seed, _NUMBERS, draw) % 90_000)
        if number not in found and number not in (haystack.text or ""):
            found.append(number)
    raise AssertionError


def draw_names(haystack: Haystack, count: int) -> tuple[str, ...]:
    """Different names of passkeys.

    Raises:
        DataError: more than there are.
    """
    if not 1 <= count <= len(NAMES):
        raise DataError(f"{count} named passkeys: there are names for 1 to {len(NAMES)}.")
    seed = hash64(haystack.seed, _WHICH_NAMES)
    return tuple(NAMES[shuffled(number, len(NAMES), seed)] for number in range(count))


def fraction(*values: int) -> float:
    """A number in [0, 1) that follows from integers."""
    return hash64(*values) / 2**64


def _sentence_tokens(sentence: str, tokenizer: Tokenizer) -> int:
    return len(tokenizer.encode(f" {sentence}"))


@lru_cache(maxsize=1)
def _split(text: str) -> tuple[str, ...]:
    """A text's sentences, without the white space between them."""
    parts = re.split(r"(?<=[.!?])\s+|\s*\n\s*|(?<=[。！？])", text)
    return tuple(piece for part in parts for piece in textwrap.wrap(part, _LONGEST_SENTENCE))
