"""Scoped attention by two kernels at once: wide heads through PyTorch's variable-length attention, narrow ones through Triton.

FlashAttention is the faster kernel where a head sees many tokens, above all FlashAttention 3 in the backward pass, but it
takes one window a call. `cost.py` decides for each pass which heads are wide; none or all of them are the extremes. Wide
heads run on a second stream, so that narrow ones fill what a call leaves idle. Heads with a bias are Triton's.

Scopes and documents decide the calls and are read on the host once, until the tensor changes, unless the host was told
them (`host.remember`, `documents.remember_documents`).

Shape suffixes: B batch, L tokens (Lq queries, Lk keys), N query heads, K key-value heads, H head dim, R rows of
segments, 2 keys and values.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from farsight.kernels.scoped_attention import semantics
from farsight.kernels.scoped_attention.autograd import new_outputs, register_backward
from farsight.kernels.scoped_attention.cost import Pass, Shape, best_split, gpu_of
from farsight.kernels.scoped_attention.documents import (
    MAX_DOCUMENTS,
    Documents,
    Sequences,
    documents_of,
    sequences_of,
    whole_rows,
)
from farsight.kernels.scoped_attention.host import host_values
from farsight.kernels.scoped_attention.segments import Segments, longest_first, query_heads
from farsight.kernels.scoped_attention.triton.attention import Call, Some, as_one_head, check_runs, empty_outputs
from farsight.kernels.scoped_attention.varlen import DTYPES, dense_kernel, rows_of_all, varlen_backward, varlen_forward
from farsight.kernels.scoped_attention.visibility import Visibility
from farsight.kernels.scoped_attention.windows import Group, add_heads, by_window


def hybrid_attention(
    q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, visibility: Visibility, scale: float, wide_from: int = 0
) -> Tensor:
    """`api.scoped_attention` with all arguments given.

    In the backward pass FlashAttention sums dq in no fixed order, unless `torch.use_deterministic_algorithms(True)`.

    Args:
        wide_from: heads of this scope or more are wide; 0 leaves it to the cost model.

    Raises:
        ValueError: the kernels cannot run here, or the bias is not ALiBi.
    """
    check_runs(q_BLNH)
    scopes_N, document_starts_BL, _, _, q_offset = visibility.parts()
    slopes_N = visibility.alibi_slopes("hybrid")
    return hybrid_forward(q_BLNH, k_BLKH, v_BLKH, scopes_N, document_starts_BL, slopes_N, q_offset, scale, wide_from)[0]


def hybrid_segmented(
    q_BLNH: Tensor, kv_R2BH: Tensor, segments: Segments, visibility: Visibility, scale: float, wide_from: int = 0
) -> Tensor:
    """`api.segmented_attention` with all arguments given; otherwise as `hybrid_attention`."""
    check_runs(q_BLNH)
    scopes_N, document_starts_BL, slopes_N = (
        visibility.scopes_N, visibility.document_starts_BL, visibility.alibi_slopes("hybrid"),
    )  # fmt: skip
    rest = (scopes_N, document_starts_BL, slopes_N, segments.numbers, scale, wide_from)
    return hybrid_segmented_forward(q_BLNH, kv_R2BH, *rest)[0]


@torch.library.custom_op("farsight::hybrid_attention", mutates_args=())
def hybrid_forward(
    q_BLNH: Tensor,
    k_BLKH: Tensor,
    v_BLKH: Tensor,
    scopes_N: Tensor,
    document_starts_BL: Tensor | None,
    alibi_slopes_N: Tensor | None,
    q_offset: int,
    scale: float,
    wide_from: int,
) -> tuple[Tensor, Tensor]:
    """Output [B, Lq, N, H] in q's dtype, and the log-sum-exp of each row's scores [B, N, Lq], fp32."""
    visible = _Visible(scopes_N, document_starts_BL, alibi_slopes_N, q_offset)
    return _forward(q_BLNH, _Keys.plain(k_BLKH, v_BLKH, q_offset), visible, scale, wide_from)


hybrid_forward.register_fake(new_outputs)


@torch.library.custom_op("farsight::hybrid_attention_backward", mutates_args=())
def hybrid_backward(
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
    wide_from: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v in their dtypes and shapes. Those of keys and values are sums over calls in their dtypes."""
    visible = _Visible(scopes_N, document_starts_BL, alibi_slopes_N, q_offset)
    keys = _Keys.plain(k_BLKH, v_BLKH, q_offset)
    dq_BLNH, (dk_BLKH, dv_BLKH) = _backward(do_BLNH, q_BLNH, keys, o_BLNH, lse_BNL, visible, scale, wide_from)
    return dq_BLNH, dk_BLKH, dv_BLKH


