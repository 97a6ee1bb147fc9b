"""Two profiles of a model's layers compared: rank correlation, the layers that lead each, and how many lead both."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def ranks(values: Sequence[float]) -> Tensor:
    """fp64 [n], from 1; equal values share the mean of theirs."""
    _, which, counts = torch.tensor(values, dtype=torch.float64).unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2).double()[which]


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation with ties; None where all values of a profile are equal.

    GARFA's equation 8 is the same without ties.
    """
    assert len(first) == len(second)
    a, b = (r - r.mean() for r in (ranks(first), ranks(second)))
    scale = float(a.norm() * b.norm())
    return float(a @ b) / scale if scale > 0 else None


@dataclass(frozen=True)
class Overlap:
    """What two sets of layers share, and how likely two random sets of their sizes do (hypergeometric)."""

    layers: tuple[int, ...]
    expected: float
    at_most: float
    """Probability of sharing so many or fewer."""
    at_least: float
    """Of sharing so many or more."""

    @classmethod
    def of(cls, first: Collection[int], second: Collection[int], n_layers: int) -> "Overlap":
        a, b, shared = len(first), len(second), tuple(sorted({*first} & {*second}))
        likely = [math.comb(a, s) * math.comb(n_layers - a, b - s) / math.comb(n_layers, b) for s in range(b + 1)]
        return cls(shared, a * b / n_layers, sum(likely[: len(shared) + 1]), sum(likely[len(shared) :]))
