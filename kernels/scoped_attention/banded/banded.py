"""Scoped attention on any device: work in proportion to what the heads see, memory in proportion to the tokens.

`tiles.plan` cuts the visible band into rectangles; here each is computed as one batch of blocks over strided views of
q, k and v, without copies. The forward pass saves the output and the log-sum-exp of every row; the backward pass recomputes
the probabilities from them. On CPUs a block is computed by PyTorch's fused flash kernel, elsewhere by two matrix products.

Both passes are custom ops, for torch.compile and selective activation checkpointing: `farsight::banded_attention` is
the one to save.

Shape suffixes: B batch, L tokens (Lq queries, Lk keys), N query heads, K key-value heads, H head dim.
Within a call: M blocks or batch rows, X heads or batch rows, C queries of a block, W keys of a block.
"""

import torch
from torch import Tensor

from farsight.kernels.scoped_attention import semantics
from farsight.kernels.scoped_attention.autograd import register_backward
from farsight.kernels.scoped_attention.banded.masks import Masks
from farsight.kernels.scoped_attention.banded.tiles import Mask, Shape, Tile, document_chunks, plan
from farsight.kernels.scoped_attention.visibility import Visibility

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def banded_attention(q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, visibility: Visibility, scale: float) -> Tensor:
    """`api.scoped_attention` with all arguments given."""
    o_BLNH, _ = banded_forward(q_BLNH, k_BLKH, v_BLKH, *visibility.parts(), scale)
    return o_BLNH


