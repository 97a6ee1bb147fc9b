"""The plane of a head's drift with position and of the separation between its queries and keys (plasticity thesis, section 4.3).

Scores are q·k, before the division by √H. Shapes: T tokens, H head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """A head's drift axis a, its separation axis b, and the figures measured along them."""

    a_H: Tensor
    """Unit vector; no direction orthogonal to it has a covariance with position (equation 4.3)."""
    b_H: Tensor
    """Unit vector orthogonal to a along which queries and keys lie furthest apart (equation 4.5)."""
    query_correlation: float
    """r_q: correlation of the queries' projection on a with position."""
    key_correlation: float
    """r_k: the same of the keys."""
    query_mean: float
    """μ_Q^a: mean of the queries' projection on a."""
    key_slope: float
    """α_K: growth per token of the keys' projection on a."""
    separation: float
    """Distance from the keys' centre to the queries', along b."""
    query_bias: float
    """Mean query · the keys' own drift, in whatever direction it is: the score that a key one token later gains."""
    key_drift: float
    """Length of the keys' own drift per token."""
    drift_cosine: float
    """Cosine between that drift and a: small where queries and keys drift differently, so that a misses the keys' drift."""
    query_linear_share: float
    """Share of the queries' variance that is linear in position."""
    key_linear_share: float
    plane_share: float
    """Share of the variance of queries and keys together that lies in the plane of a and b."""

    @property
    def bias_strength(self) -> float:
        """μ_Q^a · α_K: how much the mean query's score grows per token by which a key comes later (equation 4.6).

        Positive is recency. The thesis speaks of smaller positions being favoured, but the score grows with position.
        """
        return self.query_mean * self.key_slope


def covariance_with(x_TH: Tensor, t_T: Tensor) -> Tensor:
    """Covariance of each dimension with t: [H]."""
    return ((t_T - t_T.mean())[:, None] * (x_TH - x_TH.mean(0))).mean(0)


def planar_rotation(q_TH: Tensor, k_TH: Tensor, positions_T: Tensor) -> Rotation:
    """Fits the plane of a head.

    Args:
        q_TH, k_TH: fp64, of the same tokens.
        positions_T: positions of the tokens in their sequences.

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
    """Pearson correlation; 0 if either is constant."""
    scale = x_T.std(correction=0) * t_T.std(correction=0)
    return float(covariance_with(x_T[:, None], t_T)[0] / scale) if scale > 0 else 0.0


def _linear_share(x_TH: Tensor, t_T: Tensor) -> float:
    total = x_TH.var(0, correction=0).sum() * t_T.var(correction=0)
    return float(covariance_with(x_TH, t_T).square().sum() / total) if total > 0 else 0.0


def _unit(x_H: Tensor) -> Tensor:
    """x divided by its length; the first axis if x is 0."""
    return x_H / x_H.norm() if x_H.norm() > 0 else torch.eye(1, len(x_H), dtype=x_H.dtype, device=x_H.device)[0]


def _orthogonal(x_H: Tensor, a_H: Tensor) -> Tensor:
    """Unit vector along the part of x that is orthogonal to the unit vector a.

    If that part is only rounding error, the coordinate axis least aligned with a stands in for x.
    """
    rest_H = x_H - (x_H @ a_H) * a_H
    if rest_H.norm() <= 1e-12 * x_H.norm():
        rest_H = torch.zeros_like(x_H)
        rest_H[int(a_H.abs().argmin())] = 1.0
    # Twice, because after cancellation a short remainder is mostly rounding error.
    rest_H = rest_H / rest_H.norm()
    return _unit(rest_H - (rest_H @ a_H) * a_H)
