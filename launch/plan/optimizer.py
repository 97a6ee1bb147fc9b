"""The size of an optimizer's state; each kind knows its own (`configs/optimizers.py`)."""

from collections.abc import Iterable

from farsight.configs.optimizers import OptimizerBase
from farsight.launch.plan.weights import Weight


def optimizer_bytes(optimizer: OptimizerBase, weights: Iterable[Weight], ranks: int) -> tuple[int, int]:
    """Bytes of state of all trained weights on the first of `ranks` FSDP ranks: those that stay on the GPU, and those that move
    to host memory when it is full."""
    sizes = [optimizer.state_bytes(w.shard(ranks), w.itemsize, w.linear) for w in weights if w.trained]
    return sum(held for held, _ in sizes) + optimizer.shared_bytes, sum(paged for _, paged in sizes)
