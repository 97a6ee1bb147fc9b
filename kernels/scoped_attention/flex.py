"""Scoped attention through PyTorch's FlexAttention, compiled, with a block mask computed from scopes and documents.

FlexAttention takes a list of the blocks of 128 queries × 128 keys to compute, and of those to mask token by token. Its
own `create_block_mask` evaluates every pair of tokens to find out. Here a row of blocks is three runs, as in
`triton/forward.py`: blocks that the scope or a document cuts, those that every query sees, those on the diagonal.

Shape suffixes: B batch, L tokens (Lq queries, Lk keys), N query heads, K key-value heads, H head dim; R blocks of
queries, C blocks of keys. The batch dim of the tables is 1 without documents.
"""

import contextlib
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from farsight.kernels.scoped_attention import semantics
from farsight.kernels.scoped_attention.bias import ScoreBias
from farsight.kernels.scoped_attention.host import host_values
from farsight.kernels.scoped_attention.visibility import Visibility

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK = 128
"""Queries and keys of a block of the mask; on GPUs FlexAttention's own tiles have to divide it."""
RECOMPILE_LIMIT = 32
"""Most variants compiled in a process. Evaluation after training soon reaches Dynamo's own limit of 8."""
BYTES_KEPT = 2**31
"""Limit for masks cached for later layers and steps. One takes 0.5 GB at 32 heads and 131,072 tokens, 2 MB at 8,192."""


class BlockTables(NamedTuple):
    """The blocks to compute, in the format of `BlockMask`: first the masked blocks, then the full ones.

    All int32. Only the first `num_blocks` indices of a row count; those after them are valid indices without meaning.
    """

    kv_num_blocks_BNR: Tensor
    kv_indices_BNRC: Tensor
    full_kv_num_blocks_BNR: Tensor
    full_kv_indices_BNRC: Tensor
    q_num_blocks_BNC: Tensor
    q_indices_BNCR: Tensor
    full_q_num_blocks_BNC: Tensor
    full_q_indices_BNCR: Tensor


class Mask(NamedTuple):
    """The blocks to compute, and the tensors needed to mask one."""

    tables: BlockTables
    scopes_N: Tensor
    document_starts_BL: Tensor | None
    q_offset: Tensor | int
    """An int32 scalar tensor if no program should be compiled for its value."""

    @property
    def nbytes(self) -> int:
        """Bytes of the block tables."""
        return sum(table.nbytes for table in self.tables)


def flex_attention(q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, visibility: Visibility, scale: float) -> Tensor:
    """`api.scoped_attention` with all arguments given.

    Layers with equal scopes share one mask, which is cached across calls: see `shared_mask`. Under torch.compile each
    layer builds its mask inside the graph instead, and values are not checked.

    Raises:
        ValueError: FlexAttention cannot run here.
        RuntimeError: it would run uncompiled, with the full matrix of scores in memory.
    """
    on_cpu = q_BLNH.device.type == "cpu"
    if q_BLNH.dtype not in DTYPES:
        raise ValueError(f'backend "flex" does not take {q_BLNH.dtype}: use bfloat16, float16 or float32, or "banded"')
    if on_cpu and torch.is_grad_enabled() and (q_BLNH.requires_grad or k_BLKH.requires_grad or v_BLKH.requires_grad):
        raise ValueError('backend "flex" has no backward on a CPU: use "banded"')
    if not on_cpu and q_BLNH.shape[-1] < 16:
        raise ValueError(f'backend "flex" takes head dims from 16 on a GPU, not {q_BLNH.shape[-1]}: use "triton"')
    if on_cpu:  # FlexAttention refuses tensors that require grad, even where gradients are off
        q_BLNH, k_BLKH, v_BLKH = q_BLNH.detach(), k_BLKH.detach(), v_BLKH.detach()
    q_BNLH, k_BKLH, v_BKLH = q_BLNH.transpose(1, 2), k_BLKH.transpose(1, 2), v_BLKH.transpose(1, 2)
    Lq, device = q_BLNH.shape[1], q_BLNH.device
    bias = None if visibility.bias is None else visibility.bias.to(device, torch.float32)
    with torch.autocast(device.type, enabled=False):
        if torch.compiler.is_compiling():
            # Scopes and documents unchanged: on a CPU, torch 2.13 can't compile a mask that reads tensors its graph computes.
            here = visibility.to(device)
            mask = Mask(block_tables(here, Lq), here.scopes_N, here.document_starts_BL, here.q_offset)
            return _attend(q_BNLH, k_BKLH, v_BKLH, mask, bias, scale).transpose(1, 2)
        mask = shared_mask(visibility, Lq, device)
        return _attend_compiled(q_BNLH, k_BKLH, v_BKLH, mask, bias, scale).transpose(1, 2)


