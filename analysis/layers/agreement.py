"""Agreement of two profiles of a model's layers: rank correlation, and the overlap of their top layers."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
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


def p_value(correlation: float | None, n: int) -> float | None:
    """Two-sided p-value of a rank correlation of n layers, if their ranks were unrelated; None without a correlation, or for n < 3.

    By Student's t with n − 2 degrees of freedom, as in scipy: t = r·sqrt((n − 2) / (1 − r²)). In terms of r = cos φ, that is the integral
    of sin^(n − 3) from 0 to φ, over half of that from 0 to π; here by Gauss's quadrature, so that small values are exact too.
    """
    if correlation is None or n < 3:
        return None
    half = math.acos(min(1.0, abs(correlation))) / 2
    places, weights = np.polynomial.legendre.leggauss(64)
    tail = half * float(weights @ np.sin(half * (places + 1)) ** (n - 3))
    return min(1.0, 2 * tail / math.exp(math.lgamma(0.5) + math.lgamma((n - 2) / 2) - math.lgamma((n - 1) / 2)))


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
