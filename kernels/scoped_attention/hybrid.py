"""Scoped attention by two kernels at once: wide heads through PyTorch's variable-length attention, narrow ones through Triton.

FlashAttention is the faster kernel where a head sees many tokens, above all FlashAttention 3 in the backward pass, but it
takes one window a call. `cost.py` decides for each pass which heads are wide; none or all of them are the extremes. Wide
heads run on a second stream, so that narrow ones fill what a call leaves idle. Heads with a bias are Triton's.

Scopes and documents decide the calls and are read on the host once, until the tensor changes, unless the host was told
them (`host.remember`, `documents.remember_documents`).

Shape suffixes: B batch, L tokens (Lq queries, Lk keys), N query heads, K key-value heads, H head dim, T tokens of all rows.
"""

import importlib.util
import inspect
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

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
from farsight.kernels.scoped_attention.triton.attention import check_runs, triton_backward, triton_forward
from farsight.kernels.scoped_attention.visibility import Visibility
from farsight.kernels.scoped_attention.windows import Group, add_heads, by_window

DTYPES = (torch.bfloat16, torch.float16)


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
    calls = _calls(q_BLNH, k_BLKH, scopes_N, document_starts_BL, alibi_slopes_N, q_offset, wide_from, "forward")
    rest = (document_starts_BL, alibi_slopes_N, q_offset, scale)
    if not calls.wide:
        return triton_forward(q_BLNH, k_BLKH, v_BLKH, scopes_N, *rest)
    B, Lq, N, _ = q_BLNH.shape
    o_BLNH = torch.empty(q_BLNH.shape, dtype=q_BLNH.dtype, device=q_BLNH.device)
    lse_BNL = torch.empty((B, N, Lq), dtype=torch.float32, device=q_BLNH.device)
    # What the second stream allocates is only used there, and the first waits for it before this returns.
    second = _second_stream(q_BLNH.device)
    with torch.cuda.stream(second):
        for group in calls.wide:
            o_THN, lse_NT = varlen_forward(
                _rows(q_BLNH, group.heads), _rows(k_BLKH, group.kv_heads), _rows(v_BLKH, group.kv_heads),
                calls.sequences, group.window, scale,
            )  # fmt: skip
            o_BLNH[:, :, group.heads] = o_THN.unflatten(0, (B, Lq))
            lse_BNL[:, group.heads] = lse_NT.unflatten(1, (B, Lq)).transpose(0, 1)
    if calls.narrow is not None:
        group = calls.narrow
        o_BLNH[:, :, group.heads], lse_BNL[:, group.heads] = triton_forward(
            q_BLNH[:, :, group.heads], k_BLKH[:, :, group.kv_heads], v_BLKH[:, :, group.kv_heads],
            scopes_N[group.heads].contiguous(), *rest,
        )  # fmt: skip
    _join(second)
    return o_BLNH, lse_BNL


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
    calls = _calls(q_BLNH, k_BLKH, scopes_N, document_starts_BL, alibi_slopes_N, q_offset, wide_from, "backward")
    rest = (document_starts_BL, alibi_slopes_N, q_offset, scale)
    if not calls.wide:
        return triton_backward(do_BLNH, q_BLNH, k_BLKH, v_BLKH, o_BLNH, lse_BNL, scopes_N, *rest)
    dq_BLNH = torch.empty(q_BLNH.shape, dtype=q_BLNH.dtype, device=q_BLNH.device)
    dk_BLKH, dv_BLKH = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (k_BLKH, v_BLKH))
    second = _second_stream(q_BLNH.device)
    with torch.cuda.stream(second):
        for group in calls.wide:
            do, q, o = (_rows(x, group.heads) for x in (do_BLNH, q_BLNH, o_BLNH))
            k, v = (_rows(x, group.kv_heads) for x in (k_BLKH, v_BLKH))
            lse_NT = lse_BNL[:, group.heads].transpose(0, 1).flatten(1).contiguous()
            dq, dk, dv = varlen_backward(do, q, k, v, o, lse_NT, calls.sequences, group.window, scale)
            dq_BLNH[:, :, group.heads] = dq.unflatten(0, q_BLNH.shape[:2])
            add_heads(dk_BLKH, group.kv_heads, dk.unflatten(0, k_BLKH.shape[:2]))
            add_heads(dv_BLKH, group.kv_heads, dv.unflatten(0, v_BLKH.shape[:2]))
    if calls.narrow is None:
        _join(second)
        return dq_BLNH, dk_BLKH, dv_BLKH
    group = calls.narrow
    do, q, o = (x[:, :, group.heads] for x in (do_BLNH, q_BLNH, o_BLNH))
    k, v = (x[:, :, group.kv_heads] for x in (k_BLKH, v_BLKH))
    lse, scopes = lse_BNL[:, group.heads].contiguous(), scopes_N[group.heads].contiguous()
    dq_BLNH[:, :, group.heads], dk, dv = triton_backward(do, q, k, v, o, lse, scopes, *rest)
    _join(second)
    add_heads(dk_BLKH, group.kv_heads, dk)
    add_heads(dv_BLKH, group.kv_heads, dv)
    return dq_BLNH, dk_BLKH, dv_BLKH


