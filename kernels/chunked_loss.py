"""Cross-entropy of a language-model head that never holds all logits: they exist for one chunk of tokens at a time.

At 128k tokens and a vocabulary of 128k, fp32 logits take 64 GiB and their gradient as much again. Here the forward pass
turns each chunk's logits into its loss and its gradients at once; the backward pass only scales the saved gradients, one
[T, D] and one [V, D]. As in Liger-Kernel's fused linear cross-entropy (arXiv:2410.10989) and torchtune's chunked loss.

Shape suffixes: T tokens, D model dim, V vocabulary.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

CHUNK_LOGITS = 32 * 2**20
"""Logits per chunk on an accelerator: 128 MiB in fp32."""
CHUNK_TOKENS, CHUNK_TOKENS_TRAINED = 256, 2048
"""Chunks on an accelerator are multiples of the first, two of its tiles. Where the head trains they have at least the second: each
chunk reads and writes the whole fp32 gradient, which takes a GPU as long as the product over about 1,000 tokens."""
CHUNK_LOGITS_CPU = 2**20
"""Logits per chunk on a CPU: they stay in cache between the matrix product and the softmax."""
CHUNK_TOKENS_CPU = 256
"""Least tokens per chunk on a CPU: each chunk reads the whole weight. At V = 32,000, D = 768, 32 tokens took 1.6 times as long."""


def chunked_cross_entropy(
    h_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    chunk_tokens: int = 0,
    ignore_index: int = -100,
    vocabulary_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Sum over tokens of the cross-entropy of `h_TD @ weight_VD.T` with the labels, for next-token training.

    Args:
        h_TD: hidden states [T, D]; bf16, fp16, fp32 or fp64.
        weight_VD: the output projection [V, D].
        labels_T: int32 or int64 token ids [T], 0 to V - 1, or `ignore_index` for tokens without loss.
        chunk_tokens: tokens whose logits exist at once; 0 takes `chunk_of`.
        ignore_index: the label of tokens without loss.
        vocabulary_group: the ranks over which the vocabulary is sharded: rank r's `weight_VD` is the r-th of equal parts,
            and all ranks are given the same tokens and labels. They exchange one number per token.

    Returns:
        The sum, an fp32 scalar (fp64 for fp64), 0 if no token counts; divide it by the number of tokens that count. With
        a `vocabulary_group` all ranks return the same value, and the gradient of `h_TD` is the rank's part of a sum.
        Softmax is fp32; matrix products are in the autocast dtype if autocast is on. Weight gradients are summed in fp32.
        Not twice differentiable.

    Raises:
        ValueError: on shapes or dtypes that do not fit, and on a CPU on labels outside the vocabulary.
    """
    if h_TD.dim() != 2 or weight_VD.dim() != 2 or h_TD.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"h_TD is {list(h_TD.shape)} and weight_VD {list(weight_VD.shape)}: pass [T, D] and [V, D] with the same D"
        )
    if labels_T.shape != h_TD.shape[:1] or labels_T.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"labels_T is {list(labels_T.shape)} of {labels_T.dtype}: pass one int64 id a token, [{h_TD.shape[0]}]"
        )
    if chunk_tokens < 0:
        raise ValueError(f"chunk_tokens is {chunk_tokens}: set it to 1 or more, or to 0 to have it picked")
    device = h_TD.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    elif h_TD.dtype == weight_VD.dtype:
        dtype = h_TD.dtype
    else:
        raise ValueError(
            f"h_TD is {h_TD.dtype} and weight_VD {weight_VD.dtype}: cast one to the other, or turn autocast on"
        )
    group = "" if vocabulary_group is None else vocabulary_group.group_name
    grad_h = torch.is_grad_enabled() and h_TD.requires_grad
    grad_weight = torch.is_grad_enabled() and weight_VD.requires_grad
    # The ranks of a group have equal shards and so pick the same chunks: they work on one chunk together.
    chunk_tokens = chunk_tokens or chunk_of(weight_VD.shape[0], device, grad_weight)
    return _loss_op(h_TD, weight_VD, labels_T, chunk_tokens, ignore_index, dtype, grad_h, grad_weight, group)[0]


