"""From logits to the next token: greedy, or drawn at a temperature from the most likely tokens.

Shape suffixes: B rows, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen."""

    temperature: float = 0.0
    """Divides the logits; 0 takes the most likely token."""
    top_p: float = 1.0
    """Draw from the fewest tokens whose probabilities sum to this (nucleus sampling, Holtzman et al., 2020)."""
    seed: int = 0
    """Of the first row; each further row draws from the next seed, so that a row equals its own single run."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}: set 0 for greedy, or a positive number such as 0.8")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: set a share of 1, above 0")

    def generators(self, rows: Sequence[int]) -> list[torch.Generator]:
        """A source of random numbers for each row, by the row's number."""
        return [torch.Generator().manual_seed(self.seed + row) for row in rows]


GREEDY = Sampling()


def choose(logits_BV: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]) -> Tensor:
    """The next token of each row, int64 [B] on the CPU; draws there, so that a seed means the same on every device."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1).cpu()
    probabilities_BV = (logits_BV.float().cpu() / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        ordered_BV, tokens_BV = probabilities_BV.sort(dim=-1, descending=True)
        before_BV = ordered_BV.cumsum(-1) - ordered_BV  # the most likely token stays in any case
        probabilities_BV = torch.zeros_like(probabilities_BV).scatter(
            1, tokens_BV, ordered_BV.masked_fill(before_BV >= sampling.top_p, 0)
        )
    drawn = [
        torch.multinomial(probabilities_V, 1, generator=generator)
        for probabilities_V, generator in zip(probabilities_BV, generators, strict=True)
    ]
    return torch.cat(drawn)