@torch.library.custom_op("farsight::banded_attention", mutates_args=())
def banded_forward(
    q_BLNH: Tensor,
    k_BLKH: Tensor,
    v_BLKH: Tensor,
    scopes_N: Tensor,
    document_starts_BL: Tensor | None,
    bias_PN: Tensor | None,
    bias_kind: str | None,
    q_offset: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output [B, Lq, N, H] in q's dtype, and the log-sum-exp of each row's scores [B, Lq, N], fp32 (fp64 for fp64)."""
    q, k, v = (_widened(x) for x in (q_BLNH, k_BLKH, v_BLKH))
    visibility = Visibility.of_parts(scopes_N, document_starts_BL, bias_PN, bias_kind, q_offset)
    band = _Band(q, k, visibility, scale)
    if band.one_call:
        o, lse = band.attend(band.tiles[0], q, k, v)
        return o.transpose(1, 2).contiguous().to(q_BLNH.dtype), lse.transpose(1, 2).contiguous()
    o_BLNH = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse_BLN = torch.empty(q.shape[:3], dtype=q.dtype, device=q.device)
    for tile in band.tiles:
        o, lse = band.attend(tile, q, k, v)
        lse = lse.unsqueeze(-1)
        o_rows, lse_rows = band.rows(tile, o_BLNH), band.rows(tile, lse_BLN.unsqueeze(-1))
        if tile.merges:
            total = torch.logaddexp(lse_rows, lse)
            o_rows.mul_((lse_rows - total).exp_()).addcmul_(o, (lse - total).exp_())
            lse_rows.copy_(total)
        else:
            o_rows.copy_(o)
            lse_rows.copy_(lse)
    return o_BLNH.to(q_BLNH.dtype), lse_BLN


@banded_forward.register_fake
def _(q, k, v, scopes, documents, bias, bias_kind, q_offset, scale):
    o = q.new_empty(q.shape)
    return o, q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("farsight::banded_attention_backward", mutates_args=())
def banded_backward(
    do_BLNH: Tensor,
    q_BLNH: Tensor,
    k_BLKH: Tensor,
    v_BLKH: Tensor,
    o_BLNH: Tensor,
    lse_BLN: Tensor,
    scopes_N: Tensor,
    document_starts_BL: Tensor | None,
    bias_PN: Tensor | None,
    bias_kind: str | None,
    q_offset: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in their dtypes and shapes; sums are fp32 (fp64 for fp64)."""
    do, q, k, v, o = (_widened(x) for x in (do_BLNH, q_BLNH, k_BLKH, v_BLKH, o_BLNH))
    visibility = Visibility.of_parts(scopes_N, document_starts_BL, bias_PN, bias_kind, q_offset)
    band = _Band(q, k, visibility, scale)
    if band.one_call:
        grads = band.attend_backward(band.tiles[0], do, q, k, v, o, lse_BLN)
        dq, dk, dv = (grad.transpose(1, 2).contiguous().to(q_BLNH.dtype) for grad in grads)
        return dq, dk, dv
    dq_BLNH = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk_BLKH = torch.zeros(k.shape, dtype=k.dtype, device=k.device)
    dv_BLKH = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    for tile in band.tiles:
        dq, dk, dv = band.attend_backward(tile, do, q, k, v, o, lse_BLN)
        dq_rows = band.rows(tile, dq_BLNH)
        if tile.merges:
            dq_rows.add_(dq)
        else:
            dq_rows.copy_(dq)
        _add_keys(tile, dk_BLKH, dk)
        _add_keys(tile, dv_BLKH, dv)
    return dq_BLNH.to(q_BLNH.dtype), dk_BLKH.to(k_BLKH.dtype), dv_BLKH.to(v_BLKH.dtype)


register_backward(banded_forward, banded_backward)


def _has_fused_kernel(device: torch.device) -> bool:
    """Whether a kernel computes a tile of any size without storing its scores, and returns its log-sum-exp."""
    return device.type == "cpu"


class _Band:
    """The tiles of one call and their computation."""

    def __init__(self, q_BLNH: Tensor, k_BLKH: Tensor, visibility: Visibility, scale: float) -> None:
        self.q_offset, self.scale = visibility.q_offset, scale
        scopes, document_starts_BL = tuple(visibility.scopes_N.tolist()), visibility.document_starts_BL
        semantics.check_values(scopes, document_starts_BL)
        self.fused = _has_fused_kernel(q_BLNH.device)
        shape = Shape(
            batch=q_BLNH.shape[0],
            kv_group=q_BLNH.shape[2] // k_BLKH.shape[2],
            head_dim=q_BLNH.shape[3],
            first=self.q_offset,
            end=k_BLKH.shape[1],
            threads=torch.get_num_threads() if self.fused else 1,
            fused=self.fused,
            biased=visibility.bias is not None,
        )
        starts = None
        if document_starts_BL is not None:
            begins, ends = zip(*document_chunks(shape), strict=True)
            columns = [*begins, *(end - 1 for end in ends)]
            starts = tuple(map(tuple, document_starts_BL[:, columns].T.tolist()))
        self.tiles = plan(scopes, shape, starts)
        self.masks = Masks(self.tiles, scopes, visibility.bias, document_starts_BL, q_BLNH.dtype, q_BLNH.device)
        self.one_call = len(self.tiles) == 1 and self.tiles[0].count == 1 and self.tiles[0].keys == shape.end

    def rows(self, tile: Tile, x_BLNH: Tensor) -> Tensor:
        """A view [M, X, C, H] of the tile's queries."""
        first = tile.first_query - self.q_offset
        return _blocks(tile, x_BLNH, first, tile.rows, tile.rows, tile.first_head, tile.heads)

    def attend(self, tile: Tile, q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor) -> tuple[Tensor, Tensor]:
        """Output [M, X, C, H] and log-sum-exp [M, X, C] of the tile's rows over its keys."""
        q, k, v = self.rows(tile, q_BLNH), _keys(tile, k_BLKH), _keys(tile, v_BLKH)
        mask = self._mask(tile, q)
        if self.fused:
            return _flash(q, k, v, 0.0, tile.mask is Mask.CAUSAL, attn_mask=mask, scale=self.scale)
        return _products(q, k, v, mask, self.scale)

    def attend_backward(
        self,
        tile: Tile,
        do_BLNH: Tensor,
        q_BLNH: Tensor,
        k_BLKH: Tensor,
        v_BLKH: Tensor,
        o_BLNH: Tensor,
        lse_BLN: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A tile's part of the gradients; since output and log-sum-exp are those of whole rows, the parts add up exactly."""
        do, q, o, lse = (self.rows(tile, x) for x in (do_BLNH, q_BLNH, o_BLNH, lse_BLN.unsqueeze(-1)))
        k, v = _keys(tile, k_BLKH), _keys(tile, v_BLKH)
        mask = self._mask(tile, q)
        if self.fused:
            causal = tile.mask is Mask.CAUSAL
            return _flash_backward(do, q, k, v, o, lse.squeeze(-1), 0.0, causal, attn_mask=mask, scale=self.scale)
        return _products_backward(do, q, k, v, o, lse, mask, self.scale)

    def _mask(self, tile: Tile, q: Tensor) -> Tensor | None:
        mask = self.masks(tile)
        return None if mask is None else mask.expand(*q.shape[:3], tile.keys)


def _products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """A tile without a fused kernel: it stores its scores, so the plan keeps such tiles small."""
    with torch.autocast(q.device.type, enabled=False):
        s = _scores(q, k, mask, scale)
        lse = s.logsumexp(dim=-1, keepdim=True)
        o = s.sub_(lse).exp_() @ v
    return o.view(q.shape), lse.view(q.shape[:-1])


def _products_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(q.device.type, enabled=False):
        p = _scores(q, k, mask, scale).sub_(_by_kv_head(lse, k)).exp_()
        delta = _by_kv_head((do * o).sum(dim=-1, keepdim=True), k)
        do, q_rows = _by_kv_head(do, k), _by_kv_head(q, k)
        ds = (do @ v.transpose(-1, -2)).sub_(delta).mul_(p).mul_(scale)
        return (ds @ k).view(q.shape), ds.transpose(-1, -2) @ q_rows, p.transpose(-1, -2) @ do


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Scores [M, X of the keys, rows, W]; the query heads of a key-value head are stacked as rows of one product."""
    s = _by_kv_head(q * scale, k) @ k.transpose(-1, -2)
    if mask is not None:
        s.view(*q.shape[:3], k.shape[2]).add_(mask)
    return s


def _by_kv_head(x: Tensor, k: Tensor) -> Tensor:
    return x.reshape(*k.shape[:2], -1, x.shape[-1])


def _widened(x: Tensor) -> Tensor:
    """x in at least fp32, with each head's row contiguous. The CPU kernel is slower in half precision, its backward tenfold."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x if x.stride(-1) == 1 else x.contiguous()


def _keys(tile: Tile, x_BLKH: Tensor) -> Tensor:
    """A view [M, X of the keys, W, H] of the tile's keys."""
    return _blocks(tile, x_BLKH, tile.first_key, tile.keys, tile.key_step, tile.first_kv_head, tile.kv_heads)


def _blocks(tile: Tile, x: Tensor, first: int, rows: int, step: int, first_head: int, heads: int) -> Tensor:
    """A strided view of `tile.count` blocks of [B, L, heads, H], `step` rows apart; the first has rows `first` to `first + rows`.

    The first two dimensions are [batch, heads] for one block, otherwise [blocks, batch or heads]: the plan then keeps one
    of the two at 1, since a kernel takes four dimensions.
    """
    by_batch, by_token, by_head, by_dim = x.stride()
    offset = x.storage_offset() + tile.first_batch * by_batch + first * by_token + first_head * by_head
    if tile.count == 1:
        outer, strides = (tile.batches, heads), (by_batch, by_head)
    elif tile.batches == 1:
        outer, strides = (tile.count, heads), (step * by_token, by_head)
    else:
        outer, strides = (tile.count, tile.batches), (step * by_token, by_batch)
    return x.as_strided((*outer, rows, x.shape[-1]), (*strides, by_token, by_dim), offset)


def _add_keys(tile: Tile, total_BLKH: Tensor, part: Tensor) -> None:
    """Adds a tile's gradient [M, X, W, H] to that of all keys. Its blocks may overlap, but not within one addition."""
    step, first = tile.key_step, tile.first_key
    if tile.count == 1:
        _keys(tile, total_BLKH).add_(part)
    elif step == 0:  # blocks of rows over the same keys
        _keys(tile, total_BLKH)[0].add_(part.sum(0))
    elif tile.keys > step * tile.count:
        blocks = _keys(tile, total_BLKH)
        for block in range(tile.count):
            blocks[block].add_(part[block])
    else:
        for start in range(0, tile.keys, step):
            rows = min(step, tile.keys - start)
            blocks = _blocks(tile, total_BLKH, first + start, rows, step, tile.first_kv_head, tile.kv_heads)
            blocks.add_(part[:, :, start : start + rows])