register_backward(hybrid_forward, hybrid_backward)


@torch.library.custom_op("farsight::hybrid_segmented_attention", mutates_args=())
def hybrid_segmented_forward(
    q_BLNH: Tensor,
    kv_R2BH: Tensor,
    scopes_N: Tensor,
    document_starts_BL: Tensor | None,
    alibi_slopes_N: Tensor | None,
    segments: Sequence[int],
    scale: float,
    wide_from: int,
) -> tuple[Tensor, Tensor]:
    """As `hybrid_forward`; `segments` are `Segments.numbers`."""
    visible = _Visible(scopes_N, document_starts_BL, alibi_slopes_N)
    return _forward(q_BLNH, _Keys.packed(kv_R2BH, segments), visible, scale, wide_from)


hybrid_segmented_forward.register_fake(new_outputs)


@torch.library.custom_op("farsight::hybrid_segmented_attention_backward", mutates_args=())
def hybrid_segmented_backward(
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
    wide_from: int,
) -> tuple[Tensor, Tensor]:
    """Gradients of queries, and of keys with values, as those of `hybrid_backward`."""
    visible = _Visible(scopes_N, document_starts_BL, alibi_slopes_N)
    keys = _Keys.packed(kv_R2BH, segments)
    dq_BLNH, (dkv_R2BH,) = _backward(do_BLNH, q_BLNH, keys, o_BLNH, lse_BNL, visible, scale, wide_from)
    return dq_BLNH, dkv_R2BH


register_backward(hybrid_segmented_forward, hybrid_segmented_backward, leaves=2)


# Both kernels together


class _Visible(NamedTuple):
    """The parts of a `Visibility` that the kernels take."""

    scopes_N: Tensor
    document_starts_BL: Tensor | None
    alibi_slopes_N: Tensor | None
    q_offset: int = 0


class _Keys(NamedTuple):
    """Keys and values, or their gradients, as either kernel takes them: views of the operator's."""

    given: tuple[Tensor, ...]
    """The operator's own tensors."""
    all: tuple[Tensor, Tensor]
    """For Triton."""
    parts: list[tuple[Tensor, Tensor]]
    """[B, L, heads, H], for variable-length attention: by `segments.parts`."""
    segments: Segments
    numbers: Sequence[int] | None
    """Those of the segments; None in a plain call."""

    @classmethod
    def plain(cls, k_BLKH: Tensor, v_BLKH: Tensor, q_offset: int) -> "_Keys":
        Lk, K = k_BLKH.shape[1:3]
        both = k_BLKH, v_BLKH
        return cls(both, both, [both], Segments.plain(Lk - q_offset, q_offset, K), None)

    @classmethod
    def packed(cls, kv_R2BH: Tensor, numbers: Sequence[int]) -> "_Keys":
        segments = Segments.of_numbers(*numbers)
        return cls((kv_R2BH,), as_one_head(kv_R2BH), [part.of(kv_R2BH) for part in segments.parts], segments, numbers)

    def gradients(self, zero: bool) -> "_Keys":
        """New tensors for the gradients: zeros, or empty."""
        new = [(torch.zeros if zero else torch.empty)(x.shape, dtype=x.dtype, device=x.device) for x in self.given]
        return (
            self.plain(new[0], new[1], self.segments.pieces[0][0])
            if self.numbers is None
            else self.packed(new[0], self.numbers)
        )


