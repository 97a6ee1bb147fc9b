"""Attention over a sequence that is split over ranks: the halo exchange, and the attention of a rank's own queries.

Each rank packs the keys and values it has to send (`context.py`) into one buffer, all ranks exchange in one all-to-all, and
each key-value head's keys are assembled from the rank's own and the received ones. Autograd sends gradients back the same
way. Queries never move.

Shape suffixes: B batch, L tokens that the rank holds, T tokens of the whole sequence, N query heads, K key-value heads,
H head dim, R rows (one token of one key-value head), 2 keys and values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from farsight.configs.schema import JobConfig
from farsight.kernels.scoped_attention import Visibility, scoped_attention
from farsight.parallel.context import Rows, SequenceLayout, keys_seen, pieces, reaches, sent
from farsight.parallel.meshes import ParallelDims


@dataclass(frozen=True)
class Context:
    """The ranks that sequences are split over, and how; a `model.context.SequenceContext`."""

    group: dist.ProcessGroup
    layout: SequenceLayout
    rotates: ClassVar[bool] = False

    @classmethod
    def of(cls, dims: ParallelDims, config: JobConfig) -> "Context | None":
        """The context of a run; None if its sequences are not split."""
        if (mesh := dims.mesh("cp")) is None:
            return None
        return cls(mesh.get_group(), config.parallelism.context_parallel_load_balancer)

    def own(self, x_BT: Tensor) -> Tensor:
        """The rank's part [B, L, ...] of a tensor [B, T, ...], in the order in which the rank holds its tokens."""
        spans = pieces(self.group.rank(), self.group.size(), x_BT.shape[1], self.layout)
        return torch.cat([x_BT[:, begin:end] for begin, end in spans], dim=1)

    @torch.compiler.disable
    def exchange(self, k_BLKH: Tensor, v_BLKH: Tensor, scopes: Sequence[int]) -> "Exchange":
        """Sends the keys and values that other ranks need, and returns without waiting for those that this rank needs.

        Args:
            k_BLKH, v_BLKH: keys and values of the tokens that the rank holds.
            scopes: scopes of the query heads, as numbers.
        """
        B, L, K, H = k_BLKH.shape
        rank, ranks = self.group.rank(), self.group.size()
        reach = reaches(scopes, K, L * ranks)
        plan = _plan(rank, ranks, L * ranks, reach, len(scopes) // K, self.layout, k_BLKH.device)
        own_R2BH = torch.stack((k_BLKH, v_BLKH)).permute(2, 3, 0, 1, 4).reshape(L * K, 2, B, H)
        packed_R2BH = own_R2BH.index_select(0, plan.send)
        received = all_to_all_single_autograd(packed_R2BH, plan.received_splits, plan.sent_splits, self.group)
        return Exchange(plan, own_R2BH, received)


@dataclass(frozen=True)
class Exchange:
    """Keys and values in flight; a `model.context.PendingKV`."""

    plan: "_Plan"
    own_R2BH: Tensor
    received_R2BH: Tensor
    """Reading it waits for the transfer."""

    @property
    def received_bytes(self) -> int:
        """Bytes that this rank receives in the forward pass."""
        return self.received_R2BH.nbytes

    @torch.compiler.disable
    def attend(self, q_BLNH: Tensor, visibility: Visibility, backend: str) -> Tensor:
        """Attention of the rank's queries over all keys that they see, on this rank or others: [B, L, N, H] in q's dtype."""
        rows_R2BH = torch.cat((self.own_R2BH, self.received_R2BH))
        pieces_of_o = []
        for parts, order in self.plan.pieces:
            outputs = []
            for part in parts:
                kv_BLKH = rows_R2BH.index_select(0, part.rows).unflatten(0, (-1, part.kv_heads)).permute(2, 3, 0, 1, 4)
                q, seen = q_BLNH[:, part.queries], visibility.for_keys(part.keys, part.q_offset)
                if order is not None:
                    q, seen = q.index_select(2, part.heads), seen.for_heads(part.heads)
                outputs.append(scoped_attention(q, kv_BLKH[0], kv_BLKH[1], seen, backend=backend))
            pieces_of_o.append(outputs[0] if order is None else torch.cat(outputs, dim=2).index_select(2, order))
        return torch.cat(pieces_of_o, dim=1)


@dataclass(frozen=True)
class _Part:
    """Queries of one piece, for the query heads whose key-value heads need the same keys: one attention call."""

    queries: slice
    """Indexes among the tokens that the rank holds."""
    keys: slice
    """Tokens of the sequence."""
    q_offset: int
    """Number of keys before the first query."""
    heads: Tensor
    """int64, the query heads."""
    kv_heads: int
    """Number of key-value heads."""
    rows: Tensor
    """int64 [keys × kv_heads]: the indexes of those keys among the rank's own rows followed by the received ones."""


@dataclass(frozen=True)
class _Plan:
    """A rank's part of the exchange, as indexes."""

    send: Tensor
    """int64 [R]: the rank's own rows to send, by target."""
    sent_splits: list[int]
    received_splits: list[int]
    pieces: list[tuple[list[_Part], Tensor | None]]
    """For each piece, its parts and the place of each head in their outputs; None if one part has all heads in order."""


@lru_cache(maxsize=64)
def _plan(
    rank: int,
    ranks: int,
    tokens: int,
    reach: tuple[int, ...],
    kv_group: int,
    layout: SequenceLayout,
    device: torch.device,
) -> _Plan:
    """Numbers rows token by token, and by key-value head within a token: first the rank's own, then the received ones."""
    own, K = pieces(rank, ranks, tokens, layout), len(reach)
    firsts = [0, *accumulate(end - begin for begin, end in own)]
    place = torch.full((tokens, K), -1)  # row of each token and key-value head; -1 if it is not on this rank
    for (begin, end), first in zip(own, firsts, strict=False):
        place[begin:end] = torch.arange(first * K, (first + end - begin) * K).view(-1, K)

    def rows_of(rows: Rows) -> Tensor:
        return place[rows.begin : rows.end, rows.kv_head]

    to = [sent(rank, target, ranks, tokens, reach, layout) for target in range(ranks)]
    send = torch.cat([place.new_empty(0), *(rows_of(rows) for target in to for rows in target)])
    come = [sent(source, rank, ranks, tokens, reach, layout) for source in range(ranks)]
    next_row = firsts[-1] * K
    for rows in (rows for source in come for rows in source):
        rows_of(rows).copy_(torch.arange(next_row, next_row + len(rows)))
        next_row += len(rows)

    by_piece: list[tuple[list[_Part], Tensor | None]] = []
    for piece, first in zip(own, firsts, strict=False):
        sharing: dict[tuple[int, int], list[int]] = {}
        for kv_head, far in enumerate(reach):
            sharing.setdefault(keys_seen(piece, far), []).append(kv_head)
        parts, order = [], []
        for (begin, end), kv_heads in sharing.items():
            needed = place[begin:end, kv_heads]
            assert (needed >= 0).all(), "a rank lacks keys that its queries see"
            heads = [kv_head * kv_group + member for kv_head in kv_heads for member in range(kv_group)]
            order += heads
            queries = slice(first, first + piece[1] - piece[0])
            heads_N = torch.tensor(heads, device=device)
            before = piece[0] - begin
            parts.append(_Part(queries, slice(begin, end), before, heads_N, len(kv_heads), needed.flatten().to(device)))
        by_piece.append((parts, None if len(parts) == 1 else torch.tensor(order, device=device).argsort()))
    return _Plan(send.to(device), [sum(map(len, x)) for x in to], [sum(map(len, x)) for x in come], by_piece)
