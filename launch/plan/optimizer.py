"""The size of an optimizer's state. A new optimizer needs a case in `optimizer_state` and nothing else here."""

from collections.abc import Iterable

from farsight.configs.schema import Optimizer
from farsight.launch.plan.weights import CODE_8BIT, SCALES_BLOCK, Weight

ADAM_MOMENTS = 2
MIN_8BIT, MIN_PAGED = 4096, 100_000
"""Tensors with fewer numbers than these have moments in fp32, and on the GPU, in bitsandbytes."""


def optimizer_state(optimizer: Optimizer, weight: Weight, ranks: int) -> tuple[int, int]:
    """Bytes of a trained weight's state on the first of `ranks` FSDP ranks: those that stay on the GPU, and those that
    bitsandbytes moves to host memory when the GPU is full."""
    name, numbers = optimizer.name, weight.shard(ranks)
    if name in ("AdamW", "Adam"):  # moments have the weight's type; the tensor's step count is one fp32
        return int(ADAM_MOMENTS * weight.itemsize * numbers) + 4, 0
    small = not name.endswith("8bit") or numbers < MIN_8BIT
    moments = ADAM_MOMENTS * (4 if small else 1) * numbers
    scales = 0 if small else ADAM_MOMENTS * 4 * -(-numbers // SCALES_BLOCK)
    return (scales, moments) if name.startswith("Paged") and numbers >= MIN_PAGED else (moments + scales, 0)


def optimizer_bytes(optimizer: Optimizer, weights: Iterable[Weight], ranks: int) -> tuple[int, int]:
    """`optimizer_state` of all trained weights together, with the tables of values that moments in 8 bits share."""
    states = [optimizer_state(optimizer, weight, ranks) for weight in weights if weight.trained]
    tables = ADAM_MOMENTS * CODE_8BIT * optimizer.name.endswith("8bit")
    return sum(held for held, _ in states) + tables, sum(paged for _, paged in states)
