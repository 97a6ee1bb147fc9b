"""Normal noise on logits that is the same however a sequence is read: drawn from what it stands for, not one after the other.

Shape suffixes: N heads, L queries, T keys.
"""

import math

from torch import Tensor

from farsight.data.order import hash64

_SPREAD = 0x9E3779B97F4A7C15 - 2**64
"""Odd, near 2^64 over the golden ratio: sets neighbouring numbers far apart (Steele et al., 2014)."""
_MIX = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_BITS = 24
"""Of each of the two uniform numbers that make a normal one: what fp32 holds."""


def logit_noise(seed: int, layer: int, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Standard normal numbers, fp32 [N, L, T].

    Args:
        heads: int64 [N], of the layer's query heads.
        queries, keys: int64 [L] and [T], counted from their sequence's first token.
    """
    base = hash64(seed, layer) - 2**63
    bits_N = _mixed(heads * _SPREAD + base)
    bits_NL = _mixed(bits_N[:, None] + queries * _SPREAD)
    bits_NLT = _mixed(bits_NL[..., None] + keys * _SPREAD)
    low_NLT = (bits_NLT & (2**_BITS - 1)).float() / 2**_BITS
    high_NLT = (_shifted(bits_NLT, 64 - _BITS) + 1).float() / 2**_BITS  # above 0: it has a logarithm
    return (-2 * high_NLT.log()).sqrt() * (2 * math.pi * low_NLT).cos()  # Box–Muller


def _mixed(bits: Tensor) -> Tensor:
    """The finaliser of SplitMix64; int64 products wrap."""
    bits = (bits ^ _shifted(bits, 30)) * _MIX[0]
    bits = (bits ^ _shifted(bits, 27)) * _MIX[1]
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """To the right, as unsigned."""
    return (bits >> by) & (2 ** (64 - by) - 1)
