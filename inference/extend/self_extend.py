"""Self-Extend (Jin et al., 2024): exact distances nearby, whole groups of tokens at one position farther away."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from farsight.errors import ConfigError
from farsight.inference.extend.fixed import FixedMap, FixedMethod, causal
from farsight.inference.extend.remapped import Distances, Region


@dataclass(frozen=True)
class SelfExtend(FixedMethod):
    """Relative position of query i and key j: i − j within the neighbour window w, else ⌊i/G⌋ + w − ⌊w/G⌋ − ⌊j/G⌋ (section 3
    and algorithm 1; the official code divides w/G without rounding, the same where G divides w)."""

    name: ClassVar[str] = "self_extend"
    group: int = 0
    """G. 0: the smallest group that keeps w + (length − w)/G within `share` of the trained window, and every position in it."""
    window: int = 0
    """w in tokens. 0: a quarter of the trained window, at most 1,024."""
    share: float = 2 / 3
    """Share of the trained window that a group of 0 aims to use; the authors advise 1/2 to 2/3 (README of their code)."""

    def positions(self, window: int, prompt: int, length: int) -> FixedMap:
        neighbours = self.window or max(1, min(1024, window // 4))
        if not 0 < neighbours < self.share * window <= window:
            raise ConfigError(
                f"--extend self_extend: window = {neighbours} and share = {self.share:g} leave nothing of the trained "
                f"{window:,} tokens for groups; set a smaller window, and a share of at most 1."
            )

        def farthest(group: int) -> int:
            return (length - 1) // group + neighbours - neighbours // group

        least = max(1, math.ceil((length - neighbours) / (self.share * window - neighbours)))
        while farthest(least) >= window:  # the formula does not account for rounding to whole groups
            least += 1
        group = self.group or least
        if group < 1 or farthest(group) >= window:
            reached = f"{farthest(group):,}" if group > 0 else "nowhere"
            raise ConfigError(
                f"--extend self_extend: with group = {group} the {length:,} tokens reach position {reached}, and the "
                f"model was trained on {window:,} tokens; set group to {least} or more."
            )
        return Grouped(group, neighbours)


@dataclass(frozen=True)
class Grouped:
    """Self-Extend's relative positions."""

    group: int
    window: int

    @property
    def shift(self) -> int:
        """Added to the queries' groups, so that grouped positions continue where the neighbours' end."""
        return self.window - self.window // self.group

    def regions(self, first: int, stop: int, device: torch.device) -> Iterator[Region]:
        queries, keys = torch.arange(first, stop, device=device), torch.arange(stop, device=device)
        every = slice(0, stop - first)
        near = max(0, first - self.window + 1)
        seen = causal(queries, keys[near:]) & (queries[:, None] - keys[near:] < self.window)
        yield Region(every, slice(near, stop), queries, keys[near:], seen)
        far = stop - self.window
        if far > 0:
            seen = queries[:, None] - keys[:far] >= self.window
            yield Region(every, slice(0, far), queries // self.group + self.shift, keys[:far] // self.group, seen)

    def distances(self, query: int, device: torch.device) -> Distances:
        keys = torch.arange(query + 1, device=device)
        grouped = query // self.group + self.shift - keys // self.group
        return Distances(torch.where(query - keys < self.window, query - keys, grouped).float())
