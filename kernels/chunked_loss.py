"""Cross-entropy of an output head without ever holding all its logits.

Logits of 128k tokens over a vocabulary of 128,256 would take 67 GB in fp32. Here they exist one chunk of tokens at a
time, and where gradients are wanted they are taken in the same pass, so that no chunk is computed twice.

Shapes: T tokens, D model dimension, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

ACCELERATOR_LOGITS = 2**25
"""Logits a chunk on an accelerator: large enough for its matrix units."""
CPU_LOGITS = 2**20
"""Logits a chunk on a CPU: 4 MB, which stay in the cache between the passes over them."""


def chunked_cross_entropy(
    h_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk_tokens: int = 0, ignore_index: int = -100
) -> Tensor:
    """Sum over tokens of the cross-entropy of `h @ weight.T` against `labels`.

    Args:
        h_TD: hidden states; fp32, bf16, fp16 or fp64.
        weight_VD: output head.
        labels_T: integer class ids, `ignore_index` where a token does not count.
        chunk_tokens: tokens whose logits exist at once; 0 picks by device.

    Returns:
        A scalar, fp32 (fp64 for fp64 inputs). Its gradients may be taken once.

    Raises:
        ValueError: shapes that do not fit, or (checked where that costs no synchronisation) a label outside the
            vocabulary.

    Matrix products run in the inputs' dtype, or autocast's; softmax and the sum of the weight's gradient are in fp32.
    """
    T, V = h_TD.shape[0], weight_VD.shape[0]
    if h_TD.ndim != 2 or weight_VD.ndim != 2 or h_TD.shape[1] != weight_VD.shape[1] or labels_T.shape != (T,):
        shapes = f"h {tuple(h_TD.shape)}, weight {tuple(weight_VD.shape)}, labels {tuple(labels_T.shape)}"
        raise ValueError(f"chunked_cross_entropy takes h [T, D], weight [V, D] and labels [T]; these are {shapes}")
    if chunk_tokens < 0:
        raise ValueError(f"chunk_tokens = {chunk_tokens} must be positive, or 0 to let it be picked")
    if labels_T.device.type == "cpu":
        outside = (labels_T != ignore_index) & ((labels_T < 0) | (labels_T >= V))
        if outside.any():
            raise ValueError(f"label {int(labels_T[outside][0])} is outside the vocabulary of {V}")
    needs_grad = torch.is_grad_enabled() and (h_TD.requires_grad or weight_VD.requires_grad)
    if h_TD.device.type == "cpu" or not needs_grad:
        # Tokens that do not count cost nothing. On an accelerator in training, finding them would stop its queue.
        counted = labels_T != ignore_index
        if not counted.all():
            h_TD, labels_T = h_TD[counted], labels_T[counted]
    chunk = chunk_tokens or max((CPU_LOGITS if h_TD.device.type == "cpu" else ACCELERATOR_LOGITS) // V, 64)
    device = h_TD.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else h_TD.dtype
    return _ChunkedCrossEntropy.apply(h_TD, weight_VD, labels_T.long(), chunk, ignore_index, dtype, needs_grad)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        chunk: int,
        ignore_index: int,
        dtype: torch.dtype,
        needs_grad: bool,
    ) -> Tensor:
        ctx.dtypes = h_TD.dtype, weight_VD.dtype
        with torch.autocast(h_TD.device.type, enabled=False):
            h_TD, weight_VD = h_TD.to(dtype), weight_VD.to(dtype)
            wide = torch.promote_types(dtype, torch.float32)
            loss = torch.zeros((), dtype=wide, device=h_TD.device)
            dh_TD = torch.empty_like(h_TD) if needs_grad else None
            dw_VD = torch.zeros_like(weight_VD, dtype=wide) if needs_grad else None
            for h, labels, start in zip(
                h_TD.split(chunk), labels_T.split(chunk), range(0, max(len(h_TD), 1), chunk), strict=True
            ):
                logits = (h @ weight_VD.T).to(wide)
                counted = labels != ignore_index
                classes = labels.clamp(min=0)[:, None]
                lse = logits.logsumexp(-1)
                loss += ((lse - logits.gather(1, classes)[:, 0]) * counted).sum()
                if dh_TD is None or dw_VD is None:
                    continue
                # d loss / d logits = softmax − one-hot, in the logits' own memory.
                d = logits.sub_(lse[:, None]).exp_()
                d.scatter_add_(1, classes, torch.full_like(classes, -1, dtype=wide))
                d = d.mul_(counted[:, None]).to(dtype)
                torch.mm(d, weight_VD, out=dh_TD[start : start + chunk])
                if dtype == wide:
                    dw_VD.addmm_(d.T, h)
                else:
                    dw_VD += d.T @ h
        ctx.gradients = dh_TD, dw_VD
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        if ctx.gradients is None:
            raise RuntimeError("chunked_cross_entropy: gradients were taken already; compute the loss again")
        dh_TD, dw_VD = ctx.gradients
        ctx.gradients = None  # scaled in place, to hold no second copy of a gradient as large as the head
        return dh_TD.mul_(grad).to(ctx.dtypes[0]), dw_VD.mul_(grad).to(ctx.dtypes[1]), *[None] * 5
