"""Scoped attention on GPUs: launches the Triton kernels, as operators that autograd and torch.compile support.

Nothing here reads a tensor on the host: scopes may change between calls without recompiling or waiting.

Shape suffixes: B batch, L tokens (Lq queries, Lk keys), N query heads, K key-value heads, H head dim, R rows of segments,
2 keys and values.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from farsight.kernels import triton_rows
from farsight.kernels.scoped_attention.autograd import new_outputs, register_backward
from farsight.kernels.scoped_attention.segments import Segments, longest_first, table
from farsight.kernels.scoped_attention.triton.backward import delta_kernel, dkv_kernel, dq_kernel
from farsight.kernels.scoped_attention.triton.blocks import LOG2_E
from farsight.kernels.scoped_attention.triton.forward import forward_kernel
from farsight.kernels.scoped_attention.triton.tiles import Tiles, tiles
from farsight.kernels.scoped_attention.visibility import Visibility
from farsight.kernels.triton_rows import contiguous_rows, described, padded

DELTA_ROWS = 64


def check_runs(q: Tensor) -> None:
    """Raises ValueError unless the kernels support queries [..., H] of this dtype, head dim H and device."""
    if q.shape[-1] > 128:
        raise ValueError(f'backend "triton" takes head dims up to 128, not {q.shape[-1]}: use "banded"')
    triton_rows.check_runs(q, "banded")


def triton_attention(q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, visibility: Visibility, scale: float) -> Tensor:
    """`api.scoped_attention` with all arguments given.

    Raises:
        ValueError: the kernels cannot run here, or the bias is not ALiBi.
    """
    check_runs(q_BLNH)
    scopes_N, document_starts_BL, _, _, q_offset = visibility.parts()
    slopes_N = visibility.alibi_slopes("triton")
    return triton_forward(q_BLNH, k_BLKH, v_BLKH, scopes_N, document_starts_BL, slopes_N, q_offset, scale)[0]


def triton_segmented(
    q_BLNH: Tensor, kv_R2BH: Tensor, segments: Segments, visibility: Visibility, scale: float
) -> Tensor:
    """`api.segmented_attention` with all arguments given; raises as `triton_attention`."""
    check_runs(q_BLNH)
    scopes_N, document_starts_BL, slopes_N = (
        visibility.scopes_N, visibility.document_starts_BL, visibility.alibi_slopes("triton"),
    )  # fmt: skip
    return segmented_forward(q_BLNH, kv_R2BH, scopes_N, document_starts_BL, slopes_N, segments.numbers, scale)[0]


@torch.library.custom_op("farsight::triton_attention", mutates_args=())
def triton_forward(
    q_BLNH: Tensor,
    k_BLKH: Tensor,
    v_BLKH: Tensor,
    scopes_N: Tensor,
    document_starts_BL: Tensor | None,
    alibi_slopes_N: Tensor | None,
    q_offset: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output [B, Lq, N, H] in q's dtype, and the log-sum-exp of each row's scores [B, N, Lq], fp32."""
    outputs = empty_outputs(q_BLNH)
    Call(q_BLNH, k_BLKH, v_BLKH, scopes_N, document_starts_BL, alibi_slopes_N, q_offset).forward(*outputs, scale)
    return outputs


triton_forward.register_fake(new_outputs)


