"""Principal components of a head's queries and keys, and what a head is called by the first (plasticity thesis, section 4.2).

Shapes: T tokens, H head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from farsight.analysis.geometry.rotation import correlation

LOW, HIGH = 0.3, 0.7
"""Correlations with position that count as none, and as much."""
PAPER_CLASSES = ("position-dominated", "Q-positional", "content-focused", "mixed")
CLASSES = (*PAPER_CLASSES[:2], "K-positional", *PAPER_CLASSES[2:])


@dataclass(frozen=True)
class Component:
    """A direction along which queries and keys together vary."""

    direction_H: Tensor
    share: float
    """Of the variance of queries and keys together."""
    query_correlation: float
    """r_q: of the queries along it with position. The larger of r_q and r_k, in size, is positive."""
    key_correlation: float
    """r_k."""


def principal_components(q_TH: Tensor, k_TH: Tensor, positions_T: Tensor, most: int) -> list[Component]:
    """The first components of the pooled queries and keys, by variance.

    Args:
        q_TH, k_TH: fp64, of the same tokens.
        most: components; no more than H come back.
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
    """One of CLASSES, by r_q and r_k on the first component: section 4.2.2's, and the one that it leaves out."""
    queries, keys = abs(query_correlation), abs(key_correlation)
    if queries > HIGH:
        return "position-dominated" if keys > HIGH else "Q-positional"
    if keys > HIGH:
        return "K-positional"
    return "content-focused" if queries < LOW and keys < LOW else "mixed"


def paper_class(name: str) -> str:
    """The same among PAPER_CLASSES: the thesis counts K-positional heads as mixed."""
    return "mixed" if name == "K-positional" else name
