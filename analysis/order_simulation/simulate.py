"""The top-1 simulation of SCOPE, appendix A.3.

Shapes: T tokens, H heads.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from farsight.errors import ConfigError
from farsight.progress import progress

MOST = 2**63 - 1
"""Largest int64. No coefficient exceeds the sum of all, which is (H + 1)^layers."""


def heads_for(length: int) -> int:
    """The smallest H ≥ 1 with 2^H ≥ T."""
    return max(1, (length - 1).bit_length())


def window_sizes(length: int, heads: int, gammas: Iterable[float] = ()) -> dict[str, list[int]]:
    """Window of each head in tokens, counting the query's own, by name of the configuration."""
    every = range(1, heads + 1)
    sizes = {
        "scope": [min(2**i, length) for i in every],
        "uniform": [-(-length // i) for i in every],
        "nope-1": [length] * (heads - 1) + [1],
        "nope": [length] * heads,
    }
    for gamma in gammas:
        # Compare logarithms first, as large powers overflow.
        sizes[f"gamma={gamma:g}"] = [
            length if i * math.log(gamma) >= math.log(length) else math.ceil(gamma**i) for i in every
        ]
    return sizes


def draw_picks(length: int, windows: Sequence[int], generator: np.random.Generator) -> np.ndarray:
    """The token each head adds to each token t, uniform on max(0, t − w + 1) … t (the paper's Figure 24): int64 [H, T]."""
    rows = np.arange(length)
    return np.stack([generator.integers(np.maximum(rows - w + 1, 0), rows + 1) for w in windows])


def through_layer(v_T: np.ndarray, picks_HT: np.ndarray) -> np.ndarray:
    """v M, int64 [T], where row t of M has 1 at t plus 1 at each head's pick."""
    out_T = v_T.copy()
    used = np.flatnonzero(v_T)
    for picks_T in picks_HT:
        np.add.at(out_T, picks_T[used], v_T[used])
    return out_T


def unique_ratios(length: int, windows: Sequence[int], layers: int, generator: np.random.Generator) -> list[float]:
    """Distinct coefficients divided by T after each layer, for one draw of all layers.

    Raises:
        ConfigError: too many layers for the coefficients to fit 64 bits.
    """
    if (len(windows) + 1) ** layers > MOST:
        most = int(math.log(MOST) / math.log(len(windows) + 1))
        raise ConfigError(
            f"--layers {layers}: with {len(windows)} heads, coefficients may exceed 2^63 after {most}; set {most} or fewer."
        )
    v_T = np.zeros(length, dtype=np.int64)
    v_T[-1] = 1
    ratios = []
    for _ in range(layers):
        v_T = through_layer(v_T, draw_picks(length, windows, generator))
        ratios.append(len(np.unique(v_T)) / length)
    return ratios


def simulate(
    lengths: Sequence[int],
    layers: int,
    trials: int,
    *,
    heads: int | None = None,
    gammas: Sequence[float] = (),
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Mean and standard deviation of the ratio after each layer, for every length and configuration.

    Raises:
        ConfigError: as `unique_ratios`.
    """
    results = []
    todo = [
        (length, heads or heads_for(length), name, windows)
        for length in lengths
        for name, windows in window_sizes(length, heads or heads_for(length), gammas).items()
    ]
    with progress(total=len(todo) * trials, unit="trial", desc="simulation") as bar:
        for number, (length, n_heads, name, windows) in enumerate(todo):
            found = []
            for trial in range(trials):
                found.append(unique_ratios(length, windows, layers, np.random.default_rng([seed, number, trial])))
                bar.update()
            results.append(
                {
                    "length": length,
                    "heads": n_heads,
                    "windows": name,
                    "sizes": windows,
                    "ratio": np.mean(found, axis=0).tolist(),
                    "spread": np.std(found, axis=0).tolist(),
                }
            )
    return results