register_backward(hybrid_forward, hybrid_backward)


# Who computes which heads


class _Calls(NamedTuple):
    """The calls of one pass."""

    wide: tuple[Group, ...]
    """By window."""
    narrow: Group | None
    sequences: Sequences


def _calls(
    q_BLNH: Tensor,
    k_BLKH: Tensor,
    scopes_N: Tensor,
    document_starts_BL: Tensor | None,
    alibi_slopes_N: Tensor | None,
    q_offset: int,
    wide_from: int,
    pass_: Pass,
) -> _Calls:
    scopes, (B, Lq, N, H), (Lk, K) = host_values(scopes_N), q_BLNH.shape, k_BLKH.shape[1:3]
    semantics.check_values(scopes, None)
    device, none = q_BLNH.device, _Calls((), None, whole_rows(B, Lq, Lk, q_BLNH.device))
    kernel = dense_kernel(device)
    if kernel is None or alibi_slopes_N is not None or q_BLNH.dtype not in DTYPES or H % 8:
        return none
    documents = None if document_starts_BL is None else documents_of(document_starts_BL)
    if documents is not None and documents.number > MAX_DOCUMENTS:
        return none
    if not wide_from:
        shape = Shape(B, Lq, q_offset, N // K, H, q_BLNH.itemsize, None if documents is None else _rounded(documents))
        major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9
        wide_from = best_split(scopes, shape, gpu_of(major), kernel, pass_).wide_from
    wide = tuple(scope if scope >= wide_from else 0 for scope in scopes)
    if not any(wide):
        return none
    sequences = none.sequences if document_starts_BL is None else sequences_of(document_starts_BL, q_offset, device)
    groups = by_window(wide, sequences.max_seqlen_k, K, device)
    narrow = by_window(tuple(0 if scope else 1 for scope in wide), 2, K, device)
    return _Calls(groups, narrow[0] if narrow else None, sequences)


def _rounded(documents: Documents) -> Documents:
    """Powers of two, so that few splits are computed for many batches."""
    number, longest = (1 << (x - 1).bit_length() for x in documents[:2])
    return Documents(number, longest, float(1 << (round(documents.mean) - 1).bit_length()))


# The kernel for wide heads


@cache
def dense_kernel(device: torch.device) -> str | None:
    """ "FA3" where it is installed and the GPU is of its architecture, else "FA2"; None if this PyTorch's has no windows.

    Makes FlashAttention 3 the one that PyTorch uses, unless another was chosen.
    """
    if not _takes("window_size"):
        return None
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "FA2"
    from torch.nn import attention

    if attention.current_flash_attention_impl() is None and importlib.util.find_spec("flash_attn_interface"):
        attention.activate_flash_attention_impl("FA3")
    return "FA2" if attention.current_flash_attention_impl() is None else "FA3"


@cache
def _takes(option: str) -> bool:
    """True if this PyTorch's `varlen_attn` has an option: enable_gqa came after window_size, and groups needed none before."""
    return option in inspect.signature(varlen_attn).parameters


def varlen_forward(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, sequences: Sequences, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention within documents: output [T, N, H] and log-sum-exp [N, T], fp32. The last query is at the last key.

    Args:
        window: number of tokens before its own that a query sees; -1 is no limit.
    """
    grouped: dict[str, Any] = {"enable_gqa": True} if _takes("enable_gqa") else {}
    aux = AuxRequest(lse=True)
    found = varlen_attn(
        q_TNH, k_TKH, v_TKH, *sequences, return_aux=aux, scale=scale, window_size=(window, 0), **grouped
    )  # fmt: skip
    o_TNH, lse_NT = found
    return o_TNH, lse_NT


def varlen_backward(
    do_TNH: Tensor,
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    o_TNH: Tensor,
    lse_NT: Tensor,
    sequences: Sequences,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; the operator that `varlen_attn`'s own backward pass calls, without dropout."""
    state, unused = torch.zeros(2, dtype=torch.uint64, device=q_TNH.device), torch.empty(0, device=q_TNH.device)
    return torch.ops.aten._flash_attention_backward(
        do_TNH, q_TNH, k_TKH, v_TKH, o_TNH, lse_NT, *sequences, 0.0, window < 0, state, unused,
        scale=scale, window_size_left=window, window_size_right=0,
    )  # fmt: skip


def _rows(x_BLNH: Tensor, heads: slice | Tensor) -> Tensor:
    """Some heads of all rows one after the other, contiguous in the head dim."""
    x = x_BLNH[:, :, heads].flatten(0, 1)
    return x if x.stride(-1) == 1 else x.contiguous()


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
