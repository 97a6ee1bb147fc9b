"""The tasks of `farsight needle`: their prompts, and how their answers are scored.

Tasks are named as on the command line, with settings after a colon: `variable_tracking:chains=2,hops=6`.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from farsight.configs.typed import from_dict
from farsight.data.retrieval.needles import Haystack, Sample, multi_passkey, named_passkeys, passkey
from farsight.data.retrieval.ruler import any_depths, common_words, frequent_words, multi_value, variable_tracking
from farsight.data.tokenizers.tokenizer import Tokenizer
from farsight.errors import ConfigError, nearest


class Task(ABC):
    """A kind of prompt and its score; the fields of a subclass are its settings."""

    by_depth: ClassVar[bool] = False
    """Whether the depth of the asked needle can be chosen."""

    @abstractmethod
    def sample(self, haystack: Haystack, tokenizer: Tokenizer, tokens: int, depth: float | None) -> Sample:
        """A prompt that, with its answer, has at most `tokens` tokens, and exactly that many if the haystack can fill them.

        Args:
            depth: 0 … 1, for tasks with `by_depth`.

        Raises:
            DataError: fewer tokens than the task needs; names the minimum.
        """

    def score(self, text: str, answers: Sequence[str]) -> float:
        """The score of a model's answer, 0 … 1."""
        return share_found(text, answers)


@dataclass(frozen=True)
class Passkey(Task):
    """A five-digit passkey (Mohtashami and Jaggi, 2023; RULER's single needle)."""

    by_depth = True

    def sample(self, haystack: Haystack, tokenizer: Tokenizer, tokens: int, depth: float | None) -> Sample:
        assert depth is not None
        return passkey(haystack, tokenizer, tokens, depth)

    def score(self, text: str, answers: Sequence[str]) -> float:
        return first_number(text, answers)


@dataclass(frozen=True)
class MultiKey(Passkey):
    """Named passkeys; the prompt asks for one, and the others are at random depths."""

    keys: int = 4

    def __post_init__(self) -> None:
        _at_least_one(self, "keys")

    def sample(self, haystack: Haystack, tokenizer: Tokenizer, tokens: int, depth: float | None) -> Sample:
        assert depth is not None
        return named_passkeys(haystack, tokenizer, tokens, [depth, *any_depths(haystack, self.keys - 1)], ask=0)


@dataclass(frozen=True)
class MultiPasskey(Task):
    """A passkey in each of four segments; correct only if all four are (RiPRA, 4.2.3)."""

    def sample(self, haystack: Haystack, tokenizer: Tokenizer, tokens: int, depth: float | None) -> Sample:
        return multi_passkey(haystack, tokenizer, tokens)

    def score(self, text: str, answers: Sequence[str]) -> float:
        return float(share_found(text, answers) == 1)


@dataclass(frozen=True)
class MultiQuery(Task):
    """Named passkeys; the prompt asks for all of them."""

    keys: int = 4

    def __post_init__(self) -> None:
        _at_least_one(self, "keys")

    def sample(self, haystack: Haystack, tokenizer: Tokenizer, tokens: int, depth: float | None) -> Sample:
        return named_passkeys(haystack, tokenizer, tokens, any_depths(haystack, self.keys))


@dataclass(frozen=True)
class MultiValue(Task):
    """Several passkeys with the same name; the prompt asks for all of them."""

    values: int = 4

    def __post_init__(self) -> None:
        _at_least_one(self, "values")

    def sample(self, haystack: Haystack, tokenizer: Tokenizer, tokens: int, depth: float | None) -> Sample:
        return multi_value(haystack, tokenizer, tokens, self.values)


@dataclass(frozen=True)
class VariableTracking(Task):
    """Variables that receive a value through a chain of assignments."""

    chains: int = 1
    hops: int = 4

    def __post_init__(self) -> None:
        _at_least_one(self, "chains", "hops")

    def sample(self, haystack: Haystack, tokenizer: Tokenizer, tokens: int, depth: float | None) -> Sample:
        return variable_tracking(haystack, tokenizer, tokens, self.chains, self.hops)


@dataclass(frozen=True)
class CommonWords(Task):
    """The ten most frequent words of a list."""

    def sample(self, haystack: Haystack, tokenizer: Tokenizer, tokens: int, depth: float | None) -> Sample:
        return common_words(haystack, tokenizer, tokens)


@dataclass(frozen=True)
class FrequentWords(Task):
    """The three most frequent words of a text with Zipf-like frequencies."""

    def sample(self, haystack: Haystack, tokenizer: Tokenizer, tokens: int, depth: float | None) -> Sample:
        return frequent_words(haystack, tokenizer, tokens)


TASKS: dict[str, type[Task]] = {
    "passkey": Passkey,
    "multikey": MultiKey,
    "multi_passkey": MultiPasskey,
    "multivalue": MultiValue,
    "multiquery": MultiQuery,
    "variable_tracking": VariableTracking,
    "common_words": CommonWords,
    "frequent_words": FrequentWords,
}


def parse_task(text: str) -> Task:
    """Parses the value of `--task`.

    Raises:
        ConfigError: an unknown task or setting, or an invalid value.
    """
    name, _, settings = text.partition(":")
    if name not in TASKS:
        raise ConfigError(f"--task {text}: there is no task {name}.{nearest(name, list(TASKS))}")
    values = {}
    for setting in filter(None, settings.split(",")):
        key, _, value = setting.partition("=")
        if not value.isdecimal():
            raise ConfigError(f"--task {text}: write settings as NAME=NUMBER, e.g. variable_tracking:chains=2,hops=6.")
        values[key] = int(value)
    return from_dict(TASKS[name], values, f"--task {name}")


def share_found(text: str, answers: Sequence[str]) -> float:
    """The share of the answers that occur in the text, ignoring case (RULER's score)."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


def first_number(text: str, answers: Sequence[str]) -> float:
    """1 if the first number in the text is the answer, else 0."""
    found = re.search("[0-9]+", text)
    return float(found is not None and found[0] == answers[0])


def _at_least_one(task: Task, *settings: str) -> None:
    for name in settings:
        if getattr(task, name) < 1:
            raise ValueError(f"{name}={getattr(task, name)} must be 1 or more")
