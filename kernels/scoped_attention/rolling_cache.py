"""The keys and values that one layer keeps during generation: for each key-value head, only those that can still be seen.

Shape suffixes: B batch, L tokens, N query heads, K key-value heads, H head dim, S slots of all key-value heads.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor


class RollingCache:
    """A ring of slots for each key-value head, as long as the widest scope among the query heads that share it.

    Token t of a head with capacity C is in slot t mod C of its ring, where it replaces the token that has just left the
    widest scope. A head that sees everything has `most_tokens` slots. `scoped_prefill` and `scoped_decode` append tokens and
    attend to it.

    Args:
        scopes_N: tokens that each query head sees; N is a multiple of `kv_heads`.
        kv_heads: key-value heads K.
        most_tokens: length of the longest sequence that will be kept.
        batch, head_dim, dtype, device: those of the keys and values.

    Attributes:
        keys_BSH, values_BSH: [B, S, H] in `dtype`; the rings of all key-value heads one after the other.
        tokens: int32 tensor [1] on the device, the number of tokens appended so far. Nothing here reads it on the host, so
            that a decoding step can be captured in a CUDA graph.
        runs: adjacent key-value heads whose rings are equally long, which one product can compute together.

    Raises:
        ValueError: a scope or `most_tokens` below 1, or query heads that are not a multiple of `kv_heads`.
    """

    def __init__(
        self,
        scopes_N: Sequence[int],
        kv_heads: int,
        most_tokens: int,
        batch: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if most_tokens < 1:
            raise ValueError(f"most_tokens is {most_tokens}: set the length of the longest sequence, 1 or more")
        if kv_heads < 1 or len(scopes_N) % kv_heads:
            raise ValueError(
                f"{len(scopes_N)} query heads do not share {kv_heads} key-value heads evenly: "
                "make the query heads a multiple"
            )
        for head, scope in enumerate(scopes_N):
            if scope < 1:
                raise ValueError(f"scopes_N[{head}] is {scope}: a scope counts the token itself, set it to 1 or more")
        group = len(scopes_N) // kv_heads
        widest = [max(scopes_N[head * group : (head + 1) * group]) for head in range(kv_heads)]
        self.capacities = tuple(min(scope, most_tokens) for scope in widest)
        self.most_tokens = most_tokens
        runs = [[head for head, _ in run] for _, run in groupby(enumerate(self.capacities), key=lambda pair: pair[1])]
        self.runs = tuple(slice(run[0], run[-1] + 1) for run in runs)
        firsts = [sum(self.capacities[:head]) for head in range(kv_heads)]
        self.firsts_K = torch.tensor(firsts, device=device)
        self.capacities_K = torch.tensor(self.capacities, device=device)
        shape = (batch, sum(self.capacities), head_dim)
        self.keys_BSH = torch.empty(shape, dtype=dtype, device=device)
        self.values_BSH = torch.empty(shape, dtype=dtype, device=device)
        self.tokens = torch.zeros(1, dtype=torch.int32, device=device)

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads K."""
        return len(self.capacities)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys_BSH.nbytes + self.values_BSH.nbytes

    def rings(self, run: slice) -> tuple[Tensor, Tensor]:
        """Keys and values of one of `runs`, in slot order: views [B, heads of the run, capacity, H]."""
        first, capacity = sum(self.capacities[: run.start]), self.capacities[run.start]
        slots = slice(first, first + (run.stop - run.start) * capacity)
        keys, values = (x[:, slots].unflatten(1, (-1, capacity)) for x in (self.keys_BSH, self.values_BSH))
        return keys, values

    def last_tokens(self, run: slice, tokens: int, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the last `count` of `tokens` appended tokens, in token order: [B, count, heads of the run, H].

        They are views if the ring has not wrapped; `count` is at most its capacity.
        """
        keys_BKCH, values_BKCH = self.rings(run)
        capacity = keys_BKCH.shape[2]
        if tokens <= capacity:
            kept = slice(tokens - count, tokens)
            return keys_BKCH[:, :, kept].transpose(1, 2), values_BKCH[:, :, kept].transpose(1, 2)
        slots = torch.arange(tokens - count, tokens, device=keys_BKCH.device) % capacity
        return keys_BKCH[:, :, slots].transpose(1, 2), values_BKCH[:, :, slots].transpose(1, 2)

    @torch.no_grad()
    def append(self, k_BLKH: Tensor, v_BLKH: Tensor) -> None:
        """Stores the next L tokens, except those that no later token can see: keys and values [B, L, K, H].

        Beyond `most_tokens` heads that see everything silently lose their oldest tokens, since the count is not read on the
        host.

        Raises:
            ValueError: shapes that do not match the cache's.
        """
        B, L, K, H = k_BLKH.shape
        if k_BLKH.shape != v_BLKH.shape or (len(self.keys_BSH), self.kv_heads, self.keys_BSH.shape[-1]) != (B, K, H):
            raise ValueError(
                f"keys are {list(k_BLKH.shape)} and values {list(v_BLKH.shape)}: both have to be "
                f"[{len(self.keys_BSH)}, tokens, {self.kv_heads}, {self.keys_BSH.shape[-1]}]"
            )
        if L == 1:
            slots_K = self.firsts_K + self.tokens % self.capacities_K
            self.keys_BSH.index_copy_(1, slots_K, k_BLKH[:, 0])
            self.values_BSH.index_copy_(1, slots_K, v_BLKH[:, 0])
        else:
            first = 0
            for head, capacity in enumerate(self.capacities):
                kept = min(L, capacity)
                token = self.tokens + torch.arange(L - kept, L, device=self.tokens.device)
                slots = first + token % capacity
                self.keys_BSH.index_copy_(1, slots, k_BLKH[:, L - kept :, head])
                self.values_BSH.index_copy_(1, slots, v_BLKH[:, L - kept :, head])
                first += capacity
        self.tokens += L
