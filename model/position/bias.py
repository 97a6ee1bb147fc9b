"""Score biases: the coefficients that each head's formula in `kernels/scoped_attention/bias.py` has.

ALiBi is a penalty on the score that grows linearly with distance (Press et al., 2022).
"""

import math
from typing import NamedTuple, assert_never

import torch
from torch import Tensor

from farsight.configs.schema import Alibi, Bias, NoBias


class LayerBias(NamedTuple):
    """The bias of a layer's heads, as numbers; `kernels.scoped_attention.ScoreBias` has them as a tensor."""

    kind: str
    coefficients: tuple[tuple[float, ...], ...]
    """Of each coefficient of the formula, the values of all query heads, in physical head order."""


def layer_bias(bias: Bias, n_heads: int) -> LayerBias | None:
    """The bias of a layer with this setting; None for no bias."""
    match bias:
        case NoBias():
            return None
        case Alibi():
            return LayerBias("alibi", (tuple(alibi_slopes(n_heads, bias.uniform).tolist()),))
        case _:
            assert_never(bias)


def alibi_slopes(n_heads: int, uniform: bool = False) -> Tensor:
    """Slope m of each head's bias −m · distance, in score units per token: fp32 [N], on the CPU.

    If N is a power of two, the slopes are 2^(−8/N), 2^(−16/N), …, 2^(−8). Otherwise they are those of the next lower power
    of two, followed by every other slope of the next higher one, as in the authors' code and BLOOM.
    `uniform` gives every head the smallest slope, the one with the longest range (SCOPE, appendix B.4).
    """
    if n_heads < 1:
        raise ValueError(f"ALiBi needs at least one head, but n_heads is {n_heads}")
    below = 2 ** math.floor(math.log2(n_heads))
    slopes = _geometric(below) + _geometric(2 * below)[0::2][: n_heads - below]
    if uniform:
        slopes = [min(slopes)] * n_heads
    return torch.tensor(slopes, dtype=torch.float32, device="cpu")


def _geometric(n_heads: int) -> list[float]:
    return [2.0 ** (-8 * (head + 1) / n_heads) for head in range(n_heads)]
