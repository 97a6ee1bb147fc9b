"""Valid ranges of numbers, declared with their type: `lr: Annotated[float, Range(above=0)]`."""

import math
from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, kw_only=True)
class Range:
    """A range of numbers. Infinities and NaN are in no range."""

    least: float = -math.inf
    """Smallest allowed value."""
    most: float = math.inf
    """Largest allowed value."""
    above: float = -math.inf
    """Values must be greater than this."""
    below: float = math.inf
    """Values must be smaller than this."""
    also: float | None = None
    """One more allowed value with a special meaning, such as -1 for all."""

    def problem(self, value: float) -> str | None:
        """Returns the rest of an error message that starts with the value ("must be more than 0"), or None if it is in range."""
        if isinstance(value, int) and abs(value) >= 2**63:
            return "must fit into 64 bits"
        if not math.isfinite(value):
            return "must be a finite number"
        if value == self.also or (self.least <= value <= self.most and self.above < value < self.below):
            return None
        return f"must be {self}"

    def __str__(self) -> str:
        """The range in words, such as "at least 0 and less than 1"; "finite" without bounds."""
        bounds = (
            ("at least", self.least),
            ("more than", self.above),
            ("at most", self.most),
            ("less than", self.below),
        )
        said = " and ".join(f"{words} {_written(bound)}" for words, bound in bounds if math.isfinite(bound)) or "finite"
        return said if self.also is None else f"{said}, or {_written(self.also)}"


def _written(bound: float) -> str:
    return f"{int(bound):,}" if bound == int(bound) else f"{bound:g}"


FINITE = Range()
Count = Annotated[int, Range(least=0)]
"""0, 1, 2, …"""
Size = Annotated[int, Range(least=1)]
"""1, 2, 3, …"""
Positive = Annotated[float, Range(above=0)]
NonNegative = Annotated[float, Range(least=0)]
Share = Annotated[float, Range(least=0, most=1)]
"""A share of a whole, from 0 to all of it."""
PartialShare = Annotated[float, Range(least=0, below=1)]
"""A share of a whole that leaves some over."""
SizeOrAuto = Annotated[int, Range(least=1, also=-1)]
"""1, 2, 3, …, or −1 for a value derived from other settings."""
Dim = Annotated[int, Range(least=1, most=2**20)]
"""A dimension of a model; larger values are typing errors, and their products would overflow."""
