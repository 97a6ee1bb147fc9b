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
    """Past the trained window W, tokens take the positions 0 … W − 1 and, starting from the first and only as far as needed,
    fractions between them; the last `local` positions stay whole. A logit between two whole relative positions is interpolated
    from their logits, with normal noise in proportion to the distance.

    The first W tokens of a prompt are read together, the rest in chunks, each with the positions for the length at its end;
    each decoded token has the positions for the length at that token.
    """

    name: ClassVar[str] = "gali"
    interpolated: ClassVar[bool] = True
    chunk: int = 0
    """Tokens of a prompt that share their positions. 0: 3,000, as in the authors' settings, or W if that is less."""
    local: int = 0
    """Whole positions at the end. 0: 128, as in the authors' settings, or a quarter of W if that is less."""
    noise: float = 1.0
    """Standard deviation of the noise at a distance of the whole length; 0 adds none."""
    seed: int = 0
    """Seed of the noise."""

    def positions(self, window: int, prompt: int, length: int) -> FixedMap:
        chunk = self.chunk or min(3000, window)
        local = self.local or min(128, window // 4)
        if chunk < 1 or not 0 <= local < window or self.noise < 0:
            raise ConfigError(
                f"--extend gali: chunk = {chunk} must be at least 1, local = {local} less than the {window:,} tokens that "
                f"the model was trained on, and noise = {self.noise:g} at least 0."
            )
        return GreedyPositions(window, chunk, local, self.noise, prompt)


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
