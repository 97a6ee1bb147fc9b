"""Needles in a haystack: prompts of an exact length that ask for something hidden in their text.

A haystack is endless text, generated from a seed or read from a user's file. A task's `build` makes a prompt from a number of
its sentences, and `fit` finds the number that fills a given length in tokens, for any tokenizer:

    haystack = Haystack(seed=7)
    sample = passkey(haystack, tokenizer, tokens=4096, depth=0.3)

All random draws (numbers, names) depend only on the haystack's seed, so a seed gives the same question at every length and
depth. Depth is a fraction of the haystack's characters: 0 before its first sentence, 1 after its last.
"""

import itertools
import re
import textwrap
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from farsight.data.order import hash64, shuffled
from farsight.data.tokenizers.tokenizer import Tokenizer
from farsight.errors import DataError

NAMES = (
    "amber", "cobalt", "crimson", "emerald", "indigo", "ivory", "jade", "lilac", "maroon", "ochre", "olive", "pearl",
    "ruby", "saffron", "scarlet", "silver", "teal", "topaz", "umber", "violet",
)  # fmt: skip
"""Names of passkeys; none is a word of a generated haystack."""

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
"""A sentence's words: fixed, or drawn from a list."""

_LONGEST_SENTENCE = 400
"""Most characters in a sentence of a user's text; longer ones are cut."""

_TAILS = 64
"""Number of sentences to try for the end of a haystack."""

_NUMBERS, _WHICH_NAMES, _SENTENCES = 1, 2, 3
"""Separate the random draws from one seed."""


@dataclass(frozen=True)
class Sample:
    """A prompt with its expected answers; evaluations generate from it, and `documents.py` trains on such texts."""

    prompt: str
    """Ends where the answer follows, after a space."""
    answers: tuple[str, ...]
    evidence: tuple[tuple[int, int], ...]
    """Character span (begin, end) of each needle in the prompt, in order of position."""


class Haystack:
    """Endless text, sentence by sentence.

    Args:
        seed: generates the text, or selects the first sentence of a given text.
        text: the user's text, split into sentences; it repeats after its end.

    Raises:
        DataError: `text` is empty.
    """

    def __init__(self, seed: int, text: str | None = None):
        self.seed = seed
        self.text = text
        self._own = None if text is None else _split(text)
        if self._own is not None and not self._own:
            raise DataError("the haystack's text is empty; give a file with text, or none to generate it.")

    def sentence(self, number: int) -> str:
        """Sentence `number`, counted from 0."""
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
"""Makes a prompt from the sentences of a haystack."""


def place(sentences: Sequence[str], needles: Sequence[tuple[float, str]]) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Inserts needles between sentences, each at the boundary nearest to its depth.

    Args:
        needles: depth and text of each. At the same boundary they are ordered by depth, then as in the list.

    Returns:
        The text, and each needle's character span (begin, end) in it, in the order of the list.

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
    """A prompt made of an introduction, a haystack with needles, and a question, separated by blank lines.

    Args:
        needles: depth and text of each.
        question: ends with the words before the answer.
    """
    text, spans = place(sentences, needles)
    start = len(introduction) + 2
    evidence = tuple(sorted((first + start, stop + start) for first, stop in spans))
    return Sample(f"{introduction}\n\n{text}\n\n{question}", answers, evidence)


def answer_tokens(sample: Sample, tokenizer: Tokenizer) -> int:
    """Number of tokens of the answers, written with commas between them and a full stop; bounds what is generated."""
    return len(tokenizer.encode(f" {', '.join(sample.answers)}."))


def count_tokens(sample: Sample, tokenizer: Tokenizer) -> int:
    """Number of tokens of a sample's prompt, with bos if the tokenizer has one, and of its answers."""
    return (tokenizer.bos_id is not None) + len(tokenizer.encode(sample.prompt)) + answer_tokens(sample, tokenizer)