@torch.library.custom_op("farsight::triton_attention_backward", mutates_args=())
def triton_backward(
    do_BLNH: Tensor,
    q_BLNH: Tensor,
    k_BLKH: Tensor,
    v_BLKH: Tensor,
    o_BLNH: Tensor,
    lse_BNL: Tensor,
    scopes_N: Tensor,
    document_starts_BL: Tensor | None,
    alibi_slopes_N: Tensor | None,
    q_offset: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in their dtypes and shapes; sums are fp32."""
    call = Call(q_BLNH, k_BLKH, v_BLKH, scopes_N, document_starts_BL, alibi_slopes_N, q_offset)
    dq_BLNH, dk_BLKH, dv_BLKH = (empty_like(x) for x in (q_BLNH, k_BLKH, v_BLKH))
    call.backward(do_BLNH, o_BLNH, lse_BNL, dq_BLNH, dk_BLKH, dv_BLKH, scale)
    return dq_BLNH, dk_BLKH, dv_BLKH


register_backward(triton_forward, triton_backward)


@torch.library.custom_op("farsight::triton_segmented_attention", mutates_args=())
def segmented_forward(
    q_BLNH: Tensor,
    kv_R2BH: Tensor,
    scopes_N: Tensor,
    document_starts_BL: Tensor | None,
    alibi_slopes_N: Tensor | None,
    segments: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """As `triton_forward`; `segments` are `Segments.numbers`."""
    outputs = empty_outputs(q_BLNH)
    call = Call(q_BLNH, *as_one_head(kv_R2BH), scopes_N, document_starts_BL, alibi_slopes_N, 0, segments)
    call.forward(*outputs, scale)
    return outputs


segmented_forward.register_fake(new_outputs)


@torch.library.custom_op("farsight::triton_segmented_attention_backward", mutates_args=())
def segmented_backward(
    do_BLNH: Tensor,
    q_BLNH: Tensor,
    kv_R2BH: Tensor,
    o_BLNH: Tensor,
    lse_BNL: Tensor,
    scopes_N: Tensor,
    document_starts_BL: Tensor | None,
    alibi_slopes_N: Tensor | None,
    segments: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of queries, and of keys with values, in their dtypes and shapes; sums are fp32."""
    call = Call(q_BLNH, *as_one_head(kv_R2BH), scopes_N, document_starts_BL, alibi_slopes_N, 0, segments)
    dq_BLNH, dkv_R2BH = empty_like(q_BLNH), empty_like(kv_R2BH)
    call.backward(do_BLNH, o_BLNH, lse_BNL, dq_BLNH, *as_one_head(dkv_R2BH), scale)
    return dq_BLNH, dkv_R2BH


register_backward(segmented_forward, segmented_backward, leaves=2)


def empty_like(x: Tensor) -> Tensor:
    """An empty contiguous tensor of x's shape and dtype."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def empty_outputs(q_BLNH: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs of a forward pass, to be written."""
    B, Lq, N, _ = q_BLNH.shape
    return empty_like(q_BLNH), torch.empty((B, N, Lq), dtype=torch.float32, device=q_BLNH.device)


def as_one_head(kv_R2BH: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [B, R, 1, H], as views: the kernels take segments as rows of one head."""
    k_BRKH, v_BRKH = kv_R2BH.permute(1, 2, 0, 3)[:, :, :, None]
    return k_BRKH, v_BRKH


class Some(NamedTuple):
    """Some of a call's heads, which alone are computed."""

    heads: Tensor
    """int64, from wide to narrow."""
    kv_entries: Tensor
    """int64, from wide to narrow: their key-value heads, or those heads' rows in the table of segments."""


class Call:
    """A call's tensors as the kernels take them.

    Args:
        segments: `Segments.numbers`, with k and v [B, R, 1, H]; None is a plain call.
        some: None computes all heads. In the backward pass heads of a key-value head that are not computed need a scope below
            -Lk; other heads' outputs and gradients are not written.
    """

    def __init__(
        self,
        q_BLNH: Tensor,
        k_BLKH: Tensor,
        v_BLKH: Tensor,
        scopes_N: Tensor,
        document_starts_BL: Tensor | None,
        alibi_slopes_N: Tensor | None,
        q_offset: int,
        segments: Sequence[int] | None = None,
        some: Some | None = None,
    ) -> None:
        device = q_BLNH.device
        self.q, self.k, self.v = (contiguous_rows(x) for x in (q_BLNH, k_BLKH, v_BLKH))
        self.B, self.Lq, self.N, self.H = q_BLNH.shape
        self.scopes = scopes_N.to(device=device, dtype=torch.int64).contiguous()
        self.starts = None if document_starts_BL is None else document_starts_BL.to(device, torch.int32).contiguous()
        self.slopes = None if alibi_slopes_N is None else alibi_slopes_N.to(device, torch.float32).contiguous()
        self.strides = tuple(x.stride()[:3] for x in (self.q, self.k, self.v))
        self.segments = None if segments is None else Segments.of_numbers(*segments)
        self.some, self.table, self.pieces = some, None, 1
        self.K, self.longest_piece, self.longest_segment = k_BLKH.shape[2], self.Lq, k_BLKH.shape[1]
        if self.segments is not None:
            self.table, self.pieces = table(self.segments, device), len(self.segments.pieces)
            self.K, self.longest_segment = self.segments.kv_heads, self.segments.longest
            self.longest_piece = max(end - begin for begin, end in self.segments.pieces)
        tokens = self.Lq + q_offset if self.starts is None else self.starts.shape[1]
        self.sizes = self.Lq, q_offset, tokens, self.pieces, self.N
        self.constants = {"GROUP": self.N // self.K, "HEAD_DIM": self.H}

    def forward(self, o_BLNH: Tensor, lse_BNL: Tensor, scale: float) -> None:
        """Writes the output [B, Lq, N, H], and the log-sum-exp [B, N, Lq], fp32."""
        tile, heads = self.tiles("forward"), self.widest_heads_first()
        forward_kernel[(self.query_blocks(tile), self.B, len(heads))](
            self.q, *self.steps("forward", self.k, self.v), o_BLNH, lse_BNL, self.scopes, heads, self.starts, self.slopes,
            self.table, *self.strides, o_BLNH.stride()[:3], *self.sizes, scale * LOG2_E.value,
            **self.constants, **tile.options(),
        )  # fmt: skip

    def backward(
        self,
        do_BLNH: Tensor,
        o_BLNH: Tensor,
        lse_BNL: Tensor,
        dq_BLNH: Tensor,
        dk_BLKH: Tensor,
        dv_BLKH: Tensor,
        scale: float,
    ) -> None:
        """Writes the gradients of q, k and v; those of k and v have equal strides."""
        do = contiguous_rows(do_BLNH)
        delta_BNL = torch.empty_like(lse_BNL)
        delta_kernel[(triton.cdiv(self.Lq, DELTA_ROWS), self.B, self.N)](
            o_BLNH, do, delta_BNL, o_BLNH.stride()[:3], do.stride()[:3], self.Lq, self.N, self.H, DELTA_ROWS
        )
        strides = (*self.strides, do.stride()[:3])
        tile, heads = self.tiles("dq"), self.widest_heads_first()
        dq_kernel[(self.query_blocks(tile), self.B, len(heads))](
            self.q, *self.steps("dq", self.k, self.v), do, dq_BLNH, lse_BNL, delta_BNL, self.scopes, heads, self.starts,
            self.slopes, self.table, *strides, dq_BLNH.stride()[:3], *self.sizes, scale,
            **self.constants, **tile.options(),
        )  # fmt: skip
        tile, entries = self.tiles("dkv"), self.widest_kv_entries_first()
        q_steps, do_steps = self.steps("dkv", self.q, do)
        dkv_kernel[(triton.cdiv(self.longest_segment, tile.block_n), self.B, len(entries))](
            q_steps, self.k, self.v, do_steps, dk_BLKH, dv_BLKH, lse_BNL, delta_BNL, self.scopes, entries,
            self.document_ends(), self.slopes, self.table, *strides, dk_BLKH.stride()[:3], *self.sizes, scale,
            **self.constants, **tile.options(),
        )  # fmt: skip

    def widest_heads_first(self) -> Tensor:
        """Query heads to compute."""
        return self.scopes.argsort(descending=True) if self.some is None else self.some.heads

    def widest_kv_entries_first(self) -> Tensor:
        """Key-value heads to compute, or rows of the table of segments."""
        if self.some is not None:
            return self.some.kv_entries
        if self.segments is not None:
            return longest_first(self.segments, tuple(range(self.K)), self.q.device)
        return self.scopes.view(self.K, -1).amax(1).argsort(descending=True)

    def query_blocks(self, tile: Tiles) -> int:
        """Blocks of queries, as many for each piece as the longest has."""
        return self.pieces * triton.cdiv(self.longest_piece, tile.block_m)

    def tiles(self, kernel: str) -> Tiles:
        major = torch.cuda.get_device_capability(self.q.device)[0] if self.q.is_cuda else 0
        return tiles(kernel, padded(self.H), self.q.itemsize, major)

    def steps(self, kernel: str, *tensors: Tensor) -> list[Tensor | TensorDescriptor]:
        """The tensors of a kernel's inner loop, as descriptors if its tiles ask for them."""
        tile = self.tiles(kernel)
        return [described(x, tile.step(kernel)) if tile.descriptors else x for x in tensors]

    def document_ends(self) -> Tensor | None:
        """int32 [B, tokens]: one past the last token of each token's document; None without documents."""
        if self.starts is None:
            return None
        tokens = torch.arange(self.starts.shape[1], dtype=torch.int32, device=self.starts.device)
        tokens = tokens.expand(self.B, -1).contiguous()
        # Starts never fall, so token i is seen up to the last token whose document starts no later than i.
        return torch.searchsorted(self.starts, tokens, right=True, out_int32=True)
