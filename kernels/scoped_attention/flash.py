"""Scoped attention with the package flash-attn (FlashAttention 2): one call for all heads of equal scope.

Its sliding window counts the tokens before the query's own, so scope S is window S - 1; a window of -1 has no limit. Its
causal mask is aligned to the last key, as in chunked prefill. Documents are its variable-length sequences. Scopes and
document lengths, which decide the calls, are read on the host once, until the tensor changes.

Each head group is a separate launch that has to fill the GPU by itself; the Triton kernels launch all heads at once.

Shape suffixes: B batch, L tokens (Lq queries, Lk keys), N query heads, K key-value heads, H head dim.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from farsight.kernels.scoped_attention import semantics
from farsight.kernels.scoped_attention.documents import MAX_DOCUMENTS, documents_of, sequences_of
from farsight.kernels.scoped_attention.host import host_values
from farsight.kernels.scoped_attention.visibility import Visibility
from farsight.kernels.scoped_attention.windows import Heads, add_heads, by_window

DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256


def flash_attention(q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, visibility: Visibility, scale: float) -> Tensor:
    """`api.scoped_attention` with all arguments given.

    In the backward pass the package sums dq in no fixed order. Under `torch.use_deterministic_algorithms(True)` the order
    is fixed, but each of a call's heads and batch rows may take as many fp32 copies of its dq as the GPU has SMs.

    Raises:
        ValueError: the package is missing or cannot run, the bias is not ALiBi, or this is called under torch.compile.
    """
    if torch.compiler.is_compiling():
        _refuse_compilation()
    _check(q_BLNH)
    flash_attn = package()
    slopes_N, document_starts_BL = visibility.alibi_slopes("flash"), visibility.document_starts_BL
    scopes = host_values(visibility.scopes_N)
    semantics.check_values(scopes, None)
    options: dict[str, Any] = {
        "softmax_scale": scale, "causal": True, "deterministic": torch.are_deterministic_algorithms_enabled(),
    }  # fmt: skip
    q, k, v, device = q_BLNH, k_BLKH, v_BLKH, q_BLNH.device
    if document_starts_BL is None:
        longest = k.shape[1]
        attend = partial(flash_attn.flash_attn_func, **options)
    else:
        if (documents := documents_of(document_starts_BL).number) > MAX_DOCUMENTS:
            raise ValueError(f'backend "flash" takes {MAX_DOCUMENTS} documents a batch, not {documents}: use "triton"')
        sequences = sequences_of(document_starts_BL, ((visibility.q_offset, k.shape[1]),), (0,), device)
        longest = sequences.max_seqlen_k
        attend = partial(flash_attn.flash_attn_varlen_func, **sequences._asdict(), **options)
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    slopes_N = None if slopes_N is None else slopes_N.to(device, torch.float32).contiguous()

    # The right end is 0, not the equivalent -1: with both ends -1 and no document of more than one query, the package assumes
    # exactly one query in each document (Dao-AILab/flash-attention#1537).
    groups = by_window(scopes, longest, tuple(range(k.shape[-2])), device)
    if len(groups) == 1:
        o = attend(q, k, v, window_size=(groups[0].window, 0), alibi_slopes=slopes_N)
    else:
        heads, kv_heads = [group.heads for group in groups], [group.kv_heads for group in groups]
        parts = [
            attend(
                *qkv,
                window_size=(group.window, 0),
                alibi_slopes=None if slopes_N is None else slopes_N[group.heads].contiguous(),
            )
            for group, *qkv in zip(
                groups, _Take.apply(q, heads), _Take.apply(k, kv_heads), _Take.apply(v, kv_heads), strict=True
            )
        ]
        o = _Join.apply(heads, *parts)
    return o.view(q_BLNH.shape)


@torch.compiler.assume_constant_result
def _refuse_compilation() -> None:
    """Called while compiling instead of being compiled, so that the message is the first line of the compiler's error."""
    raise ValueError('backend "flash" reads scopes on the host: turn compile off, or use "triton"')


def _check(q_BLNH: Tensor) -> None:
    """Refuses inputs that the package does not support."""
    if q_BLNH.device.type != "cuda":
        raise ValueError(f'backend "flash" needs a GPU, and q_BLNH is on {q_BLNH.device}: use "banded"')
    if q_BLNH.dtype not in DTYPES:
        raise ValueError(f'backend "flash" does not take {q_BLNH.dtype}: use bfloat16 or float16, or "banded"')
    if q_BLNH.shape[-1] > MAX_HEAD_DIM:
        raise ValueError(f'backend "flash" takes head dims up to {MAX_HEAD_DIM}, not {q_BLNH.shape[-1]}: use "banded"')


def package() -> Any:
    """The module flash_attn. If it is installed but fails to load, its own error is raised.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import flash_attn
    except ModuleNotFoundError as error:
        if error.name != "flash_attn":
            raise
        raise ValueError(
            'backend "flash" needs the package flash-attn: pip install flash-attn, or use "triton"'
        ) from None
    return flash_attn


# Taking heads apart and putting them together


class _Take(torch.autograd.Function):
    """The heads of each call, from [..., heads, H]. Autograd would make a full-size gradient for each call and add them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Iterable[Heads]) -> tuple[Tensor, ...]:
        ctx.groups, ctx.shape = groups, x.shape
        return tuple(x[..., heads, :] for heads in groups)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        dx = grads[0].new_zeros(ctx.shape)
        for heads, grad in zip(ctx.groups, grads, strict=True):
            add_heads(dx, heads, grad)
        return dx, None


class _Join(torch.autograd.Function):
    """Puts the calls' outputs in the places of their heads with one copy; the backward pass takes views of the gradient."""

    @staticmethod
    def forward(ctx: Any, groups: Iterable[Heads], *parts: Tensor) -> Tensor:
        ctx.groups = groups
        *before, _, H = parts[0].shape
        o = parts[0].new_empty((*before, sum(part.shape[-2] for part in parts), H))
        for heads, part in zip(groups, parts, strict=True):
            o[..., heads, :] = part
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(do[..., heads, :] for heads in ctx.groups)
