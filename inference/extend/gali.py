"""GALI: greedy attention logit interpolation (Li et al., 2025), as in the authors' code (github.com/AcademyCityL/GALI)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from farsight.errors import ConfigError
from farsight.inference.extend.fixed import FixedMap, FixedMethod, causal
from farsight.inference.extend.remapped import Distances, Region


@dataclass(frozen=True)
class Gali(FixedMethod):
    """In a sequence of more than P tokens, they take the positions 0 … P − 1 and, starting from the first and only as far as
    needed, fractions between them; the last `local` positions stay whole. A logit between two whole relative positions is
    interpolated from their logits, with normal noise in proportion to the distance.

    The first P tokens of a prompt are read together, the rest in chunks, each with the positions for the length at its end;
    each decoded token has the positions for the length at that token.
    """

    name: ClassVar[str] = "gali"
    interpolated: ClassVar[bool] = True
    chunk: int = 0
    """Tokens of a prompt that share their positions. 0: 3,000, as in the authors' settings, or P if that is less."""
    local: int = 0
    """Whole positions at the end. 0: 128, as in the authors' settings, or a quarter of P if that is less."""
    noise: float = 1.0
    """Standard deviation of the noise at a distance of the whole length; 0 adds none."""
    seed: int = 0
    """Seed of the noise."""
    limit: int = 0
    """P. 0: the trained window, as in the paper."""

    def positions(self, window: int, prompt: int, length: int) -> FixedMap:
        limit = self.limit or window
        chunk = self.chunk or min(3000, limit)
        local = self.local or min(128, limit // 4)
        if not 1 <= limit <= window or chunk < 1 or not 0 <= local < limit or self.noise < 0:
            raise ConfigError(
                f"--extend gali: limit = {limit} must be 1 to {window:,}, the tokens that the model was trained on, chunk = "
                f"{chunk} at least 1, local = {local} less than the limit, and noise = {self.noise:g} at least 0."
            )
        return GreedyPositions(limit, chunk, local, self.noise, prompt)


@dataclass(frozen=True)
class GreedyPositions:
    """GALI's relative positions."""

    window: int
    chunk: int
    local: int
    noise: float
    prompt: int

    def absolute(self, length: int, device: torch.device) -> Tensor:
        """Position of each token in a sequence of this length, fp32."""
        whole = torch.arange(min(length, self.window), dtype=torch.float32, device=device)
        if length <= self.window:
            return whole
        parts = -(-(length - self.local) // (self.window - self.local))  # fewest parts of a position that suffice
        cut = -(-(length - self.window) // (parts - 1))  # positions that must be cut into parts
        index = torch.arange(length - (self.window - cut), device=device)
        return torch.cat((index // parts + (index % parts).float() / parts, whole[cut:]))

    def regions(self, first: int, stop: int, device: torch.device) -> Iterator[Region]:
        begin = first
        while begin < stop:
            end = self.window
            if begin >= end:
                end += ((begin - end) // self.chunk + 1) * self.chunk
            length = min(end, self.prompt)
            end = min(end, stop)
            queries, keys = torch.arange(begin, end, device=device), torch.arange(end, device=device)
            positions = self.absolute(length, device)
            noise = self._noise(queries[:, None] - keys, positions[:end], length)
            at = positions[begin:end].ceil()
            yield Region(
                slice(begin - first, end - first), slice(0, end), at, positions[:end], causal(queries, keys), noise
            )
            begin = end

    def distances(self, query: int, device: torch.device) -> Distances:
        positions = self.absolute(query + 1, device)
        distances = torch.arange(query, -1, -1, device=device)
        return Distances(positions[-1].ceil() - positions, self._noise(distances, positions, query + 1))

    def _noise(self, distances: Tensor, positions: Tensor, length: int) -> Tensor | None:
        """Standard deviation of the noise on interpolated logits; None without noise."""
        if not self.noise or length <= self.window:
            return None
        return distances / length * self.noise * (positions % 1 != 0)
