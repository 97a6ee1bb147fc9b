"""Principal components of a head's queries and keys, and the class of a head by the first (plasticity thesis, section 4.2).

Shapes: T tokens, H head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from farsight.analysis.geometry.rotation import correlation

LOW, HIGH = 0.3, 0.7
"""Correlations with position below LOW count as none, above HIGH as strong."""
PAPER_CLASSES = ("position-dominated", "Q-positional", "content-focused", "mixed")
CLASSES = (*PAPER_CLASSES[:2], "K-positional", *PAPER_CLASSES[2:])


@dataclass(frozen=True)
class Component:
    """A principal direction of queries and keys together."""

    direction_H: Tensor
    share: float
    """Its share of the variance of queries and keys together."""
    query_correlation: float
    """r_q: correlation of the queries along it with position. Of r_q and r_k, the larger in magnitude is positive."""
    key_correlation: float
    """r_k: the same of the keys."""


def principal_components(q_TH: Tensor, k_TH: Tensor, positions_T: Tensor, most: int) -> list[Component]:
    """The first components of the pooled queries and keys, by variance.

    Args:
        q_TH, k_TH: fp64, of the same tokens.
        most: number of components; at most H are returned.
    """
    pool = torch.cat([q_TH, k_TH])
    variances_H, directions_HH = torch.linalg.eigh(pool.T.cov(correction=0))
    total, t_T = variances_H.sum(), positions_T.to(q_TH.dtype)
    found = []
    for number in range(1, min(most, len(variances_H)) + 1):  # eigh sorts from the smallest
        v_H = directions_HH[:, -number]
        r_q, r_k = correlation(q_TH @ v_H, t_T), correlation(k_TH @ v_H, t_T)
        sign = -1.0 if (r_q if abs(r_q) >= abs(r_k) else r_k) < 0 else 1.0
        share = float(variances_H[-number] / total) if total > 0 else 0.0
        found.append(Component(sign * v_H, share, sign * r_q, sign * r_k))
    return found


def head_class(query_correlation: float, key_correlation: float) -> str:
    """One of CLASSES, by r_q and r_k on the first component: those of section 4.2.2, and K-positional, which it leaves out."""
    queries, keys = abs(query_correlation), abs(key_correlation)
    if queries > HIGH:
        return "position-dominated" if keys > HIGH else "Q-positional"
    if keys > HIGH:
        return "K-positional"
    return "content-focused" if queries < LOW and keys < LOW else "mixed"


def paper_class(name: str) -> str:
    """The same as one of PAPER_CLASSES: the thesis counts K-positional heads as mixed."""
    return "mixed" if name == "K-positional" else name
