"""Sinusoidal position embedding, added to the token embeddings (Vaswani et al., 2017, section 3.5)."""

import math

import torch
from torch import Tensor


def sinusoidal_embedding(positions_BL: Tensor, dim: int) -> Tensor:
    """Sines on even dimensions and cosines on odd ones: fp32 [B, L, D], on the positions' device; `Llama` adds them to its
    token embeddings.

    Dimension pair i rotates by 10000^(−2i/D) radians per token. Positions are integers from 0 of any size; no
    table limits the length. Angles are computed in fp64: at position 100,000 fp32 would be off by 0.005.

    Raises ValueError when D is odd.
    """
    if dim < 2 or dim % 2:
        raise ValueError(f"sinusoidal embedding pairs sines with cosines, but dim is {dim}; set it to an even number")
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=positions_BL.device) / dim
    angles = positions_BL[..., None].double() * torch.exp(-math.log(10000.0) * exponents)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).float()
