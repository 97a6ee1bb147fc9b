"""The plane in which a head's positions and its queries' distance from its keys lie (plasticity thesis, section 4.3).

Scores are q·k, before they are divided by √H. Shapes: T tokens, H head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """A head's drift axis a, its separation axis b, and what they measure."""

    a_H: Tensor
    """Unit vector; no direction orthogonal to it has a covariance with position (equation 4.3)."""
    b_H: Tensor
    """Unit vector orthogonal to a along which queries and keys lie furthest apart (equation 4.5)."""
    query_correlation: float
    """r_q: of the queries on a with position."""
    key_correlation: float
    """r_k."""
    query_mean: float
    """μ_Q^a: of the queries on a."""
    key_slope: float
    """α_K: what keys gain on a with each token."""
    separation: float
    """From the keys' centre to the queries', along b."""
    query_bias: float
    """Mean query times the drift that keys have by themselves, whatever its direction: what a key a token later gains."""
    key_drift: float
    """Length of that drift, per token."""
    drift_cosine: float
    """Between it and a: small where queries and keys drift apart, so that a misses it."""
    query_linear_share: float
    """Of the queries' variance, what is linear in position."""
    key_linear_share: float
    plane_share: float
    """Of the variance of queries and keys together, what lies in the plane of a and b."""

    @property
    def bias_strength(self) -> float:
        """μ_Q^a · α_K: what the mean query's score gains with each token by which a key comes later (equation 4.6). Positive
        is recency: larger positions are favoured, whichever way the thesis words it."""
        return self.query_mean * self.key_slope


def covariance_with(x_TH: Tensor, t_T: Tensor) -> Tensor:
    """[H]: of each dimension with t."""
    return ((t_T - t_T.mean())[:, None] * (x_TH - x_TH.mean(0))).mean(0)


def planar_rotation(q_TH: Tensor, k_TH: Tensor, positions_T: Tensor) -> Rotation:
    """The plane of a head.

    Args:
        q_TH, k_TH: fp64, of the same tokens.
        positions_T: of the tokens in their sequences.

    Raises:
        ValueError: all tokens at one position.
    """
    t_T = positions_T.to(q_TH.dtype)
    spread = t_T.var(correction=0)
    if not spread > 0:
        raise ValueError(f"all {len(t_T)} tokens are at one position: a drift needs two")
    pool, both = torch.cat([q_TH, k_TH]), torch.cat([t_T, t_T])
    a = _unit(covariance_with(pool, both))
    apart = q_TH.mean(0) - k_TH.mean(0)
    b = _orthogonal(apart, a)
    q_a, k_a = q_TH @ a, k_TH @ a
    drift = covariance_with(k_TH, t_T) / spread
    total = pool.var(0, correction=0).sum()
    in_plane = (pool @ torch.stack([a, b], 1)).var(0, correction=0).sum()
    return Rotation(
        a_H=a,
        b_H=b,
        query_correlation=correlation(q_a, t_T),
        key_correlation=correlation(k_a, t_T),
        query_mean=float(q_a.mean()),
        key_slope=float(covariance_with(k_a[:, None], t_T)[0] / spread),
        separation=float(apart @ b),
        query_bias=float(q_TH.mean(0) @ drift),
        key_drift=float(drift.norm()),
        drift_cosine=float(drift @ a / drift.norm()) if drift.norm() > 0 else 0.0,
        query_linear_share=_linear_share(q_TH, t_T),
        key_linear_share=_linear_share(k_TH, t_T),
        plane_share=float(in_plane / total) if total > 0 else 0.0,
    )


def correlation(x_T: Tensor, t_T: Tensor) -> float:
    """Pearson's; 0 where either does not vary."""
    scale = x_T.std(correction=0) * t_T.std(correction=0)
    return float(covariance_with(x_T[:, None], t_T)[0] / scale) if scale > 0 else 0.0


def _linear_share(x_TH: Tensor, t_T: Tensor) -> float:
    total = x_TH.var(0, correction=0).sum() * t_T.var(correction=0)
    return float(covariance_with(x_TH, t_T).square().sum() / total) if total > 0 else 0.0


def _unit(x_H: Tensor) -> Tensor:
    """x over its length. Where that is 0 any direction does: the first axis."""
    return x_H / x_H.norm() if x_H.norm() > 0 else torch.eye(1, len(x_H), dtype=x_H.dtype, device=x_H.device)[0]


def _orthogonal(x_H: Tensor, a_H: Tensor) -> Tensor:
    """Unit vector along what a unit vector leaves of x. Where that is nothing, or error, the axis that a is farthest from."""
    rest_H = x_H - (x_H @ a_H) * a_H
    if rest_H.norm() <= 1e-12 * x_H.norm():
        rest_H = torch.zeros_like(x_H)
        rest_H[int(a_H.abs().argmin())] = 1.0
    # Twice, for rounding: what is left of a short vector is mostly error.
    rest_H = rest_H / rest_H.norm()
    return _unit(rest_H - (rest_H @ a_H) * a_H)
