"""Rotary position embedding: the frequencies of every kind of RoPE, and the rotation itself.

Shape suffixes: B batch, L sequence length, N heads, H head dim, F = H/2 frequencies.

A head's H dimensions are paired as in Hugging Face: dimension i rotates with i + H/2, not with its neighbour,
so Llama weights need no permutation. The arithmetic follows `transformers.modeling_rope_utils` operation by
operation in fp32, so a converted model gets the same angles to the last bit.
"""

import math
from typing import NamedTuple, assert_never

import torch
from torch import Tensor

from farsight.configs.schema import (
    DynamicNtkRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    NoRotary,
    NtkRope,
    Rope,
    Rotary,
    Rotating,
    YarnRope,
)
from farsight.kernels.head_rotation import rotate_by_tables
from farsight.kernels.scoped_attention.choice import can_run_triton


class RopeFrequencies(NamedTuple):
    """The frequency of each pair of dimensions, and the factor on the rotated vectors."""

    inv_freq: Tensor
    """fp32 [F], radians per token, fastest first."""
    attention_factor: float
    """Multiplies cos and sin, and so both queries and keys: scores grow with its square (YaRN's temperature)."""


def rope_frequencies(rotary: Rotary, head_dim: int, length: int) -> RopeFrequencies:
    """Frequencies of one layer's RoPE, computed on the CPU; move `inv_freq` to where it is used.

    `head_dim` counts the dimensions that rotate; `length` is the sequence length in tokens. Only dynamic NTK and LongRoPE depend on it.

    Raises ValueError for an odd head dim and for settings the formulas cannot take, and TypeError for
    `NoRotary`, which has no frequencies: the caller must not rotate.
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"RoPE turns pairs of dimensions, but head_dim is {head_dim}; set it to an even number")
    if isinstance(rotary, NoRotary):
        raise TypeError("a layer with rotary kind 'none' has no frequencies and must not be rotated")
    _check(rotary, head_dim)

    match rotary:
        case Rope():
            return RopeFrequencies(_inverse_frequencies(rotary.theta, head_dim), 1.0)
        case LinearRope():
            return RopeFrequencies(_inverse_frequencies(rotary.theta, head_dim) / rotary.factor, 1.0)
        case NtkRope():
            theta = rotary.theta * rotary.factor ** (head_dim / (head_dim - 2))
            return RopeFrequencies(_inverse_frequencies(theta, head_dim), 1.0)
        case DynamicNtkRope():
            # NTK-aware scaling whose factor grows with the sequence, from 1 at original_length.
            original = rotary.original_length
            growth = rotary.factor * max(length, original) / original - (rotary.factor - 1)
            theta = rotary.theta * growth ** (head_dim / (head_dim - 2))
            return RopeFrequencies(_inverse_frequencies(theta, head_dim), 1.0)
        case YarnRope():
            return _yarn(rotary, head_dim)
        case Llama3Rope():
            return _llama3(rotary, head_dim)
        case LongRope():
            return _longrope(rotary, head_dim, length)
        case _:
            assert_never(rotary)


def rope_tables(positions_BL: Tensor, frequencies: RopeFrequencies) -> tuple[Tensor, Tensor]:
    """The two tables that `rotate` takes, attention factor included: fp32 [B, L, H] each.

    The first repeats the cosines for both halves of a head, the second the sines, negated in the first half. They are
    built once for all layers that rotate alike.

    `positions_BL` holds integers from 0, exact up to 2^24; [1, L] if all sequences share their positions. Frequencies
    [R, 1, 1, F] of several kinds of layers give tables [R, B, L, H].
    """
    inv_freq_F = frequencies.inv_freq.to(positions_BL.device)
    angles_BLF = positions_BL[..., None].float() * inv_freq_F
    cos_BLF = angles_BLF.cos() * frequencies.attention_factor
    sin_BLF = angles_BLF.sin() * frequencies.attention_factor
    return torch.cat((cos_BLF, cos_BLF), dim=-1), torch.cat((-sin_BLF, sin_BLF), dim=-1)


def rotate(x_BLNH: Tensor, cos_BLH: Tensor, sin_BLH: Tensor) -> Tensor:
    """Rotate queries or keys (RoFormer, Eq. 34, with half-split pairs); returns x's shape and dtype.

    The tables are [B, L, H] from `rope_tables` (B may be 1), or [B, L, N, H] if each head has its own
    frequencies. Narrower tables rotate the first dimensions of each head and leave the others. Products are fp32 whatever x's dtype. On GPUs, where no gradient is needed, shared tables take one kernel.
    """
    if (rotated := cos_BLH.shape[-1]) < x_BLNH.shape[-1]:
        return torch.cat((rotate(x_BLNH[..., :rotated], cos_BLH, sin_BLH), x_BLNH[..., rotated:]), dim=-1)
    if cos_BLH.dim() == x_BLNH.dim() - 1:
        kind = x_BLNH.device.type, str(x_BLNH.dtype), x_BLNH.shape[-1]
        if not torch.is_grad_enabled() and can_run_triton(*kind):
            return rotate_by_tables(x_BLNH, cos_BLH, sin_BLH)
        cos_BLH, sin_BLH = cos_BLH.unsqueeze(-2), sin_BLH.unsqueeze(-2)  # the same for all heads
    # (x1, x2) → (x1·cos − x2·sin, x2·cos + x1·sin), with the halves swapped by a roll: this reads x half as often as
    # multiplying the halves separately.
    x = x_BLNH.float()
    return (x * cos_BLH).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin_BLH).to(x_BLNH.dtype)


# ── Frequencies of each kind of RoPE ──────────────────────────────────────────────────────────────────
# Device and dtype are always explicit: models are built under torch.device("meta") and a bf16 default.


def _dimension_powers(theta: float, head_dim: int) -> Tensor:
    """theta^(2i/H), fp32 [F]."""
    exponents_F = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    return theta**exponents_F


def _inverse_frequencies(theta: float, head_dim: int) -> Tensor:
    """theta^(-2i/H), fp32 [F] (RoFormer, section 3.2.2)."""
    return 1.0 / _dimension_powers(theta, head_dim)


def _yarn(rotary: YarnRope, head_dim: int) -> RopeFrequencies:
    """YaRN, section 3.2: keep the fast dimensions, interpolate the slow ones, ramp between the two."""

    def dimension_turning(rotations: float) -> float:
        """The (fractional) dimension that makes this many rotations over the original length."""
        wavelength = rotary.original_length / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rotary.theta))

    low, high = dimension_turning(rotary.beta_fast), dimension_turning(rotary.beta_slow)
    if rotary.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step without 0/0

    dimensions_F = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    # `1 - (1 - ramp)` below is not always `ramp` in fp32; written this way to match transformers.
    keep_F = 1 - torch.clamp((dimensions_F - low) / (high - low), 0, 1)
    powers_F = _dimension_powers(rotary.theta, head_dim)
    inv_freq_F = 1.0 / (rotary.factor * powers_F) * (1 - keep_F) + 1.0 / powers_F * keep_F

    attention_factor = rotary.attention_factor
    if attention_factor is None:
        attention_factor = 0.1 * math.log(rotary.factor) + 1.0 if rotary.factor > 1 else 1.0
    return RopeFrequencies(inv_freq_F, attention_factor)


def _llama3(rotary: Llama3Rope, head_dim: int) -> RopeFrequencies:
    """Llama 3.1: low frequencies are divided by the factor, high ones kept, those in between blended."""
    inv_freq_F = _inverse_frequencies(rotary.theta, head_dim)
    wavelength_F = 2 * math.pi / inv_freq_F
    low, high = rotary.low_freq_factor, rotary.high_freq_factor

    blend_F = (rotary.original_length / wavelength_F - low) / (high - low)
    blended_F = (1 - blend_F) * inv_freq_F / rotary.factor + blend_F * inv_freq_F
    scaled_F = torch.where(wavelength_F > rotary.original_length / low, inv_freq_F / rotary.factor, blended_F)
    scaled_F = torch.where(wavelength_F < rotary.original_length / high, inv_freq_F, scaled_F)
    return RopeFrequencies(scaled_F, 1.0)


def _longrope(rotary: LongRope, head_dim: int, length: int) -> RopeFrequencies:
    """LongRoPE: a searched factor for each dimension, with one set within the original length and another beyond it."""
    factors = rotary.long_factor if length > rotary.original_length else rotary.short_factor
    factors_F = torch.tensor(factors, dtype=torch.float32, device="cpu")
    inv_freq_F = 1.0 / (factors_F * _dimension_powers(rotary.theta, head_dim))

    attention_factor = rotary.attention_factor
    if attention_factor is None:
        growth = math.log(rotary.factor) / math.log(rotary.original_length) if rotary.factor > 1 else 0.0
        attention_factor = math.sqrt(1 + growth)
    return RopeFrequencies(inv_freq_F, attention_factor)


def _check(rotary: Rotating, head_dim: int) -> None:
    """Refuses settings that would give nan, inf or a complex number."""

    def refuse(name: str, value: object, wanted: str) -> ValueError:
        return ValueError(f"rotary.{name} is {value!r} in a RoPE of kind '{rotary.kind}'; set {wanted}")

    if not rotary.theta > 1:
        raise refuse("theta", rotary.theta, "a base above 1, for example 10000.0")
    if not (factor := getattr(rotary, "factor", 1.0)) > 0:
        raise refuse("factor", factor, "a number above 0; 1.0 leaves RoPE as it is")
    if isinstance(rotary, DynamicNtkRope | YarnRope | Llama3Rope | LongRope) and rotary.original_length < 2:
        raise refuse("original_length", rotary.original_length, "the length in tokens trained with unscaled RoPE")

    match rotary:
        case NtkRope() | DynamicNtkRope() if head_dim == 2:
            raise ValueError(f"RoPE of kind '{rotary.kind}' raises to H/(H-2); set head_dim to 4 or more, it is 2")
        case YarnRope() if not rotary.beta_fast > rotary.beta_slow > 0:
            raise refuse("beta_fast", rotary.beta_fast, f"it above beta_slow ({rotary.beta_slow}), both above 0")
        case Llama3Rope() if not rotary.high_freq_factor > rotary.low_freq_factor > 0:
            wanted = f"it above low_freq_factor ({rotary.low_freq_factor}), both above 0"
            raise refuse("high_freq_factor", rotary.high_freq_factor, wanted)
        case LongRope():
            for name, factors in (("short_factor", rotary.short_factor), ("long_factor", rotary.long_factor)):
                if len(factors) != head_dim // 2 or not all(factor > 0 for factor in factors):
                    raise refuse(name, factors, f"{head_dim // 2} numbers above 0, one for each pair of dimensions")
        case _:
            pass
