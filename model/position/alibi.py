"""ALiBi: a penalty on the score that grows linearly with distance (Press et al., 2022)."""

import math

import torch
from torch import Tensor


def alibi_slopes(n_heads: int, uniform: bool = False) -> Tensor:
    """Slope m of each head's bias −m · distance, in score units per token: fp32 [N], on the CPU.

    If N is a power of two, the slopes are 2^(−8/N), 2^(−16/N), …, 2^(−8). Otherwise they are those of the next lower power
    of two, followed by every other slope of the next higher one, as in the authors' code and BLOOM.
    `uniform` gives every head the smallest slope, the one with the longest range (SCOPE, appendix B.4).
    `resolve_layers` computes them for each layer; attention adds the bias to its scores.
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