def chunk_of(vocabulary: int, device_type: str, trains: bool) -> int:
    """Tokens of a chunk: 32M logits, on a CPU 1M (its cache), but at least as many tokens as keep the matrix products busy.

    Args:
        vocabulary: the tokens in a rank's part of it.
        trains: whether the head has a gradient.
    """
    if device_type == "cpu":
        return max(CHUNK_TOKENS_CPU, CHUNK_LOGITS_CPU // vocabulary)
    least = CHUNK_TOKENS_TRAINED if trains else CHUNK_TOKENS
    return max(least, CHUNK_LOGITS // vocabulary // CHUNK_TOKENS * CHUNK_TOKENS)


def loss_and_grads(
    h_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    chunk_tokens: int,
    ignore_index: int,
    dtype: torch.dtype,
    grad_h: bool,
    grad_weight: bool,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and its gradients with respect to h [T, D] and weight [V, D], or empty tensors where not requested.

    The body of the operator behind `chunked_cross_entropy`; `dtype` is that of the matrix products.
    """
    group = _resolve_process_group(group_name) if group_name else None  # type: ignore[arg-type]  # GroupName is torch's NewType of str
    parts, part = (1, 0) if group is None else (group.size(), group.rank())
    wide = torch.promote_types(dtype, torch.float32)
    (T, D), V = h_TD.shape, weight_VD.shape[0]
    loss = torch.zeros((), dtype=wide, device=h_TD.device)
    dh_TD = torch.zeros((T, D) if grad_h else 0, dtype=h_TD.dtype, device=h_TD.device)
    dw_VD = torch.zeros((V, D) if grad_weight else 0, dtype=wide, device=h_TD.device)
    counts_T = labels_T != ignore_index
    kept = None  # the rows that count, if not all do and finding them needs no synchronisation
    if h_TD.device.type == "cpu":
        _check_labels(labels_T, counts_T, parts * V)
        kept = None if counts_T.all() else counts_T.nonzero().squeeze(-1)
    else:  # without waiting for the result
        torch._assert_async((~counts_T | ((labels_T >= 0) & (labels_T < parts * V))).all())
    rows = T if kept is None else len(kept)

    with torch.autocast(h_TD.device.type, enabled=False):
        weight = weight_VD.to(dtype)
        for start in range(0, rows, chunk_tokens):
            chunk = slice(start, min(start + chunk_tokens, rows))
            pick = chunk if kept is None else kept[chunk]
            h, counts = h_TD[pick].to(dtype), counts_T[pick].unsqueeze(-1)
            labels = labels_T[pick].long().unsqueeze(-1) - part * V
            here = counts & (labels >= 0) & (labels < V)  # the label is in this rank's part of the vocabulary
            labels = labels.where(here, 0)
            logits = _product(h, weight.T, wide)
            log_p = logits.log_softmax(dim=-1) if group is None else _log_softmax_over_ranks(logits, group)
            loss -= log_p.gather(1, labels).where(here, 0).sum()
            if not (grad_h or grad_weight):
                continue
            # Softmax minus the one-hot label; rows of ignored labels are zero.
            dlogits = log_p.exp_().scatter_add_(1, labels, -here.to(wide))
            if kept is None and h_TD.device.type != "cpu":
                dlogits *= counts
            dlogits = dlogits.to(dtype)
            if grad_h:
                dh_TD[pick] = (dlogits @ weight).to(dh_TD.dtype)
            if grad_weight:
                _add_product(dw_VD, dlogits.T, h)
    if group is not None:
        dist.all_reduce(loss, group=group)
    return loss, dh_TD, dw_VD.to(weight_VD.dtype)


def _product(a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """a @ b in a wider dtype; on GPUs the sums are never rounded to that of a and b."""
    return (
        torch.mm(a, b, out_dtype=wide) if a.dtype != wide and _writes_fp32(a.device, a.dtype)[0] else (a @ b).to(wide)
    )


def _add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """into += a @ b, with `into` in the wider dtype; on GPUs in one pass over it."""
    if into.dtype == a.dtype:
        into.addmm_(a, b)
    elif _writes_fp32(a.device, a.dtype)[1]:
        torch.ops.aten.addmm.dtype_out(into, a, b, into.dtype, out=into)
    else:
        into += _product(a, b, into.dtype)


@cache
def _writes_fp32(device: torch.device, dtype: torch.dtype) -> tuple[bool, bool]:
    """Two flags: products of this dtype can be written in fp32 here, and added to fp32. cuBLAS can do both; some PyTorch versions
    do not offer them."""
    if device.type != "cuda":
        return False, False
    a, into = torch.ones(16, 16, device=device, dtype=dtype), torch.ones(16, 16, device=device)

    def works(product: Callable[[], Tensor]) -> bool:
        try:
            return bool((product() == 17).all())
        except RuntimeError:
            return False

    return (
        works(lambda: torch.mm(a, a, out_dtype=into.dtype) + into),
        works(lambda: torch.ops.aten.addmm.dtype_out(into, a, a, into.dtype, out=into)),
    )


def _log_softmax_over_ranks(logits_TV: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Log-softmax, in place, of logits whose vocabulary is sharded over the ranks."""
    sums_T1 = logits_TV.logsumexp(dim=-1, keepdim=True)
    sums_PT1 = sums_T1.new_empty(group.size() * len(sums_T1), 1)
    dist.all_gather_into_tensor(sums_PT1, sums_T1, group=group)
    return logits_TV.sub_(sums_PT1.unflatten(0, (group.size(), -1)).logsumexp(dim=0))


_loss_op = torch.library.custom_op("farsight::chunked_cross_entropy", loss_and_grads, mutates_args=())


@_loss_op.register_fake
def _(h, weight, labels, chunk_tokens, ignore_index, dtype, grad_h, grad_weight, group_name):
    loss = h.new_empty((), dtype=torch.promote_types(dtype, torch.float32))
    return loss, h.new_empty(h.shape if grad_h else 0), weight.new_empty(weight.shape if grad_weight else 0)


def _keep_grads(ctx, inputs, output) -> None:
    _, dh, dw = output
    ctx.grad_h, ctx.grad_weight = inputs[6:8]
    ctx.set_materialize_grads(False)  # dh and dw have no gradients of their own: don't fill zeros for them
    ctx.save_for_backward(dh, dw)


def _scale_grads(ctx, dloss, _dh, _dw):
    dh, dw = ctx.saved_tensors
    dh = (dh * dloss).to(dh.dtype) if ctx.grad_h and dloss is not None else None
    dw = (dw * dloss).to(dw.dtype) if ctx.grad_weight and dloss is not None else None
    return dh, dw, *[None] * 7


_loss_op.register_autograd(_scale_grads, setup_context=_keep_grads)


def _check_labels(labels_T: Tensor, counts_T: Tensor, vocabulary: int) -> None:
    outside = counts_T & ((labels_T < 0) | (labels_T >= vocabulary))
    if outside.any():
        token = int(outside.nonzero()[0])
        raise ValueError(
            f"labels_T[{token}] is {int(labels_T[token])}, outside the vocabulary of {vocabulary}: "
            "the tokenizer and the model's vocabulary size do not match, or the labels use another ignore_index"
        )