def _attend(q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, mask: Mask, bias: ScoreBias | None, scale: float) -> Tensor:
    """The function that is compiled: [B, N, Lq, H]. Everything that varies between calls is a tensor or a size."""
    if not torch.compiler.is_compiling():
        raise RuntimeError(
            'backend "flex" was about to run without compilation, which takes O(L²) memory: enable torch.compile '
            '(TORCHDYNAMO_DISABLE, torch.compiler.set_stance and suppress_errors turn it off), or use "banded"'
        )
    tables, scopes_N, starts_BL, q_offset = mask

    def seen(b: Tensor, n: Tensor, row: Tensor, key: Tensor) -> Tensor:
        token = row + q_offset
        return semantics.visible(token, key, scopes_N[n], None if starts_BL is None else starts_BL[b, token])

    def biased(score: Tensor, b: Tensor, n: Tensor, row: Tensor, key: Tensor) -> Tensor:
        assert bias is not None
        return score + bias.of_head(row + q_offset - key, n)

    sizes = (q_BNLH.shape[2], k_BKLH.shape[2])
    block_mask = torch_flex.BlockMask(sizes, *tables, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=seen)
    score_mod = None if bias is None else biased
    return torch_flex.flex_attention(q_BNLH, k_BKLH, v_BKLH, score_mod, block_mask, scale, enable_gqa=True)


# Compilation


_compiled: Callable[..., Tensor] | None = None
_variants: dict[str, set] = {}
"""The values seen so far of each property that a program is compiled for, for the error message."""


def _attend_compiled(
    q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, mask: Mask, bias: ScoreBias | None, scale: float
) -> Tensor:
    global _compiled
    if _compiled is None:
        _compiled = torch.compile(_attend, fullgraph=True)
    N, H = q_BNLH.shape[1], q_BNLH.shape[3]
    for name, value in (
        ("dtype", q_BNLH.dtype), ("device", q_BNLH.device), ("query heads", N), ("key-value heads", k_BKLH.shape[1]),
        ("head dim", H), ("scale", scale), ("documents", mask.document_starts_BL is not None),
        ("bias", None if bias is None else bias.kind), ("gradients", torch.is_grad_enabled()),
    ):  # fmt: skip
        _variants.setdefault(name, set()).add(value)
    arguments = (q_BNLH, k_BKLH, v_BKLH, mask, bias, scale)
    limit_hit = torch._dynamo.exc.FailOnRecompileLimitHit
    with contextlib.suppress(limit_hit):
        return _compiled(*arguments)
    # Past Dynamo's own limit, under ours. Setting it takes a millisecond, and programs already compiled do not need it.
    try:
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT, fail_on_recompile_limit_hit=True):
            return _compiled(*arguments)
    except limit_hit as error:
        varied = [f"{name} ({', '.join(map(str, values))})" for name, values in _variants.items() if len(values) > 1]
        raise RuntimeError(
            f'backend "flex" has compiled {RECOMPILE_LIMIT} variants, the most it may. Calls differed in '
            f"{', '.join(varied) or 'sizes alone'}. Run fewer of these in one process, raise RECOMPILE_LIMIT in "
            f'{__name__}, or use "banded", which compiles none. TORCH_LOGS=recompiles says what each was for.'
        ) from error


