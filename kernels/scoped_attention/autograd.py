"""The autograd formula of the backends that are pairs of custom operators, one for each pass."""

from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef


def new_outputs(q_BLNH: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Empty outputs of kernels whose log-sum-exp is fp32 [B, N, Lq], for the compiler."""
    B, Lq, N, _H = q_BLNH.shape
    return q_BLNH.new_empty(q_BLNH.shape), q_BLNH.new_empty((B, N, Lq), dtype=torch.float32)


def register_backward(forward: CustomOpDef, backward: CustomOpDef, leaves: int = 3) -> None:
    """Makes `backward` the gradient of `forward`, and declares its outputs to the compiler.

    Args:
        forward: from the leaves (q, k and v; or q, and keys with values), scopes, document starts, the bias's coefficients,
            and numbers or names, to the output and the log-sum-exp, which has no gradient.
        backward: from the gradient of the output, the leaves, both outputs and the other inputs to the leaves' gradients.
        leaves: number of inputs that have gradients.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        tensors = leaves + 3
        ctx.others = inputs[tensors:]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs[:leaves], *output, *inputs[leaves:tensors])

    def gradients(ctx: Any, do: Tensor, _dlse: Tensor) -> tuple[Tensor | None, ...]:
        without_gradient = [None] * (3 + len(ctx.others))
        return *backward(do, *ctx.saved_tensors, *ctx.others), *without_gradient

    forward.register_autograd(gradients, setup_context=save)
    backward.register_fake(lambda do, *inputs: tuple(x.new_empty(x.shape) for x in inputs[:leaves]))
