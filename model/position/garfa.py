"""GARFA: a factor on the RoPE base of each key/value head, fixed by config or trained (Eq. 12–14).

With alpha of head k, the frequency of pair i is multiplied by alpha^(−2i/H · e): e is 1/2 in Eq. 14, where the base is
multiplied by the square root of alpha, and 1 in Eq. 12. What the paper leaves open, where a RoPE is itself scaled: here the
*scaled* frequency (llama3, YaRN, LASP, …) is multiplied, and its bands stay where they are.

The paper turns keys alone. Scores are then no function of the distance m − n: alpha other than 1 makes them depend on where a
pair of tokens stands. `queries` turns queries by the factor of their group too, which restores it.

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
    """GARFA of one layer, with numbers."""

    raw: tuple[float, ...]
    """w of each key/value head."""
    equation: Literal[14, 12] = 14
    queries: bool = False


class HeadRope(NamedTuple):
    """What turns heads at speeds of their own; `kernels.head_rotation.rotate_heads` takes the first three."""

    positions_BL: Tensor
    inv_freq_KF: Tensor
    attention_factor: Tensor
    queries: bool


def alpha(raw: Tensor) -> Tensor:
    """alpha = 0.1 + 9.9·sigmoid(w), Eq. 13, fp64."""
    return 0.1 + 9.9 * raw.double().sigmoid()


def head_scales(raw_K: Tensor, head_dim: int, equation: Literal[14, 12]) -> Tensor:
    """alpha^(−2i/H · e) of each head and pair: fp32 [K, F].

    Taken in fp64, so that w = −ln 10, rounded to fp32, is a factor of exactly 1.
    """
    pairs_F = torch.arange(0, head_dim, 2, dtype=torch.float64, device=raw_K.device) / head_dim
    return (alpha(raw_K)[:, None] ** (-pairs_F * (0.5 if equation == 14 else 1.0))).float()


class HeadFrequencies(nn.Module):
    """A layer's frequencies → those of each of its key/value heads. `Attention.garfa`, where a layer has it.

    w is fp32 whatever the model's dtype is: a buffer that comes from config, or the parameter `raw`.

    Args:
        garfa: w of all heads of the layer; what a parameter starts from.
        trained: make it a parameter.
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
        """Takes the key/value heads [begin, end) for the rank's own; a parameter is divided as other parameters are."""
        if not self.trained:
            self.heads = slice(begin, end)
            self.register_buffer("raw", torch.empty(end - begin, dtype=torch.float32), persistent=False)
            self.fill()

    def fill(self) -> None:
        """Fills the buffer, which building on the meta device leaves empty."""
        if not self.trained and not self.raw.is_meta:
            self.raw.copy_(torch.tensor(self.initial[self.heads], dtype=torch.float32))

    def forward(self, inv_freq_F: Tensor) -> Tensor:
        """fp32 [K, F], of the rank's heads."""
        raw = self.raw.to_local() if isinstance(self.raw, DTensor) else self.raw
        return inv_freq_F * head_scales(raw, 2 * len(inv_freq_F), self.equation)


def layer_garfas(garfa: Garfa | None, n_layers: int, n_kv_heads: int) -> dict[int, LayerGarfa]:
    """`position.garfa` by layer.

    Raises:
        ValueError: layers that the model does not have or that are named twice, or another number of heads.
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
    """The same of tensors by name (`layers.3.attention.garfa.raw`; others are passed over); None without any."""
    raws = {int(name.split(".")[1]): tensor for name, tensor in tensors.items() if name.endswith("garfa.raw")}
    entries = tuple(GarfaLayer(layer, tuple(raws[layer].float().tolist())) for layer in sorted(raws))
    return Garfa(equation, queries, entries) if entries else None


def alphas(garfa: Garfa) -> dict[int, list[float]]:
    """alpha of each key/value head, by layer."""
    return {entry.layer: alpha(torch.tensor(entry.raw)).tolist() for entry in garfa.layers}