# Masks


def block_tables(visibility: Visibility, queries: int) -> BlockTables:
    """The blocks to compute, by rows and by columns, without reading a tensor on the host.

    A block is full if all its queries see all its keys. One that extends past the end of the sequence is not full, as in
    PyTorch's `create_block_mask`. Blocks without a visible pair are left out.

    Args:
        visibility: its scopes and document starts are on one device, and starts never fall.
        queries: number of queries Lq.
    """
    scopes_N, document_starts_BL, q_offset = visibility.scopes_N, visibility.document_starts_BL, visibility.q_offset
    device = scopes_N.device
    keys = queries + q_offset
    rows, columns = -(-queries // BLOCK), -(-keys // BLOCK)
    row, column = (torch.arange(n, dtype=torch.int32, device=device) for n in (rows, columns))
    scope = scopes_N.long().clamp(max=keys).int()[None, :, None]
    starts_BL = None if document_starts_BL is None else document_starts_BL.int().contiguous()

    # Keys of a block of queries. Neither the edge of the scope nor the document start falls from one token to the next, so
    # the first query bounds what any query sees, and the last query what all see.
    first_t = row * BLOCK + q_offset
    last_t = (first_t + BLOCK).clamp(max=keys) - 1
    first_start = last_start = torch.zeros_like(row)
    if starts_BL is not None:
        first_start, last_start = starts_BL[:, None, first_t], starts_BL[:, None, last_t]
    kv = _runs(
        begin=torch.maximum(first_t - scope + 1, first_start) // BLOCK,
        end=last_t // BLOCK + 1,
        seen_from=_blocks(torch.maximum(last_t - scope + 1, last_start)),
        seen_to=torch.where(first_t + BLOCK <= keys, (first_t + 1) // BLOCK, 0),
        blocks=column,
    )

    # Queries of a block of keys, as rows: from the first key's own row (or row 0) to where the scope or the document of the
    # last key ends; they see the whole block up to where those of the first key end.
    first_i = column * BLOCK
    last_i = (first_i + BLOCK).clamp(max=keys) - 1
    first_until = last_until = torch.full_like(column, keys)
    if starts_BL is not None:
        # Starts never fall, so token i is seen up to the last token whose document starts no later than i.
        ends = torch.cat((first_i, last_i)).repeat(len(starts_BL), 1)
        ends = torch.searchsorted(starts_BL, ends, right=True, out_int32=True)[:, None]
        first_until, last_until = ends.chunk(2, dim=-1)
    q = _runs(
        begin=(first_i - q_offset).clamp(min=0) // BLOCK,
        end=_blocks((torch.minimum(last_i + scope, last_until) - q_offset).clamp(min=0)),
        seen_from=_blocks((first_i + BLOCK - 1 - q_offset).clamp(min=0)),
        seen_to=(torch.minimum(first_i + scope, first_until) - q_offset).clamp(min=0) // BLOCK,
        blocks=row,
    )
    return BlockTables(*kv, *q)


def _blocks(tokens: Tensor) -> Tensor:
    """Number of blocks that hold this many tokens, rounded up."""
    return (tokens + BLOCK - 1) // BLOCK


def _runs(
    begin: Tensor, end: Tensor, seen_from: Tensor, seen_to: Tensor, blocks: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Number and indices of masked blocks, then of full ones: full from `seen_from` to `seen_to`, masked around them."""
    begin = torch.minimum(begin, end)
    seen_from = torch.minimum(torch.maximum(seen_from, begin), end)
    full_count = torch.minimum(torch.maximum(seen_to, seen_from), end) - seen_from
    last = len(blocks) - 1
    partial = begin[..., None] + blocks
    partial = partial + torch.where(partial >= seen_from[..., None], full_count[..., None], 0)
    full = seen_from[..., None] + blocks
    return end - begin - full_count, partial.clamp(max=last), full_count, full.clamp(max=last)


def _new_mask(visibility: Visibility, queries: int) -> Mask:
    """A mask of new tensors with fixed dtypes, so that one program serves all, and the caller's tensors are not kept alive."""
    document_starts_BL, q_offset = visibility.document_starts_BL, visibility.q_offset
    tables = block_tables(visibility, queries)
    scopes_N = visibility.scopes_N.long().clamp(max=queries + q_offset).int()
    if document_starts_BL is not None:
        document_starts_BL = document_starts_BL.to(torch.int32, copy=True, memory_format=torch.contiguous_format)
        if document_starts_BL.device.type == "cpu":
            document_starts_BL = _with_static_sizes(document_starts_BL)
    offset = torch.full((), q_offset, dtype=torch.int32, device=scopes_N.device)
    return Mask(tables, scopes_N, document_starts_BL, offset)


def _with_static_sizes(starts_BL: Tensor) -> Tensor:
    """Document starts padded to a power of two columns, a size that is compiled as a constant.

    In a mask, torch 2.13's C++ code mixes up the names of dynamic sizes (`ks1` is replaced inside `ks13`) and fails to
    compile, or reads with a wrong stride. This way the mask has no dynamic size, at one variant per power of two.
    """
    L = starts_BL.shape[1]
    starts_BL = F.pad(starts_BL, (0, max(1024, 1 << (L - 1).bit_length()) - L))
    torch._dynamo.mark_static(starts_BL)
    return starts_BL


class _Kept(NamedTuple):
    mask: Mask
    documents: weakref.ref[Tensor] | None
    version: int


_kept: OrderedDict[tuple, _Kept] = OrderedDict()
"""The masks last used, the latest at the end."""


def shared_mask(visibility: Visibility, queries: int, device: torch.device) -> Mask:
    """A new mask, or that of an earlier call with equal scopes and sizes and the same, unchanged document tensor.

    Scopes are read on the host once per tensor, and again when it changes; documents on a GPU are never read. The most
    recently used masks are cached, up to BYTES_KEPT, and those with documents only as long as their tensor lives. A mask
    takes 16 BNRC bytes. Tensors made under inference_mode do not track changes: they are read at each call, and masks of
    such documents are not cached.

    Raises:
        ValueError: a scope below 1 or, on a CPU, invalid document starts.
    """
    scopes = host_values(visibility.scopes_N)
    documents = visibility.document_starts_BL
    key = (scopes, queries, visibility.q_offset, device, None if documents is None else id(documents))
    keep = documents is None or not documents.is_inference()
    if keep and (kept := _kept.get(key)) is not None:
        same = documents is None or (kept.documents is not None and kept.documents() is documents)
        if same and (documents is None or kept.version == documents._version):
            _kept.move_to_end(key)
            return kept.mask
    semantics.check_values(scopes, documents if documents is not None and documents.device.type == "cpu" else None)
    with torch.inference_mode(False), torch.no_grad():  # training may reuse a mask made for an evaluation
        mask = _new_mask(visibility.to(device), queries)
    if keep:
        forget = functools.partial(_forget, key)
        reference = None if documents is None else weakref.ref(documents, forget)
        _kept[key] = _Kept(mask, reference, 0 if documents is None else documents._version)
        _kept.move_to_end(key)
        while len(_kept) > 1 and sum(kept.mask.nbytes for kept in _kept.values()) > BYTES_KEPT:
            _kept.popitem(last=False)
    return mask


def _forget(key: tuple, reference: weakref.ref[Tensor]) -> None:
    """Drops the mask of a deleted document tensor, unless another has taken its place."""
    if key in _kept and _kept[key].documents is reference:
        del _kept[key]
