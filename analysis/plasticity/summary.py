"""Summarises the plasticity profiles of a model's heads: bands of positions, layers, a map of distances.

Shapes: P pairs of keys, T sampled tokens.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from farsight.analysis.capture.heads import Head
from farsight.analysis.plasticity.heads import HeadProfile, midpoint
from farsight.analysis.plasticity.options import AP, TARGET_DROP
from farsight.configs.metrics import LEAST_BUCKETS
from farsight.errors import ConfigError

BAND = 0.2
"""Share of the positions in AP_first, and in AP_last."""

Profile = Sequence[float | None]
"""Plasticity of every bucket; None for buckets without queries or pairs."""


def check_buckets(buckets: int) -> None:
    """Raises ConfigError if there are too few buckets to measure bands of positions."""
    if buckets < LEAST_BUCKETS:
        raise ConfigError(
            f"{buckets} buckets: the first has no earlier keys, and no other has its middle in the first {BAND:.0%} of positions; "
            f"use --buckets {LEAST_BUCKETS} or more."
        )


def band(profile: Profile, low: float, high: float) -> float | None:
    """Mean over the buckets whose middle is in [low, high), as shares of the length; the first bucket never counts."""
    middles = [(b + 0.5) / len(profile) for b in range(len(profile))]
    return mean(v for v, middle in zip(profile[1:], middles[1:], strict=True) if low <= middle < high)


def bands(profile: Profile) -> dict[str, float | None]:
    """{"ap_first", "ap_last", "ap_drop"}: AP of the first and of the last 20 %, and their difference; None where there is no value."""
    first, last = band(profile, 0.0, BAND), band(profile, 1 - BAND, 1.0)
    return {"ap_first": first, "ap_last": last, "ap_drop": None if first is None or last is None else first - last}


def quintiles(profile: Profile) -> list[float | None]:
    """Means over fifths of the positions (Table 6.1)."""
    return [band(profile, fifth / 5, (fifth + 1) / 5) for fifth in range(5)]


def range_edges(checkpoints: Sequence[Mapping[str, Any]]) -> list[int]:
    """Edges of ranges of positions for checkpoints of several lengths (Table A.1): each twice the one before, the longest halved.

    With the longest at 64K and 64 buckets: 0, 1K, 2K, 4K, 8K, 16K, 32K, 48K, 64K. The first range begins at 0 and is the shortest
    that contains the middle of a bucket of some checkpoint, not counting the first.
    """
    longest = max(row["length"] for row in checkpoints)
    least = min(1.5 * row["length"] / len(row["profile"]) for row in checkpoints)
    edges = [longest, 3 * longest // 4, longest // 2]
    while edges[-1] // 2 > least:
        edges.append(edges[-1] // 2)
    return [0, *reversed(edges)]


def by_range(checkpoint: Mapping[str, Any], edges: Sequence[int]) -> list[float | None]:
    """A checkpoint's plasticity in each range of positions: the mean over the buckets whose middle is in it."""
    length = checkpoint["length"]
    return [band(checkpoint["profile"], low / length, high / length) for low, high in itertools.pairwise(edges)]


def overall(profile: Profile, queries: Sequence[int]) -> float | None:
    """Mean over buckets, weighted by their number of queries (section 4.4.5)."""
    kept = [(value, many) for value, many in zip(profile, queries, strict=True) if value is not None]
    total = sum(many for _, many in kept)
    return sum(value * many for value, many in kept) / total if total else None


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of the values that aren't None; None if there are none."""
    kept = [value for value in values if value is not None]
    return sum(kept) / len(kept) if kept else None


def mean_profile(profiles: Sequence[Profile]) -> list[float | None]:
    """Mean per bucket, over the profiles with a value there."""
    return [mean(values) for values in zip(*profiles, strict=True)]


def head_figures(head: Head, profile: HeadProfile) -> dict[str, Any]:
    """A head's entry in "heads". A head without a pair of keys in any bucket is not "measurable"."""
    values, counted = (without_nan(found) for found in (profile.plasticity, profile.counted))
    return {
        "layer": head.layer,
        "head": head.head,
        "scope": head.scope,
        "slope": head.slope,
        "measurable": bool(profile.of_bucket),
        "profile": values,
        "counted": counted,
        "ap_overall": overall(values, profile.queries),
        **bands(values),
        "quintiles": quintiles(values),
    }


def means_over(heads: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of a model or a layer: means over the heads that have each figure."""
    return {
        "profile": mean_profile([head["profile"] for head in heads]),
        "counted": mean_profile([head["counted"] for head in heads]),
        "quintiles": mean_profile([head["quintiles"] for head in heads]),
        **{key: mean(head[key] for head in heads) for key in AP},
    }


def model_figures(heads: Sequence[dict[str, Any]], heat: "DistanceMap") -> dict[str, Any]:
    """The figures of a model, from its heads' figures."""
    layers = sorted({head["layer"] for head in heads})
    whole = means_over(heads)
    drop = whole["ap_drop"]
    return {
        **whole,
        "target_drop": TARGET_DROP,
        "meets_target": None if drop is None else drop < TARGET_DROP,
        "not_measurable": [f"{head['layer']}.{head['head']}" for head in heads if not head["measurable"]],
        "heat": heat.figures(),
        "layers": {str(layer): means_over([head for head in heads if head["layer"] == layer]) for layer in layers},
        "heads": list(heads),
    }


def without_nan(values: Iterable[float]) -> list[float | None]:
    """Replaces NaN, which JSON lacks, by None."""
    return [None if math.isnan(value) else value for value in values]


class DistanceMap:
    """Plasticity by the distance between the two keys and the query's distance from their midpoint (Figure 6.3).

    Args:
        length: tokens per sequence, the upper end of both distances.
        cells: number of cells per axis, of equal width.
    """

    def __init__(self, length: int, cells: int) -> None:
        self.length, self.cells = length, cells
        self._sums = torch.zeros(cells * cells, dtype=torch.float64)
        self._pairs = torch.zeros(cells * cells, dtype=torch.int64)

    def add(self, profile: HeadProfile, positions_T: Tensor) -> None:
        """Adds all pairs of a head's profile."""
        for bucket in profile.of_bucket.values():
            first_P, second_P = (positions_T[found] for found in (bucket.pairs.first_P, bucket.pairs.second_P))
            tau = midpoint(bucket.number, profile.buckets, profile.length)
            behind_P, apart_P = tau - (first_P + second_P) / 2, (first_P - second_P).abs()
            cell_P = self._cell(behind_P) * self.cells + self._cell(apart_P)
            self._sums.index_add_(0, cell_P, bucket.plasticity_P)
            self._pairs += cell_P.bincount(minlength=self.cells**2)

    def _cell(self, distance_P: Tensor) -> Tensor:
        return (distance_P * self.cells / self.length).long()

    def figures(self) -> dict[str, Any]:
        """{"distances": edges, "plasticity": rows by the query's distance, columns by the keys', "pairs": their counts}."""
        shape = self.cells, self.cells
        values = (self._sums / self._pairs).view(shape)  # 0 / 0 is NaN
        return {
            "distances": [cell * self.length / self.cells for cell in range(self.cells + 1)],
            "plasticity": [without_nan(row) for row in values.tolist()],
            "pairs": self._pairs.view(shape).tolist(),
        }
