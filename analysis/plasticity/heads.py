"""A head's plasticity: how likely a random query is to change which of two keys it prefers (plasticity thesis, section 4.4).

Shapes: T sampled tokens, Q of them in one bucket, P pairs of keys, H head dim.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from farsight.analysis.geometry.rotation import covariance_with
from farsight.analysis.plasticity.options import Covariance, Pairs


def normal_cdf(z: Tensor) -> Tensor:
    return 0.5 * torch.erfc(z / -math.sqrt(2))


def pairwise_plasticity(z: Tensor) -> Tensor:
    """4 p (1 − p) with p = Φ(z): equations 4.13 and 4.14."""
    return 4 * normal_cdf(z) * normal_cdf(-z)


def householder(drift_H: Tensor) -> Tensor:
    """The reflection that maps this direction to the first axis (equation 4.10), [H, H]; the identity if it is there already."""
    H = len(drift_H)
    identity = torch.eye(H, dtype=drift_H.dtype)
    if not drift_H.norm() > 0:
        return identity
    u = drift_H / drift_H.norm()
    u[0] -= 1
    return identity if u.norm() < 1e-12 else identity - 2 * torch.outer(u, u) / (u @ u)


@dataclass(frozen=True)
class QueryModel:
    """Queries modelled as Gaussians whose mean drifts with position: the parameters of equation 4.11."""

    reflection_HH: Tensor
    intercept: float
    """α_pos of the first coordinate."""
    slope: float
    """β_pos, per token."""
    residual_variance: float
    """σ_pos², over all buckets."""
    semantic_means: dict[int, Tensor] = field(repr=False)
    """μ_b [H − 1] of each bucket with at least two queries."""
    covariances_HH: dict[int, Tensor] = field(repr=False)
    """Each bucket's covariance of the first coordinate's residual (first row and column) and the semantic coordinates."""

    @classmethod
    def fit(cls, q_TH: Tensor, positions_T: Tensor, buckets_T: Tensor) -> "QueryModel":
        """Fits queries [T, H], given their tokens' positions and buckets."""
        t_T = positions_T.to(q_TH.dtype)
        spread = t_T.var(correction=0)
        drift_H = covariance_with(q_TH, t_T) / spread if spread > 0 else torch.zeros_like(q_TH[0])
        reflection = householder(drift_H)
        turned_TH = q_TH @ reflection
        slope = float(drift_H.norm())
        intercept = float(turned_TH[:, 0].mean() - slope * t_T.mean())
        turned_TH[:, 0] -= intercept + slope * t_T
        means, covariances = {}, {}
        for bucket, count in enumerate(buckets_T.bincount().tolist()):
            if count > 1:
                here = turned_TH[buckets_T == bucket]
                means[bucket], covariances[bucket] = here[:, 1:].mean(0), here.T.cov()
        variance = float(turned_TH[:, 0].var())
        return cls(reflection, intercept, slope, variance, means, covariances)

    def signal_to_noise(
        self,
        differences_PH: Tensor,
        bucket: int,
        tau: float,
        covariance: Covariance = "diagonal",
        shift_P: Tensor | float = 0.0,
    ) -> Tensor:
        """μ / √v of the score difference of each pair of keys (equations 4.11 and 4.12): fp64 [P].

        Args:
            differences_PH: first key minus second.
            tau: position of the bucket's queries.
            shift_P: added to the score differences independently of the query (ALiBi).
        """
        turned_PH = differences_PH @ self.reflection_HH
        first_P, rest_PH = turned_PH[:, 0], turned_PH[:, 1:]
        mean_P = first_P * (self.intercept + self.slope * tau) + rest_PH @ self.semantic_means[bucket] + shift_P
        spread_HH = self.covariances_HH[bucket]
        if covariance == "full":
            variance_P = ((turned_PH @ spread_HH) * turned_PH).sum(1)
        else:
            variance_P = first_P.square() * self.residual_variance + rest_PH.square() @ spread_HH.diagonal()[1:]
        # Equal keys tie for every query: 0 / 0 must give 0, full plasticity.
        return mean_P / variance_P.clamp_min(1e-300).sqrt()


@dataclass(frozen=True)
class KeyPairs:
    """Pairs of captured tokens whose keys compete, as indices into the samples: int64 [P] each."""

    first_P: Tensor
    second_P: Tensor


def draw_pairs(
    eligible_T: Tensor,
    positions_T: Tensor,
    sequences_T: Tensor,
    many: int,
    generator: torch.Generator,
    pairs: Pairs = "pooled",
) -> KeyPairs | None:
    """Draws pairs of different tokens, uniformly and with replacement; None if there are none.

    Args:
        eligible_T: whether each token's key may compete, bool.
        pairs: "pooled" draws both from all eligible tokens. "prefix" first draws a last position, uniformly, then a sequence
            with at least two eligible tokens up to it, then two of those.
    """
    found = torch.nonzero(eligible_T)[:, 0]
    if pairs == "pooled":
        if len(found) < 2:
            return None
        first = torch.randint(len(found), (many,), generator=generator)
        # Drawn from the other tokens, so that no draw is rejected.
        second = (first + torch.randint(1, len(found), (many,), generator=generator)) % len(found)
        return KeyPairs(found[first], found[second])
    return _within_prefixes(found, positions_T, sequences_T, many, generator)


