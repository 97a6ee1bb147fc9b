"""Agreement of two profiles of a model's layers: rank correlation, and the overlap of their top layers."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def ranks(values: Sequence[float]) -> Tensor:
    """Ranks from 1, fp64 [n]; equal values share their mean rank."""
    _, which, counts = torch.tensor(values, dtype=torch.float64).unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2).double()[which]


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation with ties; None if all values of a profile are equal.

    Without ties it is GARFA's equation 8.
    """
    assert len(first) == len(second)
    a, b = (r - r.mean() for r in (ranks(first), ranks(second)))
    scale = float(a.norm() * b.norm())
    return float(a @ b) / scale if scale > 0 else None


@dataclass(frozen=True)
class Overlap:
    """The layers two sets share, compared with two random sets of the same sizes (hypergeometric distribution)."""

    layers: tuple[int, ...]
    expected: float
    at_most: float
    """Chance of sharing at most this many layers."""
    at_least: float
    """Chance of sharing at least this many layers."""

    @classmethod
    def of(cls, first: Collection[int], second: Collection[int], n_layers: int) -> "Overlap":
        a, b, shared = len(first), len(second), tuple(sorted({*first} & {*second}))
        likely = [math.comb(a, s) * math.comb(n_layers - a, b - s) / math.comb(n_layers, b) for s in range(b + 1)]
        return cls(shared, a * b / n_layers, sum(likely[: len(shared) + 1]), sum(likely[len(shared) :]))
