"""GARFA: a factor on the RoPE base of each key/value head, fixed by config or trained (Eq. 12–14).

The frequency of pair i is multiplied by alpha^(−2i/H · e), with a separate alpha for each head: e is 1/2 in Eq. 14, where the
base is multiplied by the square root of alpha, and 1 in Eq. 12. The paper does not say how GARFA combines with a scaled RoPE:
here the *scaled* frequency (llama3, YaRN, LASP, …) is multiplied, and the bands of the scaling stay where they are.

The paper rotates only the keys this way. Scores are then no longer a function of the distance m − n: with alpha ≠ 1 they
depend on the absolute positions. `queries` rotates queries by their group's factor too, which restores relative positions.

Shapes: K key/value heads, H head dimension, F = H/2 frequencies.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from farsight.configs.schema import Garfa, GarfaLayer


@dataclass(frozen=True)
class LayerGarfa:
    """The GARFA settings of one layer."""

    raw: tuple[float, ...]
    """w of each key/value head."""
    equation: Literal[14, 12] = 14
    queries: bool = False


class HeadRope(NamedTuple):
    """Rotation with separate frequencies for each head; `kernels.head_rotation.rotate_heads` takes the first three fields."""

    positions_BL: Tensor
    """Integers [B, L] or [1, L]."""
    inv_freq_KF: Tensor
    """fp32 [K, F], radians per token."""
    attention_factor: Tensor
    """fp32 scalar that multiplies cosines and sines."""
    queries: bool
    """Rotate queries too, by the frequencies of their group."""


def alpha(raw: Tensor) -> Tensor:
    """alpha = 0.1 + 9.9·sigmoid(w), Eq. 13: fp64, in the shape of w."""
    return 0.1 + 9.9 * raw.double().sigmoid()


def head_scales(raw_K: Tensor, head_dim: int, equation: Literal[14, 12]) -> Tensor:
    """alpha^(−2i/H · e) for each head and pair: fp32 [K, F], which multiplies the layer's frequencies [F].

    Computed in fp64, so that w = −ln 10, rounded to fp32, is a factor of exactly 1.
    """
    pairs_F = torch.arange(0, head_dim, 2, dtype=torch.float64, device=raw_K.device) / head_dim
    return (alpha(raw_K)[:, None] ** (-pairs_F * (0.5 if equation == 14 else 1.0))).float()


class HeadFrequencies(nn.Module):
    """Turns a layer's RoPE frequencies [F] into those of each key/value head [K, F]; it is `Attention.garfa`.

    w is fp32 whatever the model's dtype: a buffer with the config's values, or a parameter named `raw`.

    Args:
        garfa: w of all heads of the layer; the initial value of a parameter.
        trained: make w a parameter.
    """

    raw: Tensor

    def __init__(self, garfa: LayerGarfa, trained: bool) -> None:
        super().__init__()
        self.initial, self.equation, self.queries, self.trained = garfa.raw, garfa.equation, garfa.queries, trained
        if trained:
            self.raw = nn.Parameter(torch.tensor(garfa.raw, dtype=torch.float32))
        else:
            self.hold_heads(0, len(garfa.raw))

    def hold_heads(self, begin: int, end: int) -> None:
        """Keeps only the key/value heads [begin, end) on this rank; a parameter is sharded as other parameters are."""
        if not self.trained:
            self.heads = slice(begin, end)
            self.register_buffer("raw", torch.empty(end - begin, dtype=torch.float32), persistent=False)
            self.fill()

    def fill(self) -> None:
        """Fills the buffer, which building on the meta device leaves empty."""
        if not self.trained and not self.raw.is_meta:
            self.raw.copy_(torch.tensor(self.initial[self.heads], dtype=torch.float32))

    def forward(self, inv_freq_F: Tensor) -> Tensor:
        """The frequencies of the rank's heads: fp32 [K, F] from fp32 [F]."""
        raw = self.raw.to_local() if isinstance(self.raw, DTensor) else self.raw
        return inv_freq_F * head_scales(raw, 2 * len(inv_freq_F), self.equation)


def layer_garfas(garfa: Garfa | None, n_layers: int, n_kv_heads: int) -> dict[int, LayerGarfa]:
    """The settings in `position.garfa` by layer.

    Raises:
        ValueError: layers that the model does not have or that are named twice, or a wrong number of heads.
    """
    found: dict[int, LayerGarfa] = {}
    for entry in () if garfa is None else garfa.layers:
        assert garfa is not None
        if not 0 <= entry.layer < n_layers:
            raise ValueError(f"position.garfa.layers names layer {entry.layer}; the model has 0 to {n_layers - 1}")
        if entry.layer in found:
            raise ValueError(f"position.garfa.layers names layer {entry.layer} twice; leave one of them out")
        if len(entry.raw) != n_kv_heads or not all(math.isfinite(w) for w in entry.raw):
            raise ValueError(
                f"position.garfa.layers: raw of layer {entry.layer} is {list(entry.raw)}; give it a number for each of "
                f"the {n_kv_heads} key/value heads"
            )
        found[entry.layer] = LayerGarfa(entry.raw, garfa.equation, garfa.queries)
    return found


def garfa_of_tensors(
    tensors: Mapping[str, Tensor], equation: Literal[14, 12] = 14, queries: bool = False
) -> Garfa | None:
    """GARFA as a config states it, from w by name (`layers.3.attention.garfa.raw`; other names are ignored).

    Args:
        tensors: w of each layer, [K], any float dtype.

    Returns:
        None if no name ends in `garfa.raw`.
    """
    raws = {int(name.split(".")[1]): tensor for name, tensor in tensors.items() if name.endswith("garfa.raw")}
    entries = tuple(GarfaLayer(layer, tuple(raws[layer].float().tolist())) for layer in sorted(raws))
    return Garfa(equation, queries, entries) if entries else None


def alphas(garfa: Garfa) -> dict[int, list[float]]:
    """alpha of each key/value head, by layer."""
    return {entry.layer: alpha(torch.tensor(entry.raw)).tolist() for entry in garfa.layers}
