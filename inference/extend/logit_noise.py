"""Normal noise on logits that does not depend on how a sequence is read: hashed from layer, head, query and key, not drawn in order.

Shape suffixes: N heads, L queries, T keys.
"""

import math

from torch import Tensor

from farsight.data.order import hash64

_SPREAD = 0x9E3779B97F4A7C15 - 2**64
"""An odd number near 2^64 over the golden ratio, which spreads neighbouring numbers far apart (Steele et al., 2014)."""
_MIX = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_BITS = 24
"""Bits in each of the two uniform numbers behind a normal one: as many as fp32 holds exactly."""


def logit_noise(seed: int, layer: int, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Standard normal numbers, fp32 [N, L, T].

    Args:
        heads: numbers of the layer's query heads, int64 [N].
        queries, keys: positions counted from their sequence's first token, int64 [L] and [T].
    """
    base = hash64(seed, layer) - 2**63
    bits_N = _mixed(heads * _SPREAD + base)
    bits_NL = _mixed(bits_N[:, None] + queries * _SPREAD)
    bits_NLT = _mixed(bits_NL[..., None] + keys * _SPREAD)
    low_NLT = (bits_NLT & (2**_BITS - 1)).float() / 2**_BITS
    high_NLT = (_shifted(bits_NLT, 64 - _BITS) + 1).float() / 2**_BITS  # above 0, as its logarithm is taken
    return (-2 * high_NLT.log()).sqrt() * (2 * math.pi * low_NLT).cos()  # Box–Muller


def _mixed(bits: Tensor) -> Tensor:
    """The finaliser of SplitMix64; int64 products wrap."""
    bits = (bits ^ _shifted(bits, 30)) * _MIX[0]
    bits = (bits ^ _shifted(bits, 27)) * _MIX[1]
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shifts to the right as unsigned."""
    return (bits >> by) & (2 ** (64 - by) - 1)
