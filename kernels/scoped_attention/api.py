"""The entry points of the attention kernels: they check arguments, pick a backend and call it.

Shape suffixes: B batch, L tokens (Lq queries, Lk keys), N query heads, K key-value heads, H head dim, R rows of segments,
2 keys and values.
"""

import importlib.util
from functools import partial

import torch
from torch import Tensor

from farsight.kernels.scoped_attention.banded.banded import banded_attention
from farsight.kernels.scoped_attention.choice import pick_backend
from farsight.kernels.scoped_attention.decode import ring_attention
from farsight.kernels.scoped_attention.prefill import chunk_attention
from farsight.kernels.scoped_attention.reference import reference_attention
from farsight.kernels.scoped_attention.rolling_cache import RollingCache
from farsight.kernels.scoped_attention.segments import Segments, in_calls
from farsight.kernels.scoped_attention.visibility import INTEGERS, Visibility, require

BACKENDS = ("reference", "banded", "triton", "hybrid", "flex", "flash")
"""Values of `backend`, besides "auto"; `configs.training.Attention` lists the same."""
DECODE_BACKENDS = ("banded", "triton")
"""Values of `backend` in `scoped_decode`, besides "auto"."""


def scoped_attention(
    q_BLNH: Tensor,
    k_BLKH: Tensor,
    v_BLKH: Tensor,
    visibility: Visibility,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Causal attention in which head n of token t sees the tokens max(document start of t, t - S_n + 1) to t.

    Args:
        q_BLNH: queries [B, Lq, N, H]; bf16, fp16, fp32 or fp64. Query row r is token r + `visibility.q_offset`.
        k_BLKH: keys [B, Lk, K, H], tokens 0 to Lk - 1, with Lk = Lq + q_offset. N is a multiple of K; head n uses
            key-value head n // (N // K).
        v_BLKH: values, shaped like the keys.
        visibility: the heads' scopes, and documents, bias and offset if there are any.
        scale: factor on the scores; None is 1 / sqrt(H).
        backend: "reference" (O(L²) memory, any device), "banded" (O(L) memory, any device), "triton" (GPUs), "hybrid"
            (GPUs; wide heads through PyTorch's FlashAttention in bf16 and fp16, the others through Triton), "flex"
            (PyTorch's FlexAttention; GPUs, and CPUs without gradients), "flash" (the package flash-attn; GPUs, bf16 and
            fp16), or "auto", which picks "hybrid", "triton" or "banded" (`choice.py`).

    Returns:
        o_BLNH: [B, Lq, N, H] in q's dtype. Gradients flow to q, k and v. Softmax and sums are fp32 (fp64 for fp64).

    Raises:
        ValueError: invalid shapes, dtypes, devices or values; the message says what to set instead.

    Source: SCOPE, Eq. 2 (t - S < i <= t).
    """
    _check(q_BLNH, k_BLKH, v_BLKH, visibility)
    scale = q_BLNH.shape[-1] ** -0.5 if scale is None else float(scale)
    if backend == "auto":
        backend = pick_backend(q_BLNH.device.type, str(q_BLNH.dtype), q_BLNH.shape[-1])
    match backend:
        case "reference":
            attention = reference_attention
        case "banded":
            attention = banded_attention
        case "triton":
            _require_triton()
            from farsight.kernels.scoped_attention.triton.attention import triton_attention as attention
        case "hybrid":
            _require_triton("hybrid")
            from farsight.kernels.scoped_attention.hybrid import hybrid_attention as attention
        case "flex":
            from farsight.kernels.scoped_attention.flex import flex_attention as attention
        case "flash":
            from farsight.kernels.scoped_attention.flash import flash_attention as attention
        case _:
            raise ValueError(f'backend is "{backend}": set it to "auto" or one of {", ".join(BACKENDS)}')
    return attention(q_BLNH, k_BLKH, v_BLKH, visibility, scale)


def segmented_attention(
    q_BLNH: Tensor,
    kv_R2BH: Tensor,
    segments: Segments,
    visibility: Visibility,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """`scoped_attention` of pieces of a sequence's queries, over the keys that each piece sees in each key-value head.

    "triton" takes all segments in one launch a pass, "hybrid" besides them its wide heads, for each window in as many calls
    as they have different keys. Other backends take a call for each piece and different keys.

    Args:
        q_BLNH: queries [B, L, N, H] of all pieces, one piece after the other.
        kv_R2BH: keys and values [R, 2, B, H] of all segments, one segment after the other in the order of `segments`.
        segments: the pieces, and the first key of each piece and key-value head. No query may see a key before it.
        visibility: that of the whole sequence of T tokens, with document starts [B, T] if there are any, and no q_offset.
        scale, backend: as in `scoped_attention`.

    Returns:
        o_BLNH: [B, L, N, H] in q's dtype. Gradients flow to q_BLNH and kv_R2BH.

    Raises:
        ValueError: invalid shapes, dtypes, devices or values; the message says what to set instead.
    """
    _check_segments(q_BLNH, kv_R2BH, segments, visibility)
    scale = q_BLNH.shape[-1] ** -0.5 if scale is None else float(scale)
    if backend == "auto":
        backend = pick_backend(q_BLNH.device.type, str(q_BLNH.dtype), q_BLNH.shape[-1])
    if backend == "triton":
        _require_triton()
        from farsight.kernels.scoped_attention.triton.attention import triton_segmented

        return triton_segmented(q_BLNH, kv_R2BH, segments, visibility, scale)
    if backend == "hybrid":
        _require_triton("hybrid")
        from farsight.kernels.scoped_attention.hybrid import hybrid_segmented

        return hybrid_segmented(q_BLNH, kv_R2BH, segments, visibility, scale)
    attend = partial(scoped_attention, scale=scale, backend=backend)
    return in_calls(attend, q_BLNH, kv_R2BH, segments, visibility)


def scoped_decode(
    q_BNH: Tensor,
    k_BKH: Tensor,
    v_BKH: Tensor,
    cache: RollingCache,
    visibility: Visibility,
    document_starts_B: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
    seen: int | None = None,
) -> Tensor:
    """Attention of only the next token, over the keys and values in a rolling cache and its own, which are appended to it.

    Args:
        q_BNH, k_BKH, v_BKH: those of the next token, [B, N or K, H].
        cache: holds the tokens before it. Beyond its `most_tokens`, heads that see everything lose their oldest tokens.
        visibility: with the scopes that the cache was made for; head n sees the last S_n tokens. "triton", which reads
            nothing on the host, cuts wider ones to what the cache keeps. It has neither documents nor an offset.
        document_starts_B: integer tensor [B]; the first token that each row sees, as for prompts padded on the left.
            A padding token sees only itself.
        scale: factor on the scores; None is 1 / sqrt(H).
        backend: "auto", "banded" (any device) or "triton" (GPUs; one operator, which can be captured in a CUDA graph).
        seen: number of tokens already appended, for "banded"; None reads it from the cache, which waits for the device.

    Returns:
        o_BNH: [B, N, H] in q's dtype, equal to the last row of `scoped_attention`. There is no gradient.

    Raises:
        ValueError: invalid shapes, dtypes, devices or values; the message says what to set instead.
    """
    _check_decode(q_BNH, k_BKH, v_BKH, cache, visibility, document_starts_B)
    scale = q_BNH.shape[-1] ** -0.5 if scale is None else float(scale)
    if backend == "auto":
        backend = pick_backend(q_BNH.device.type, str(q_BNH.dtype), q_BNH.shape[-1], decode=True)
    match backend:
        case "banded":
            return ring_attention(q_BNH, k_BKH, v_BKH, cache, visibility, document_starts_B, scale, seen)
        case "triton":
            _require_triton()
            from farsight.kernels.scoped_attention.triton.decode import triton_decode

            return triton_decode(q_BNH, k_BKH, v_BKH, cache, visibility, document_starts_B, scale)
    raise ValueError(f'backend is "{backend}": set it to "auto", "banded" or "triton"')


def scoped_prefill(
    q_BLNH: Tensor,
    k_BLKH: Tensor,
    v_BLKH: Tensor,
    cache: RollingCache,
    visibility: Visibility,
    document_starts_B: Tensor | None = None,
    backend: str = "auto",
    seen: int | None = None,
) -> Tensor:
    """Attention of the next tokens of a prompt over a rolling cache and themselves; appends them to the cache.

    Key-value heads whose rings are equally long share a call of `scoped_attention`. A ring that wraps is read before it is
    overwritten, so that a chunk may be longer than any scope.

    Args:
        q_BLNH, k_BLKH, v_BLKH: those of the next L tokens, shaped as in `scoped_attention`.
        cache: holds the tokens before them, as far as they can be seen.
        visibility: with the scopes that the cache was made for, and neither documents nor an offset.
        document_starts_B: integer tensor [B]; the first token that each row sees, as for prompts padded on the left.
            A padding token sees only itself.
        backend: as in `scoped_attention`.
        seen: number of tokens already appended; None reads it from the cache, which waits for the device.

    Returns:
        o_BLNH: [B, L, N, H] in q's dtype. There is no gradient.

    Raises:
        ValueError: more tokens than the cache has room for; otherwise as `scoped_attention`.
    """
    _check_one_document(visibility)
    attend = partial(scoped_attention, backend=backend)
    seen = int(cache.tokens) if seen is None else seen
    return chunk_attention(attend, q_BLNH, k_BLKH, v_BLKH, cache, visibility, document_starts_B, seen)


@torch.compiler.assume_constant_result
def _require_triton(backend: str = "triton") -> None:
    """Raises ValueError if Triton is not installed, as on some machines without a GPU: its kernels are imported on first use."""
    if importlib.util.find_spec("triton") is None:
        raise ValueError(f'backend "{backend}" needs the package triton: install it, or use "banded"')


def _check(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility) -> None:
    """Checks everything that does not need a tensor's values; backends check values where reading them is free."""
    for name, x in (("q_BLNH", q), ("k_BLKH", k), ("v_BLKH", v)):
        require(x.dim() == 4, f"{name} has shape {list(x.shape)}: pass [batch, tokens, heads, head dim]")
        floats = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
        require(x.dtype in floats, f"{name} is {x.dtype}: pass bfloat16, float16, float32 or float64")
        require(x.dtype == q.dtype, f"{name} is {x.dtype} and q_BLNH is {q.dtype}: cast them to the same dtype")
        require(x.device == q.device, f"{name} is on {x.device} and q_BLNH on {q.device}: move them together")
    B, Lq, N, H = q.shape
    Lk, K = k.shape[1:3]
    require(k.shape == v.shape, f"k_BLKH is {list(k.shape)} and v_BLKH {list(v.shape)}: they have to be equal")
    require(k.shape[0] == B, f"q_BLNH has batch {B} and k_BLKH {k.shape[0]}: they have to be equal")
    require(k.shape[3] == H, f"q_BLNH has head dim {H} and k_BLKH {k.shape[3]}: they have to be equal")
    require(min(*q.shape, *k.shape) > 0, f"q_BLNH is {list(q.shape)}, k_BLKH {list(k.shape)}: no dimension may be 0")
    require(N % K == 0, f"{N} query heads do not share {K} key-value heads evenly: make N a multiple of K")
    visibility.check(B, Lq, Lk, N)


def _check_segments(q: Tensor, kv: Tensor, segments: Segments, visibility: Visibility) -> None:
    """As `_check`, for `segmented_attention`."""
    require(q.dim() == 4, f"q_BLNH has shape {list(q.shape)}: pass [batch, tokens, heads, head dim]")
    B, L, N, H = q.shape
    queries, K, starts = segments.first_queries[-1], segments.kv_heads, visibility.document_starts_BL
    require(queries == L, f"the pieces have {queries} queries and q_BLNH {L}: they have to be equal")
    require(
        list(kv.shape) == [segments.rows, 2, B, H],
        f"kv_R2BH is {list(kv.shape)}: pass keys and values of all segments, {[segments.rows, 2, B, H]}",
    )
    require(kv.dtype == q.dtype, f"kv_R2BH is {kv.dtype} and q_BLNH is {q.dtype}: cast them to the same dtype")
    require(kv.device == q.device, f"kv_R2BH is on {kv.device} and q_BLNH on {q.device}: move them together")
    require(N % K == 0, f"{N} query heads do not share {K} key-value heads evenly: make N a multiple of K")
    visibility.check_heads(N)
    require(visibility.q_offset == 0, "a visibility of segments has no q_offset: pass that of the whole sequence")
    tokens = max(end for _, end in segments.pieces)
    if starts is not None:
        require(
            starts.dim() == 2 and starts.shape[0] == B and starts.shape[1] >= tokens and starts.dtype in INTEGERS,
            f"document_starts_BL is {list(starts.shape)}, {starts.dtype}: pass integers for the whole sequence, [{B}, {tokens}] "
            "or more tokens",
        )


def _check_decode(
    q: Tensor, k: Tensor, v: Tensor, cache: RollingCache, visibility: Visibility, document_starts_B: Tensor | None
) -> None:
    keys = cache.keys_BSH
    require(q.dim() == 3, f"q_BNH has shape {list(q.shape)}: pass [batch, heads, head dim]")
    B, N, H = q.shape
    require(
        (keys.shape[0], keys.shape[2]) == (B, H),
        f"q_BNH has batch {B} and head dim {H}, the cache {keys.shape[0]} and {keys.shape[2]}: they have to be equal",
    )
    K = cache.kv_heads
    require(N > 0 and N % K == 0, f"{N} query heads do not share {K} key-value heads evenly: make N a multiple of K")
    for name, x in (("q_BNH", q), ("k_BKH", k), ("v_BKH", v)):
        require(x.dtype == keys.dtype, f"{name} is {x.dtype} and the cache {keys.dtype}: cast them to the same dtype")
        require(x.device == keys.device, f"{name} is on {x.device} and the cache on {keys.device}: move them together")
    shapes = list(k.shape), list(v.shape)
    require(shapes == ([B, K, H],) * 2, f"k_BKH is {shapes[0]} and v_BKH {shapes[1]}: both have to be {[B, K, H]}")
    visibility.check_heads(N)
    _check_one_document(visibility)
    if document_starts_B is not None:
        require(
            list(document_starts_B.shape) == [B],
            f"document_starts_B has shape {list(document_starts_B.shape)}: pass one token index a row, [{B}]",
        )
        require(
            document_starts_B.dtype in INTEGERS,
            f"document_starts_B is {document_starts_B.dtype}: pass an integer tensor, such as int64",
        )


def _check_one_document(visibility: Visibility) -> None:
    """A cache holds one document a row, and knows how many tokens precede a query."""
    require(
        visibility.document_starts_BL is None and visibility.q_offset == 0,
        "over a cache a visibility has neither document_starts_BL nor q_offset: pass document_starts_B",
    )