def _forward(q_BLNH: Tensor, keys: _Keys, visible: _Visible, scale: float, wide_from: int) -> tuple[Tensor, Tensor]:
    calls = _calls(q_BLNH, keys.segments, visible, wide_from, "forward")
    B, Lq = q_BLNH.shape[:2]
    o_BLNH, lse_BNL = empty_outputs(q_BLNH)
    # What the second stream allocates is only used there, and the first waits for it before this returns.
    second = _second_stream(q_BLNH.device) if calls.wide else None
    with torch.cuda.stream(second):
        for part, group, sequences in calls.wide:
            k, v = (rows_of_all(x, group.kv_heads) for x in keys.parts[part])
            o_THN, lse_NT = varlen_forward(rows_of_all(q_BLNH, group.heads), k, v, sequences, group.window, scale)
            o_BLNH[:, :, group.heads] = o_THN.unflatten(0, (B, Lq))
            lse_BNL[:, group.heads] = lse_NT.unflatten(1, (B, Lq)).transpose(0, 1)
    if calls.narrow is not None:
        _triton(q_BLNH, keys, visible, calls.narrow).forward(o_BLNH, lse_BNL, scale)
    _join(second)
    return o_BLNH, lse_BNL


def _backward(
    do_BLNH: Tensor,
    q_BLNH: Tensor,
    keys: _Keys,
    o_BLNH: Tensor,
    lse_BNL: Tensor,
    visible: _Visible,
    scale: float,
    wide_from: int,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Gradients of the queries, and of the operator's keys and values."""
    calls = _calls(q_BLNH, keys.segments, visible, wide_from, "backward")
    B, Lq = q_BLNH.shape[:2]
    dq_BLNH = torch.empty(q_BLNH.shape, dtype=q_BLNH.dtype, device=q_BLNH.device)
    wide = keys.gradients(zero=True) if calls.wide else None
    second = _second_stream(q_BLNH.device) if calls.wide else None
    with torch.cuda.stream(second):
        for part, group, sequences in calls.wide:
            do, q, o = (rows_of_all(x, group.heads) for x in (do_BLNH, q_BLNH, o_BLNH))
            k, v = (rows_of_all(x, group.kv_heads) for x in keys.parts[part])
            lse_NT = lse_BNL[:, group.heads].transpose(0, 1).flatten(1).contiguous()
            dq, dk, dv = varlen_backward(do, q, k, v, o, lse_NT, sequences, group.window, scale)
            dq_BLNH[:, :, group.heads] = dq.unflatten(0, (B, Lq))
            assert wide is not None
            for total, found in zip(wide.parts[part], (dk, dv), strict=True):
                add_heads(total, group.kv_heads, found.unflatten(0, total.shape[:2]))
    narrow = None
    if calls.narrow is not None:
        narrow = keys.gradients(zero=not calls.narrow.every_kv_head)
        _triton(q_BLNH, keys, visible, calls.narrow).backward(do_BLNH, o_BLNH, lse_BNL, dq_BLNH, *narrow.all, scale)
    _join(second)
    if wide is None or narrow is None:
        one = wide or narrow
        assert one is not None, "no heads"
        return dq_BLNH, one.given
    for total, more in zip(wide.given, narrow.given, strict=True):
        total += more
    return dq_BLNH, wide.given


def _triton(q_BLNH: Tensor, keys: _Keys, visible: _Visible, narrow: "_Narrow") -> Call:
    _, starts_BL, slopes_N, q_offset = visible
    return Call(q_BLNH, *keys.all, narrow.scopes_N, starts_BL, slopes_N, q_offset, keys.numbers, narrow.some)


# Who computes which heads


class _Wide(NamedTuple):
    """A call of variable-length attention."""

    part: int
    group: Group
    """Its key-value heads are counted within the part."""
    sequences: Sequences


class _Narrow(NamedTuple):
    """The heads that Triton computes."""

    scopes_N: Tensor
    some: Some | None = None
    """None is all heads."""
    every_kv_head: bool = True


class _Calls(NamedTuple):
    """The calls of one pass."""

    wide: list[_Wide]
    narrow: _Narrow | None


def _calls(q_BLNH: Tensor, segments: Segments, visible: _Visible, wide_from: int, pass_: Pass) -> _Calls:
    scopes_N, document_starts_BL, alibi_slopes_N, _ = visible
    scopes, (B, Lq, N, H), K = host_values(scopes_N), q_BLNH.shape, segments.kv_heads
    semantics.check_values(scopes, None)
    device, pieces = q_BLNH.device, segments.pieces
    none = _Calls([], _Narrow(scopes_N))
    kernel = dense_kernel(device)
    if kernel is None or alibi_slopes_N is not None or q_BLNH.dtype not in DTYPES or H % 8:
        return none
    documents = None if document_starts_BL is None else documents_of(document_starts_BL)
    if documents is not None and documents.number * len(pieces) > MAX_DOCUMENTS:
        return none
    if not wide_from:
        shape = Shape(B, Lq, pieces, N // K, H, q_BLNH.itemsize, None if documents is None else _rounded(documents))
        major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9
        wide_from = best_split(scopes, shape, gpu_of(major), kernel, pass_).wide_from
    if wide_from > max(scopes):
        return none
    wide = []
    for number, part in enumerate(segments.parts):
        if document_starts_BL is None:
            sequences = whole_rows(B, pieces, part.first_keys, device)
        else:
            sequences = sequences_of(document_starts_BL, pieces, part.first_keys, device)
        heads = set(query_heads(part, segments, N))
        in_part = tuple(scope if n in heads and scope >= wide_from else 0 for n, scope in enumerate(scopes))
        places = tuple(part.kv_heads.index(k) if k in part.kv_heads else 0 for k in range(K))
        groups = by_window(in_part, sequences.max_seqlen_k, places, device)
        wide += [_Wide(number, group, sequences) for group in groups]
    return _Calls(wide, _narrow(scopes, wide_from, segments, K, device))


NOT_COMPUTED = -(2**30)
"""A scope of heads that Triton does not compute: no query sees a key."""


@lru_cache(maxsize=1024)
@torch.inference_mode(False)
def _narrow(
    scopes: tuple[int, ...], wide_from: int, segments: Segments, kv_heads: int, device: torch.device
) -> _Narrow | None:
    """The heads below a scope; None if there are none. Cached, because copying a list to the GPU waits for it."""
    widest_first = sorted((n for n, scope in enumerate(scopes) if scope < wide_from), key=lambda n: -scopes[n])
    if not widest_first:
        return None
    group = len(scopes) // kv_heads
    theirs = tuple(dict.fromkeys(n // group for n in widest_first))
    kept = torch.tensor([scope if scope < wide_from else NOT_COMPUTED for scope in scopes], device=device)
    some = Some(torch.tensor(widest_first, device=device), longest_first(segments, theirs, device))
    return _Narrow(kept, some, len(theirs) == kv_heads)


def _rounded(documents: Documents) -> Documents:
    """Powers of two, so that few splits are computed for many batches."""
    number, longest = (1 << (x - 1).bit_length() for x in documents[:2])
    return Documents(number, longest, float(1 << (round(documents.mean) - 1).bit_length()))


# Streams


def _second_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream that waits for the current one; None, which changes nothing as a stream, where there are none."""
    if device.type != "cuda":
        return None
    second = _stream(device)
    second.wait_stream(torch.cuda.current_stream(device))
    return second


def _join(second: torch.cuda.Stream | None) -> None:
    """The current stream waits for the second."""
    if second is not None:
        torch.cuda.current_stream(second.device).wait_stream(second)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Of high priority: blocks of wide heads, which last longest, start first."""
    return torch.cuda.Stream(device, priority=-1)