def most(size: Callable[[int], int], limit: int) -> int:
    """The largest n ≥ 0 with size(n) ≤ limit, for a size that grows roughly linearly; few calls are made.

    Raises:
        DataError: size(0) is too large.
    """
    low, least = 0, size(0)
    if least > limit:
        raise DataError(f"{limit:,} tokens are too few: without any haystack the prompt and its answer take {least:,}.")
    at_low, high, rate = least, 0, 0.0
    while not high or high - low > 1:
        # The interpolated value, or one more if the last guess fitted: this closes in from both sides.
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
    """The sample with as many haystack sentences as fit into `tokens` tokens, bos and answer included (`count_tokens`).

    To fill the length, the last sentence is replaced by one or two of the following ones. This usually gives exactly `tokens`
    tokens; otherwise the sample is as near as whole sentences allow.

    Raises:
        DataError: the prompt needs more tokens even without a haystack.
    """
    count = most(lambda n: count_tokens(build(haystack.sentences(n)), tokenizer), tokens)
    sentences = haystack.sentences(count)
    sample = build(sentences)
    missing = tokens - count_tokens(sample, tokenizer)
    if not missing or not count:
        return sample
    # Token counts of single sentences only suggest a tail; the whole prompt is counted to confirm it.
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
    """A prompt with one five-digit passkey in the haystack (Mohtashami and Jaggi, 2023).

    Args:
        tokens: length of prompt and answer together.
        depth: 0 … 1.
    """
    (number,) = passkeys(haystack, 1)

    def build(sentences: Sequence[str]) -> Sample:
        return prompt(INTRODUCTION, sentences, [(depth, needle(number))], asked(), number)

    return fit(haystack, build, tokenizer, tokens)


def named_passkeys(
    haystack: Haystack, tokenizer: Tokenizer, tokens: int, depths: Sequence[float], ask: int | None = None
) -> Sample:
    """A prompt with several named passkeys in the haystack, which asks for one or all of them.

    Args:
        tokens: length of prompt and answer together.
        depths: depth of each passkey, 0 … 1.
        ask: index of the passkey to ask for; None asks for all.

    Raises:
        DataError: more passkeys than names.
    """
    return _named(haystack, tokenizer, tokens, draw_names(haystack, len(depths)), depths, ask)


def multi_passkey(haystack: Haystack, tokenizer: Tokenizer, tokens: int) -> Sample:
    """A prompt with a passkey at a random place in each quarter of the haystack, which asks for all four (RiPRA, 4.2.3).

    Args:
        tokens: length of prompt and answer together.
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
    """The sentences that state a passkey; twice, as in Mohtashami and Jaggi."""
    return f"{stated(*names)} {number}. Remember {number}."


def stated(*names: str) -> str:
    """The words before a passkey's number, or before several numbers."""
    of = f" of {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else f" of {names[0]}" if names else ""
    return f"The passkeys{of} are" if len(names) > 1 else f"The passkey{of} is"


def asked(*names: str) -> str:
    """A question for passkeys, up to the answer's number."""
    statement = stated(*names)
    subject, verb = statement[1:].rsplit(" ", 1)
    return f"Question: What {verb} t{subject}? Answer: {statement}"


def passkeys(haystack: Haystack, count: int) -> tuple[str, ...]:
    """Distinct five-digit numbers that don't occur in the haystack."""
    found: list[str] = []
    for draw in itertools.count():
        if len(found) == count:
            return tuple(found)
        number = str(10_000 + hash64(haystack.seed, _NUMBERS, draw) % 90_000)
        if number not in found and number not in (haystack.text or ""):
            found.append(number)
    raise AssertionError


def draw_names(haystack: Haystack, count: int) -> tuple[str, ...]:
    """Distinct names of passkeys.

    Raises:
        DataError: `count` exceeds the number of names.
    """
    if not 1 <= count <= len(NAMES):
        raise DataError(f"{count} named passkeys: there are names for 1 to {len(NAMES)}.")
    seed = hash64(haystack.seed, _WHICH_NAMES)
    return tuple(NAMES[shuffled(number, len(NAMES), seed)] for number in range(count))


def fraction(*values: int) -> float:
    """A pseudo-random number in [0, 1), determined by integers."""
    return hash64(*values) / 2**64


def _sentence_tokens(sentence: str, tokenizer: Tokenizer) -> int:
    return len(tokenizer.encode(f" {sentence}"))


@lru_cache(maxsize=1)
def _split(text: str) -> tuple[str, ...]:
    """A text's sentences, without the whitespace between them."""
    parts = re.split(r"(?<=[.!?])\s+|\s*\n\s*|(?<=[。！？])", text)
    return tuple(piece for part in parts for piece in textwrap.wrap(part, _LONGEST_SENTENCE))