def _within_prefixes(
    found: Tensor, positions_T: Tensor, sequences_T: Tensor, many: int, generator: torch.Generator
) -> KeyPairs | None:
    span = int(positions_T.max()) + 1
    place = sequences_T * span + positions_T
    order = found[torch.argsort(place[found])]
    counts = sequences_T[order].unique_consecutive(return_counts=True)[1]
    starts = (counts.cumsum(0) - counts)[counts > 1]
    if not len(starts):
        return None
    # First the prefix length, then a sequence with two tokens that early. The other way round, short prefixes would be
    # underrepresented, since few sequences have two tokens in them.
    seconds, by_second = positions_T[order[starts + 1]].sort()
    starts = starts[by_second]
    last = torch.randint(int(seconds[0]), int(positions_T[found].max()) + 1, (many,), generator=generator)
    start = starts[_below(torch.searchsorted(seconds, last, right=True), generator)]
    size = torch.searchsorted(place[order], sequences_T[order[start]] * span + last, right=True) - start
    first = _below(size, generator)
    second = (first + 1 + _below(size - 1, generator)) % size
    return KeyPairs(order[start + first], order[start + second])


def _below(bounds_P: Tensor, generator: torch.Generator) -> Tensor:
    """Draws an integer in [0, bound) for each bound, uniformly."""
    return (torch.rand(len(bounds_P), dtype=torch.float64, generator=generator) * bounds_P).long()


@dataclass(frozen=True)
class Bucket:
    """A head's plasticity for the queries of one bucket."""

    number: int
    queries: int
    pairs: KeyPairs
    plasticity_P: Tensor
    """In closed form, fp64 [P]."""
    counted_P: Tensor
    """From counting which key the bucket's own queries prefer, without assuming that they are Gaussian: fp64 [P]."""


@dataclass(frozen=True)
class HeadProfile:
    """A head's plasticity by query position."""

    length: int
    buckets: int
    of_bucket: dict[int, Bucket]
    """Buckets with queries and with earlier keys to choose from; never the first."""

    @property
    def plasticity(self) -> list[float]:
        """Mean plasticity of each bucket; NaN if it can't be measured."""
        return self._by_bucket("plasticity_P")

    @property
    def counted(self) -> list[float]:
        return self._by_bucket("counted_P")

    @property
    def queries(self) -> list[int]:
        return [self.of_bucket[b].queries if b in self.of_bucket else 0 for b in range(self.buckets)]

    def _by_bucket(self, name: str) -> list[float]:
        found = self.of_bucket
        return [float(getattr(found[b], name).mean()) if b in found else math.nan for b in range(self.buckets)]


def midpoint(bucket: int, buckets: int, length: int) -> float:
    """τ, the position in the middle of a bucket."""
    return (bucket + 0.5) * length / buckets - 0.5


def head_profile(
    q_TH: Tensor,
    k_TH: Tensor,
    positions_T: Tensor,
    sequences_T: Tensor,
    *,
    length: int,
    buckets: int,
    scope: int | None = None,
    slope: float = 0.0,
    covariance: Covariance = "diagonal",
    pairs: Pairs = "pooled",
    draws: int = 2000,
    seed: int = 0,
) -> HeadProfile:
    """A head's plasticity profile (section 4.4.5).

    Args:
        q_TH, k_TH: fp64, of the same tokens.
        positions_T, sequences_T: each token's position and the index of its sequence.
        scope: tokens the head can see; only keys visible from the bucket's middle compete. None means all.
        slope: ALiBi's slope, which shifts score differences by √H · slope per token between the two keys.
        draws: pairs of keys per bucket.
    """
    buckets_T = positions_T * buckets // length
    model = QueryModel.fit(q_TH, positions_T, buckets_T)
    generator = torch.Generator().manual_seed(seed)
    per_token = slope * q_TH.shape[1] ** 0.5
    found = {}
    for bucket in model.semantic_means:
        tau = midpoint(bucket, buckets, length)
        eligible_T = buckets_T < bucket
        if scope is not None and scope < length:
            eligible_T = eligible_T & (positions_T > tau - scope)
        drawn = draw_pairs(eligible_T, positions_T, sequences_T, draws, generator, pairs)
        if drawn is None:
            continue
        differences_PH = k_TH[drawn.first_P] - k_TH[drawn.second_P]
        shift_P = per_token * (positions_T[drawn.first_P] - positions_T[drawn.second_P]).double()
        z_P = model.signal_to_noise(differences_PH, bucket, tau, covariance, shift_P)
        own_QH = q_TH[buckets_T == bucket]
        counted_P = counted_plasticity(own_QH, differences_PH, shift_P)
        found[bucket] = Bucket(bucket, len(own_QH), drawn, pairwise_plasticity(z_P), counted_P)
    return HeadProfile(length, buckets, found)


def counted_plasticity(q_QH: Tensor, differences_PH: Tensor, shift_P: Tensor) -> Tensor:
    """4 p (1 − p) with p counted over Q ≥ 2 queries, corrected for the bias of a finite sample: fp64 [P]."""
    # With signs +1, −1 and 0 for ties, 4 p (1 − p) is 1 − mean².
    sign_PQ = torch.addmm(shift_P[:, None], differences_PH, q_QH.T).sign_()
    mean_P = sign_PQ.mean(1)
    many = len(q_QH)
    variance_P = (sign_PQ.square_().mean(1) - mean_P.square()) * many / (many - 1)
    return 1 - mean_P.square() + variance_P / many
