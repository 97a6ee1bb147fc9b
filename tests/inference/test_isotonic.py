"""Isotonic regression against scikit-learn's implementation."""

import numpy as np
import pytest
import torch
from sklearn.isotonic import IsotonicRegression

from farsight.inference.extend.isotonic import isotonic_regression, max_of_min_means, pool_adjacent_violators


def scikit_learn(values_BC):
    index = np.arange(values_BC.shape[1])
    return np.stack([IsotonicRegression().fit_transform(index, row) for row in values_BC])


@pytest.mark.parametrize("length", [1, 2, 5, 40, 128, 300])
def test_equals_scikit_learn(length):
    generator = np.random.default_rng(length)
    values = np.concatenate(
        (
            generator.random((20, length)),
            generator.integers(0, 3, (20, length)).astype(float),  # ties
            generator.random((1, length)).cumsum(1),  # in order already
            -generator.random((1, length)).cumsum(1),  # one pool
            np.full((1, length), 0.7),
            np.eye(length)[[0, length // 2, length - 1]],
            np.append(np.arange(length - 1.0), -1000.0)[None],  # the last value merges one pool after the other
        )
    )
    expected = scikit_learn(values)
    for found in (
        isotonic_regression(torch.from_numpy(values)).numpy(),
        max_of_min_means(torch.from_numpy(values)).numpy(),
        pool_adjacent_violators(values),
    ):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_keeps_dtype():
    values = torch.rand(2, 300)
    assert isotonic_regression(values).dtype == isotonic_regression(values[:, :5]).dtype == torch.float32
