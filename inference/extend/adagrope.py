"""AdaGroPE (Xu et al., 2025): the farther away a relative position, the more tokens share it, as far as the length requires.

The authors' code is not public and the paper's text was not available. This follows a published summary (its principles, r_n, P,
r and the window r·P); the pieces below are the only arrangement that satisfies all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from farsight.errors import ConfigError
from farsight.inference.extend.fixed import FixedMap, FixedMethod
from farsight.inference.extend.remapped import Distances, Region


@dataclass(frozen=True)
class AdaGroPE(FixedMethod):
    """Distributes P positions over the distances of a sequence. The number of tokens at a position never falls with distance, is
    as small as the length allows, and grows for the farthest positions first; at least ⌊r·P/n⌋ positions keep n tokens for
    n = 1, 2, 4, 8, …, those with n = 1 being the window of exact distances.

    A prompt is read with the positions for its own length, each decoded token with those for the length at that token.
    """

    name: ClassVar[str] = "adagrope"
    limit: int = 0
    """P. 0: the trained window, as in the paper's language modelling; its other tasks use half of it."""
    ratio: float = 0.25
    """r."""

    def positions(self, window: int, prompt: int, length: int) -> FixedMap:
        limit = self.limit or window
        if not 1 <= limit <= window or not 0 < self.ratio < 0.5:
            raise ConfigError(
                f"--extend adagrope: limit = {limit} must be 1 to {window:,}, the tokens that the model was trained on, and "
                f"ratio = {self.ratio:g} between 0 and 0.5, so that some positions are left for more than it keeps."
            )
        return AdaptiveGroups(limit, self.ratio, prompt)


class Piece(NamedTuple):
    """Consecutive positions shared by the same number of tokens each."""

    tokens: int
    """Tokens at each position."""
    positions: int


def pieces(length: int, limit: int, ratio: float) -> list[Piece]:
    """The pieces from nearest to farthest, which hold `length` tokens together, or `limit` if that is more."""
    kept: list[Piece] = []
    covered, left, most = 0, limit, 1  # tokens in the kept pieces; positions left, and tokens at each of those
    while covered + left * most < length:
        reserved = int(limit * ratio / most) if most & (most - 1) == 0 else 0
        # Does the length fit with `most` + 1 tokens at every position left except the reserved ones?
        if covered + reserved * most + (left - reserved) * (most + 1) >= length:
            more = length - covered - left * most
            return [p for p in (*kept, Piece(most, left - more), Piece(most + 1, more)) if p.positions]
        kept.append(Piece(most, reserved))
        covered, left, most = covered + reserved * most, left - reserved, most + 1
    return [p for p in (*kept, Piece(most, left)) if p.positions]


@dataclass(frozen=True)
class AdaptiveGroups:
    """AdaGroPE's relative positions."""

    limit: int
    ratio: float
    prompt: int

    def regions(self, first: int, stop: int, device: torch.device) -> Iterator[Region]:
        """⌊(i − j − d)/n⌋ is a difference of two positions among queries with the same i mod n, which form a region."""
        queries, keys = torch.arange(first, stop, device=device), torch.arange(stop, device=device)
        nearest, position = 0, 0
        for n, number in pieces(self.prompt, self.limit, self.ratio):
            farthest = nearest + n * number
            span = slice(max(0, first - farthest + 1), max(0, stop - nearest))
            for offset in range(min(n, stop - first) if span.stop > span.start else 0):
                some = slice(offset, None, n)
                i, j = queries[some], keys[span]
                rest = (first + offset) % n
                distances = i[:, None] - j
                seen = (distances >= nearest) & (distances < farthest)
                yield Region(some, span, i // n + position, -((rest - j - nearest) // n), seen)
            nearest, position = farthest, position + number

    def distances(self, query: int, device: torch.device) -> Distances:
        tokens, numbers = zip(*pieces(query + 1, self.limit, self.ratio), strict=True)
        counts = torch.repeat_interleave(torch.tensor(tokens), torch.tensor(numbers))
        by_distance = torch.repeat_interleave(torch.arange(self.limit), counts)[: query + 1]
        return Distances(by_distance.flip(0).float().to(device))
