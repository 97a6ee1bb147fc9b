"""Layers of a Llama model around an attention function, for end-to-end times with only torch and the kernels installed.

Shape suffixes: B batch, L tokens, D model dim, N query heads, K key-value heads, H head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""q [B, Lq, N, H], all keys and values so far [B, Lk, K, H], and the tokens before the first query."""


@dataclass(frozen=True)
class StackShape:
    layers: int
    D: int
    N: int
    K: int
    H: int
    ffn: int

    def flops(self, tokens: int, visible_pairs: int) -> int:
        """FLOPs of a forward pass: products with the weights, and two with each visible pair in each layer."""
        weights = self.D * self.H * (self.N + 2 * self.K) + self.N * self.H * self.D + 3 * self.D * self.ffn
        return self.layers * (2 * tokens * weights + 4 * self.H * visible_pairs)


class LayerStack(nn.Module):
    """RMSNorm, RoPE, attention, SwiGLU. With `compiled`, everything between two attentions is compiled, for any length."""

    def __init__(self, shape: StackShape, dtype: torch.dtype, device: str, compiled: bool) -> None:
        super().__init__()
        self.shape = shape
        generator = torch.Generator(device).manual_seed(0)

        def weight(rows: int, columns: int) -> nn.Parameter:
            drawn = torch.randn(rows, columns, generator=generator, device=device, dtype=dtype)
            return nn.Parameter(drawn * columns**-0.5)

        heads = shape.N + 2 * shape.K
        self.qkv = nn.ParameterList(weight(heads * shape.H, shape.D) for _ in range(shape.layers))
        self.out = nn.ParameterList(weight(shape.D, shape.N * shape.H) for _ in range(shape.layers))
        self.up = nn.ParameterList(weight(2 * shape.ffn, shape.D) for _ in range(shape.layers))
        self.down = nn.ParameterList(weight(shape.D, shape.ffn) for _ in range(shape.layers))
        self.before = torch.compile(self._before, dynamic=True) if compiled else self._before
        self.after = torch.compile(self._after, dynamic=True) if compiled else self._after

    def _before(self, x_BLD: Tensor, qkv: Tensor, cos_LH: Tensor, sin_LH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = self.shape
        projected = F.linear(F.rms_norm(x_BLD, (s.D,)), qkv).unflatten(-1, (-1, s.H))
        q, k, v = projected.split((s.N, s.K, s.K), dim=2)
        return rotated(q, cos_LH, sin_LH), rotated(k, cos_LH, sin_LH), v

    def _after(self, x_BLD: Tensor, o_BLNH: Tensor, out: Tensor, up: Tensor, down: Tensor) -> Tensor:
        x_BLD = x_BLD + F.linear(o_BLNH.flatten(2), out)
        gate, value = F.linear(F.rms_norm(x_BLD, (self.shape.D,)), up).chunk(2, dim=-1)
        return x_BLD + F.linear(F.silu(gate) * value, down)

    def forward(self, x_BLD: Tensor, attend: Attend) -> Tensor:
        """A whole sequence, each layer recomputed in the backward pass."""
        cos, sin = rope(0, x_BLD.shape[1], self.shape.H, x_BLD)

        def layer(x: Tensor, i: int) -> Tensor:
            q, k, v = self.before(x, self.qkv[i], cos, sin)
            return self.after(x, attend(q, k, v, 0), self.out[i], self.up[i], self.down[i])

        for i in range(self.shape.layers):
            x_BLD = checkpoint(layer, x_BLD, i, use_reentrant=False)
        return x_BLD

    @torch.no_grad()
    def prefill(
        self, x_BLD: Tensor, attend: Attend, chunk: int, caches: list[tuple[Tensor, Tensor]], whole: bool = False
    ) -> Tensor:
        """Returns the last chunk's output, and fills `caches`: keys and values [B, L, K, H] of each layer.

        With `whole` attention takes the sequence at once, layer by layer, and all else the same chunks.
        """
        chunks = [slice(begin, min(begin + chunk, x_BLD.shape[1])) for begin in range(0, x_BLD.shape[1], chunk)]
        if not whole:
            for part in chunks:
                h = x_BLD[:, part]
                for i, (keys, values) in enumerate(caches):
                    q = self._fill(i, h, part, keys, values)
                    o = attend(q, keys[:, : part.stop], values[:, : part.stop], part.start)
                    h = self.after(h, o, self.out[i], self.up[i], self.down[i])
            return h
        h = x_BLD.clone()
        q = x_BLD.new_empty((*x_BLD.shape[:2], self.shape.N, self.shape.H))
        for i, (keys, values) in enumerate(caches):
            for part in chunks:
                q[:, part] = self._fill(i, h[:, part], part, keys, values)
            o = attend(q, keys[:, : x_BLD.shape[1]], values[:, : x_BLD.shape[1]], 0)
            for part in chunks:
                h[:, part] = self.after(h[:, part], o[:, part], self.out[i], self.up[i], self.down[i])
        return h[:, chunks[-1]]

    def _fill(self, i: int, h: Tensor, part: slice, keys: Tensor, values: Tensor) -> Tensor:
        """Returns the queries of a chunk in layer i, and writes its keys and values to the cache."""
        q, k, v = self.before(h, self.qkv[i], *rope(part.start, part.stop, self.shape.H, h))
        keys[:, part], values[:, part] = k, v
        return q

    def caches(self, tokens: int, like: Tensor) -> list[tuple[Tensor, Tensor]]:
        shape = (1, tokens, self.shape.K, self.shape.H)
        return [(like.new_empty(shape), like.new_empty(shape)) for _ in range(self.shape.layers)]


def rope(begin: int, end: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine [L, 1, H], base 500,000."""
    frequencies = 500_000 ** -(torch.arange(0, head_dim, 2, device=like.device) / head_dim)
    angles = torch.arange(begin, end, device=like.device)[:, None] * frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotated(x_BLNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x_BLNH.chunk(2, dim=-1)
    return x_BLNH * cos + torch.cat((-second, first), dim=-1) * sin
