"""Isotonic regression: the non-decreasing sequence nearest to a given one, for many sequences at once.

Shape suffixes: B sequences, C values of each.
"""

import numpy as np
import torch
from torch import Tensor

FEW = 256
"""Longest sequence for which the quadratic formula is faster than the linear algorithm."""


def isotonic_regression(values_BC: Tensor) -> Tensor:
    """The non-decreasing sequences with the smallest sum of squared differences from the given ones.

    Args:
        values_BC: floating point, any device.

    Returns:
        [B, C], the same dtype.
    """
    if values_BC.shape[-1] <= FEW:
        return max_of_min_means(values_BC)
    pooled = pool_adjacent_violators(values_BC.double().cpu().numpy())
    return torch.from_numpy(pooled).to(values_BC)


def max_of_min_means(values_BC: Tensor) -> Tensor:
    """Isotonic regression by its closed form: the value at i is the maximum over a ≤ i of the minimum over b ≥ i of the mean of
    [a, b] (Barlow et al., 1972). Takes C² means for each sequence, but no loop and no wait for the device.
    """
    C = values_BC.shape[-1]
    sums_BC = torch.nn.functional.pad(values_BC.cumsum(-1), (1, 0))
    index_C = torch.arange(C, device=values_BC.device)
    sizes_CC = index_C - index_C[:, None] + 1  # of the ranges [a, b]: row a, column b
    means_BCC = (sums_BC[:, None, 1:] - sums_BC[:, :-1, None]) / sizes_CC
    empty_CC = sizes_CC < 1
    least_BCC = means_BCC.masked_fill(empty_CC, torch.inf).flip(-1).cummin(-1).values.flip(-1)
    return least_BCC.masked_fill(empty_CC, -torch.inf).amax(-2)


def pool_adjacent_violators(values_BC: np.ndarray) -> np.ndarray:
    """Isotonic regression by pooling neighbours that are out of order (De Leeuw et al., 2010), all sequences in step.

    The pools of a sequence form a stack: each value is pushed once and each merge removes a pool, so there are at most 2 C passes.
    """
    B, C = values_BC.shape
    row_B = np.arange(B)
    means, sizes = np.empty((B, C)), np.zeros((B, C), dtype=np.int64)
    top_B = np.full(B, -1)
    for value_B in values_BC.T:
        top_B += 1
        means[row_B, top_B], sizes[row_B, top_B] = value_B, 1
        rows = row_B
        while True:
            rows = rows[top_B[rows] > 0]
            top = top_B[rows]
            wrong = means[rows, top - 1] > means[rows, top]
            rows, top = rows[wrong], top[wrong]
            if not len(rows):
                break
            size, below = sizes[rows, top], sizes[rows, top - 1]
            means[rows, top - 1] = (means[rows, top - 1] * below + means[rows, top] * size) / (below + size)
            sizes[rows, top - 1], sizes[rows, top] = below + size, 0
            top_B[rows] -= 1
    return np.stack([np.repeat(means[row, : top + 1], sizes[row, : top + 1]) for row, top in enumerate(top_B)])
