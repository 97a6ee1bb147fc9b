"""Refuses to save non-finite weights: such checkpoints are worthless, and older, good ones would be deleted for them."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from farsight.errors import NonFiniteError
from farsight.parallel.parts import TensorShard
from farsight.parallel.ranks import on_every_rank


def refuse_non_finite(weights: dict[str, Any], what: str) -> None:
    """Raises `NonFiniteError` on all ranks if any rank's part of a weight is infinite or NaN.

    Args:
        weights: this rank's weights by name: tensors, `DTensor`s or `TensorShard`s.
        what: name of the save, for the message.
    """
    of_ranks = on_every_rank(lambda: [name for name, tensor in weights.items() if not _finite(tensor)])
    if bad := sorted({name for names in of_ranks for name in names}):
        names = ", ".join(bad[:5]) + f" and {len(bad) - 5} more" * (len(bad) > 5)
        raise NonFiniteError(
            f"{what} is not saved: weights are infinite or NaN ({names}). Older checkpoints are kept. Lower optimizer.lr, "
            "lengthen lr_scheduler.warmup_steps, or raise optimizer.eps."
        )


@torch.no_grad()
def _finite(tensor: Any) -> bool:
    if isinstance(tensor, TensorShard):
        return all(map(_finite, tensor.chunks.values()))
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not local.is_floating_point() or not local.numel():
        return True
    # The largest magnitude is NaN if any element is.
    return math.isfinite(float(torch.linalg.vector_norm(local.detach(), math.inf)))
