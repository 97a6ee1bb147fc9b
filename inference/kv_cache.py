"""Key-value caches, behind the interface that attention layers call.

Shape suffixes: B batch, L new tokens, N query heads, K key-value heads, H head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from farsight.kernels.scoped_attention import DECODE_BACKENDS, RollingCache, Visibility, scoped_decode, scoped_prefill
from farsight.kernels.scoped_attention.choice import pick_backend
from farsight.model.attention import Attention
from farsight.model.context import SequenceContext
from farsight.model.llama import Llama


@dataclass(frozen=True)
class Batch:
    """Rows read together, left-padded to the same length."""

    starts: tuple[int, ...]
    """Index of each row's first token; padding comes before it."""
    prompt: int
    """Length of the prompts, padding included; tokens after it are decoded."""
    most_tokens: int
    """Largest length of the rows, padding included."""
    device: torch.device
    dtype: torch.dtype
    """Dtype of keys and values."""

    @property
    def starts_B(self) -> Tensor | None:
        """int64 on the device; None where no row is padded."""
        return torch.tensor(self.starts, device=self.device) if any(self.starts) else None


class LayerCache(SequenceContext, Protocol):
    """A context that keeps keys and values between calls."""

    @property
    def nbytes(self) -> int:
        """Bytes held for the sequences."""
        ...


class RollingLayer:
    """A layer with a rolling cache: each key-value head keeps what the widest scope among its query heads still sees."""

    rotates = False

    def __init__(self, attention: Attention, batch: Batch, kv_heads: int) -> None:
        rows, head_dim = len(batch.starts), attention.head_dim
        self.cache = RollingCache(
            attention.scopes, kv_heads, batch.most_tokens, rows, head_dim, batch.dtype, batch.device
        )
        self.starts_B, self.tokens = batch.starts_B, 0
        # Training backends that cannot decode leave the choice to the kernels.
        self.decode = attention.backend if attention.backend in DECODE_BACKENDS else "auto"

    @property
    def capturable(self) -> bool:
        """True if decoding a token depends on tensors alone, as a CUDA graph requires."""
        cache = self.cache.keys_BSH
        picked = self.decode
        if picked == "auto":
            picked = pick_backend(cache.device.type, str(cache.dtype), cache.shape[-1], decode=True)
        return picked == "triton"

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes

    def exchange(self, k_BLKH: Tensor, v_BLKH: Tensor, scopes: Sequence[int]) -> "RollingLayer":
        self.new = k_BLKH, v_BLKH
        return self

    def attend(self, q_BLNH: Tensor, visibility: Visibility, backend: str) -> Tensor:
        k_BLKH, v_BLKH = self.new
        del self.new
        seen, self.tokens = self.tokens, self.tokens + q_BLNH.shape[1]
        if q_BLNH.shape[1] > 1:
            return scoped_prefill(q_BLNH, k_BLKH, v_BLKH, self.cache, visibility, self.starts_B, backend, seen)
        o_BNH = scoped_decode(
            q_BLNH[:, 0], k_BLKH[:, 0], v_BLKH[:, 0], self.cache, visibility, self.starts_B, None, self.decode, seen
        )
        return o_BNH[:, None]


def rolling_layers(model: Llama, batch: Batch) -> dict[str, LayerCache]:
    """A rolling cache for each layer of the model; under tensor parallelism, for this rank's heads."""
    a = model.architecture
    group = a.n_heads // a.n_kv_heads
    return {
        name: RollingLayer(attention, batch, len(attention.scopes) // group) for name, attention in model.attentions()
    }


def dense_bytes(model: Llama, batch: Batch) -> int:
    """Bytes of a cache that keeps every token for each of the rank's heads."""
    a = model.architecture
    group, element = a.n_heads // a.n_kv_heads, batch.dtype.itemsize
    heads = sum(len(attention.scopes) // group for _, attention in model.attentions())
    return 2 * heads * len(batch.starts) * batch.most_tokens * a.head_dim * element
