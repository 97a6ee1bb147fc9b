"""Chooses the next token from logits: the most likely one, or a random one by temperature and nucleus sampling.

Shape suffixes: B rows, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Settings for choosing the next token."""

    temperature: float = 0.0
    """Divides the logits; 0 takes the most likely token."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens whose probabilities sum to this (nucleus sampling, Holtzman et al., 2020)."""
    seed: int = 0
    """Seed of the first row. Each further row takes the next seed, so that a row comes out as it would alone with that seed."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}: set 0 for greedy, or a positive number such as 0.8")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: set a share of 1, above 0")

    def generators(self, rows: Sequence[int]) -> list[torch.Generator]:
        """A random number generator for each row, seeded by the row's number."""
        return [self.of_row(row).generator() for row in rows]

    def of_row(self, row: int) -> "Sampling":
        """The settings for a row alone."""
        return dataclasses.replace(self, seed=self.seed + row)

    def generator(self) -> torch.Generator:
        """The random number generator of the first row."""
        return torch.Generator().manual_seed(self.seed)


GREEDY = Sampling()


def choose(logits_BV: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> Tensor:
    """The next token of each row, int64 [B], on the CPU if drawn, so that a seed gives the same tokens on every device."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    probabilities_BV = (logits_BV.float().cpu() / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        ordered_BV, tokens_BV = probabilities_BV.sort(dim=-1, descending=True)
        before_BV = ordered_BV.cumsum(-1) - ordered_BV  # 0 for the most likely token, which is always kept
        probabilities_BV = torch.zeros_like(probabilities_BV).scatter(
            1, tokens_BV, ordered_BV.masked_fill(before_BV >= sampling.top_p, 0)
        )
    drawn = [
        torch.multinomial(probabilities_V, 1, generator=generator)
        for probabilities_V, generator in zip(probabilities_BV, generators, strict=True)
    ]
    return torch.cat(drawn)
