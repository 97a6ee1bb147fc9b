"""Masks of the banded backend, added to a tile's scores: 0 or the bias where a key is visible, -inf elsewhere.

Shape suffixes: B batch, L tokens, N query heads; within a call M blocks or batch rows, X heads or batch rows, C queries of
a block, W keys of a block.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from farsight.kernels.scoped_attention import semantics
from farsight.kernels.scoped_attention.banded.tiles import Mask, Tile
from farsight.kernels.scoped_attention.bias import ScoreBias

CACHED_ELEMENTS = (
    2**20
)  # Masks up to this size are cached across calls: a short step would spend its time building them.


class Masks:
    """Masks for the tiles of one call.

    Without documents a mask depends only on distances, so all tiles of a head are slices of one mask of a block's rows by
    a scope's keys, which is kept until the next head: memory is linear in tokens.
    """

    def __init__(
        self,
        tiles: Sequence[Tile],
        scopes: Sequence[int],
        bias: ScoreBias | None,
        document_starts_BL: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.scopes, self.bias_kind = tuple(scopes), None if bias is None else bias.kind
        # Of each head, as numbers that a cache can compare.
        self.coefficients = None if bias is None else tuple(zip(*bias.coefficients_PN.tolist(), strict=True))
        self.document_starts_BL = document_starts_BL
        self.dtype, self.device = dtype, device
        self.extents: dict[tuple, tuple[int, int, int]] = {}
        for tile in tiles:
            if tile.mask in (Mask.BAND, Mask.DOCUMENTS):
                most, this = self.extents.get(self._heads(tile), (0, 0, 0)), _extent(tile)
                self.extents[self._heads(tile)] = (max(most[0], this[0]), max(most[1], this[1]), max(most[2], this[2]))
        self.last: tuple[tuple, Tensor] | None = None

    def __call__(self, tile: Tile) -> Tensor | None:
        """The mask to add to the scores of the tile's blocks: [M or 1, X or 1, C, W] in the scores' dtype; None for none."""
        match tile.mask:
            case Mask.FULL | Mask.CAUSAL:
                return None
            case Mask.BAND:
                return self._band(tile)
            case Mask.DOCUMENTS:
                assert self.document_starts_BL is not None
                return torch.where(_in_document(tile, self.document_starts_BL), self._band(tile), -torch.inf)

    def _heads(self, tile: Tile) -> tuple:
        heads = slice(tile.first_head, tile.first_head + tile.heads)
        return self.scopes[heads], None if self.coefficients is None else self.coefficients[heads]

    def _band(self, tile: Tile) -> Tensor:
        heads = self._heads(tile)
        rows, before, after = self.extents[heads]
        if self.last is None or self.last[0] != heads:
            scopes, coefficients = heads
            scopes = tuple(min(scope, before + rows) for scope in scopes)  # no key is farther away
            if coefficients is None and len(set(scopes)) == 1:
                scopes = scopes[:1]
            small = rows * (before + after) * len(scopes) <= CACHED_ELEMENTS
            build = _cached_band_mask if small else _band_mask
            mask = build(rows, before, after, scopes, self.bias_kind, coefficients, self.dtype, self.device)
            self.last = heads, mask
        rows, lead, _ = _extent(tile)
        mask = self.last[1][:, :, :rows, before - lead : before - lead + tile.keys]
        if tile.count > 1 and tile.key_step == 0:  # blocks of rows over the same keys
            mask = mask.squeeze(0).unflatten(1, (tile.count, tile.rows)).transpose(0, 1)
        return mask


def _extent(tile: Tile) -> tuple[int, int, int]:
    """Number of a tile's rows over one range of keys, of its keys before the first row's own, and of those from it on."""
    lead = tile.first_query - tile.first_key
    return tile.rows * (tile.count if tile.key_step == 0 else 1), lead, tile.keys - lead


def _band_mask(
    rows: int,
    before: int,
    after: int,
    scopes: tuple[int, ...],
    bias_kind: str | None,
    coefficients: tuple[tuple[float, ...], ...] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """[1, heads, rows, before + after], with row 0 at key `before`: computed once per distance, then laid out row by row."""
    key = torch.arange(1 - rows, before + after, device=device)  # all distances that occur, as keys seen from row 0
    seen = semantics.visible(torch.tensor(before, device=device), key, torch.tensor(scopes, device=device)[:, None])
    bias = torch.zeros((), dtype=dtype, device=device)
    if bias_kind is not None:
        of_heads = ScoreBias(bias_kind, torch.tensor(coefficients, dtype=dtype, device=device).T.contiguous())
        bias = of_heads(before - key, len(scopes), 1)
    by_distance = torch.where(seen, bias, -torch.inf)
    last_row_first = by_distance.unfold(-1, before + after, 1)
    # Not flip(), whose result is transposed in memory: the fused kernel would copy the mask for every batch row and head.
    return last_row_first.index_select(1, torch.arange(rows - 1, -1, -1, device=device)).unsqueeze(0)


_cached_band_mask: Callable[..., Tensor] = lru_cache(maxsize=32)(_band_mask)


def _in_document(tile: Tile, document_starts_BL: Tensor) -> Tensor:
    """bool [M, X or 1, C, W]: which keys of each block lie in the query's document."""
    batch, rows = slice(tile.first_batch, tile.first_batch + tile.batches), tile.count * tile.rows
    starts = document_starts_BL[batch, tile.first_query : tile.first_query + rows].int() - tile.first_key
    starts = starts.unflatten(1, (tile.count, tile.rows)).transpose(0, 1)  # [count, batches, C]
    starts = starts - torch.arange(tile.count, dtype=torch.int32, device=starts.device)[:, None, None] * tile.key_step
    # As in `banded._blocks`, X is the heads, or the batch rows if there are several of them and several blocks.
    starts = starts.transpose(0, 1) if tile.count == 1 else starts
    key = torch.arange(tile.keys, dtype=torch.int32, device=starts.device)
    return semantics.in_document(key, starts.unsqueeze(-1))
