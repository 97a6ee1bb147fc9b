"""Axes of a chart: the place of a value along the axis, and its labelled ticks."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """One axis, from its low end to its high end."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    """Values with their labels; a chart leaves out labels that would touch."""
    title: str
    log: bool = False

    def share(self, value: float) -> float:
        """Position of a value on the axis: 0 at the low end, 1 at the high one."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear_axis(values: Iterable[float], title: str, most: int = 5, snug: bool = False) -> Axis:
    """An axis with about `most` round steps that begins and ends at a tick or, if `snug`, at the extreme values."""
    found = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(found), max(found)
    if low == high:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    step = _round_step((high - low) / most)
    first, last = math.floor(low / step), math.ceil(high / step)
    decimals = next(d for d in range(20) if math.isclose(round(step, d), step, rel_tol=1e-9))
    ticks = tuple((i * step, f"{i * step:,.{decimals}f}") for i in range(first, last + 1))
    if snug:
        return Axis(low, high, tuple((value, label) for value, label in ticks if low <= value <= high), title)
    return Axis(first * step, last * step, ticks, title)


def log_axis(values: Iterable[float], title: str, label: Callable[[float], str], base: int = 10, most: int = 7) -> Axis:
    """A logarithmic axis with ticks at 1, 2 and 5 times each power of ten, at powers only, or at round linear steps."""
    found = [value for value in values if math.isfinite(value) and value > 0] or [1.0, float(base)]
    low, high = _padded(min(found), max(found), base)
    powers = [float(base) ** e for e in range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)]
    choices = [[m * power for power in powers for m in (1, 2, 5)]] if base == 10 else []
    choices += [powers[::every] for every in range(1, len(powers))]
    choices.append([value for value, _ in linear_axis([low, high], "").ticks])
    inside = [[value for value in choice if low <= value <= high] for choice in choices]
    ticks = next((ticks for ticks in inside if 2 <= len(ticks) <= most), inside[-1])
    return Axis(low, high, tuple((value, label(value)) for value in ticks), title, log=True)


def value_axis(values: Sequence[float], title: str, label: Callable[[float], str]) -> Axis:
    """A linear axis, or a logarithmic one where the largest value is more than five times the smallest."""
    found = [value for value in values if math.isfinite(value)]
    if found and min(found) > 0 and max(found) > 5 * min(found):
        return log_axis(found, title, label)
    return linear_axis(found, title)


def length_axis(lengths: Iterable[int], title: str = "context length in tokens") -> Axis:
    """A logarithmic axis with a tick at each length."""
    ticks = sorted(set(lengths))
    low, high = _padded(ticks[0], ticks[-1], 2)
    return Axis(low, high, tuple((length, short_tokens(length)) for length in ticks), title, log=True)


def short_tokens(tokens: float) -> str:
    """512, 4k, 128k, 1M: k and M stand for 1,024 and 1,024²; other numbers are written in full."""
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens / size:.0f}{unit}"
    return f"{tokens:,.0f}"


def _padded(low: float, high: float, base: int) -> tuple[float, float]:
    """Adds a little room at both ends, or half a power of the base on each side of a single value."""
    room = (high / low) ** 0.04 if high > low else math.sqrt(base)
    return low / room, high * room


def _round_step(step: float) -> float:
    """Rounds a step up to 1, 2, 2.5 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(step))
    return next(multiple * power for multiple in (1, 2, 2.5, 5, 10) if multiple * power >= step * (1 - 1e-9))
