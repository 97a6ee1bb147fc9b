"""Attention over a sequence that is split over ranks: the halo exchange, and the attention of a rank's own queries.

Each rank packs the keys and values it has to send (`context.py`) into one buffer, all ranks exchange in one all-to-all, and
the keys that each piece of the rank's queries sees in each key-value head are packed as segments, from the rank's own and the
received ones, for one call of attention. Autograd sends gradients back the same way. Queries never move.

Shape suffixes: B batch, L tokens that the rank holds, T tokens of the whole sequence, N query heads, K key-value heads,
H head dim, R rows (one token of one key-value head), 2 keys and values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from farsight.configs.schema import JobConfig
from farsight.kernels.scoped_attention import Segments, Visibility, segmented_attention
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
        plan = _plan(rank, ranks, L * ranks, reach, self.layout, k_BLKH.device)
        own_R2BH = torch.stack((k_BLKH, v_BLKH)).permute(2, 3, 0, 1, 4).reshape(L * K, 2, B, H)
        sent_R2BH = _Take.apply(own_R2BH, plan.sent)
        received = all_to_all_single_autograd(sent_R2BH, plan.received_splits, plan.sent_splits, self.group)
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
        kv_R2BH = _Take.apply(torch.cat((self.own_R2BH, self.received_R2BH)), self.plan.packed)
        return segmented_attention(q_BLNH, kv_R2BH, self.plan.segments, visibility, backend=backend)


class _Rows(NamedTuple):
    """Rows to copy from a buffer to another, and where each row of the first is in the second."""

    source: Tensor
    """int64: a row of the first for each row of the second."""
    places: Tensor
    """int64: rows of the second, by the row of the first that they come from."""
    ends: Tensor
    """int64: where the places of each row of the first begin, and their number."""

    @classmethod
    def of(cls, source: Tensor, rows: int, device: torch.device) -> "_Rows":
        """Those of an index, on the CPU, into a buffer of so many rows."""
        ends = torch.cat((source.new_zeros(1), source.bincount(minlength=rows).cumsum(0)))
        return cls(*(x.to(device) for x in (source, source.argsort(stable=True), ends)))


class _Take(torch.autograd.Function):
    """Rows of x [rows, ...], some more than once. The gradient adds a row's places in fp32 or wider, in a fixed order.

    That of `index_select` adds with atomics in x's dtype, in any order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: _Rows) -> Tensor:
        ctx.rows, ctx.shape = rows, x.shape
        return x.index_select(0, rows.source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        by_sum = 0
        dx, *_ = torch.ops.aten._embedding_bag_forward_only(
            grad.flatten(1), ctx.rows.places, ctx.rows.ends, False, by_sum, include_last_offset=True
        )
        return dx.view(ctx.shape), None


@dataclass(frozen=True)
class _Plan:
    """A rank's part of the exchange, as indexes of rows: token by token, in a token by key-value head."""

    sent: _Rows
    """Of the rank's own rows, by target."""
    sent_splits: list[int]
    received_splits: list[int]
    packed: _Rows
    """Of the rank's own rows followed by the received ones, in the order of the segments."""
    segments: Segments


@lru_cache(maxsize=64)
def _plan(
    rank: int, ranks: int, tokens: int, reach: tuple[int, ...], layout: SequenceLayout, device: torch.device
) -> _Plan:
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
    own_rows = next_row = firsts[-1] * K
    for rows in (rows for source in come for rows in source):
        rows_of(rows).copy_(torch.arange(next_row, next_row + len(rows)))
        next_row += len(rows)

    segments = Segments(own, tuple(tuple(keys_seen(piece, far)[0] for far in reach) for piece in own))
    packed = torch.cat([place[begin:end, kv_head] for _, kv_head, (begin, end) in segments])
    assert (packed >= 0).all(), "a rank lacks keys that its queries see"
    return _Plan(
        _Rows.of(send, own_rows, device),
        [sum(map(len, x)) for x in to],
        [sum(map(len, x)) for x in come],
        _Rows.of(packed, next_row, device),
        segments,
    )
