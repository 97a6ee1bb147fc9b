"""Config sections of the optimizers, one class for each `kind`; `training/optimizers/` steps with them."""

from dataclasses import dataclass, fields
from typing import ClassVar, Literal, get_args

from farsight.ranges import NonNegative, PartialShare, Positive

BLOCK = 256
"""Numbers that share a scale, in moments of 8 bits."""
TABLE = 256 * 4
"""Bytes of the table of what 8 bits stand for."""
LEAST_IN_8_BITS, LEAST_PAGED = 4096, 100_000
"""Tensors with fewer numbers keep moments in fp32, and on the GPU."""


@dataclass(kw_only=True)
class OptimizerBase:
    """Options common to all optimizers."""

    title: ClassVar[str]
    """The name that papers and model cards use."""
    lr: Positive = 0.0008
    """Learning rate after warm-up."""
    beta1: PartialShare = 0.9
    """Decay of the first moment's running mean."""
    beta2: PartialShare = 0.95
    """Decay of the second moment's running mean, as Llama has it; PyTorch's default is 0.999."""
    eps: Positive = 1e-08
    """Added to the root of the second moment."""
    weight_decay: NonNegative = 0.1
    """Decoupled from the gradient."""
    shared_bytes: ClassVar[int] = 0
    """Bytes of state that all parameters share."""

    def state_bytes(self, numel: int, itemsize: float, matrix: bool) -> tuple[int, int]:
        """Bytes of a tensor's state: those that stay on the GPU, and those that move to host memory when it is full.

        Args:
            numel: numbers of the tensor that a rank holds.
            itemsize: bytes of one.
            matrix: whether it is a matrix of a block rather than embedding, head or vector.
        """
        return int(2 * itemsize * numel) + 4, 0  # two moments, and the count of steps


@dataclass(kw_only=True)
class AdamW(OptimizerBase):
    """AdamW (Loshchilov and Hutter, 2019) over all trained weights."""

    title = "AdamW"
    kind: Literal["adamw"] = "adamw"
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """How PyTorch steps: "fused" is the fastest on GPUs, "for-loop" the slowest."""


@dataclass(kw_only=True)
class Adam(OptimizerBase):
    """Adam (Kingma and Ba, 2015) over all trained weights."""

    title = "Adam"
    kind: Literal["adam"] = "adam"
    weight_decay: NonNegative = 0.1
    """Part of the gradient."""
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """As AdamW's."""


@dataclass(kw_only=True)
class AdamW8bit(OptimizerBase):
    """AdamW with both moments in 8 bits (Dettmers et al., 2022), torchao's.

    Where a rank holds fewer than 4,096 numbers of a tensor, or not a multiple of 256, their moments have the parameter's type.
    """

    title = "AdamW8bit"
    kind: Literal["adamw8bit"] = "adamw8bit"

    def state_bytes(self, numel: int, itemsize: float, matrix: bool) -> tuple[int, int]:
        if numel < LEAST_IN_8_BITS or numel % BLOCK:
            return int(2 * itemsize * numel), 0
        return 2 * (numel + 4 * (numel // BLOCK) + TABLE), 0


@dataclass(kw_only=True)
class Muon(OptimizerBase):
    """Muon (Jordan et al., 2024) for the blocks' matrices, AdamW for embedding, head and vectors.

    Updates are scaled to AdamW's size (Liu et al., 2025), so that one learning rate serves both.
    """

    title = "Muon"
    kind: Literal["muon"] = "muon"
    momentum: PartialShare = 0.95
    """Decay of the matrices' momentum, which is Nesterov's."""

    def state_bytes(self, numel: int, itemsize: float, matrix: bool) -> tuple[int, int]:
        return (int(itemsize * numel), 0) if matrix else super().state_bytes(numel, itemsize, matrix)


Optimizer = AdamW | AdamW8bit | Muon | Adam
OF_ALL_KINDS = tuple(field.name for field in fields(OptimizerBase))
"""Options that keep their values when a config is laid over one of another kind."""

# ── Fine-tuning ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(kw_only=True)
class FinetuneDefaults(OptimizerBase):
    """The defaults that PEFT and the papers use."""

    lr: Positive = 2e-4
    """Learning rate after warm-up; [garfa] has its own."""
    beta2: PartialShare = 0.999
    """Decay of the second moment's running mean; pre-training's default is 0.95."""
    weight_decay: NonNegative = 0.01
    """Decoupled from the gradient; [garfa] has its own."""


@dataclass(kw_only=True)
class FinetuneAdamW(FinetuneDefaults, AdamW):
    """AdamW over adapters, or over the layers in training.layers."""


@dataclass(kw_only=True)
class FinetuneAdam(FinetuneDefaults, Adam):
    """Adam over adapters, or over the layers in training.layers."""

    weight_decay: NonNegative = 0.01
    """Part of the gradient; [garfa] has its own."""


@dataclass(kw_only=True)
class FinetuneAdamW8bit(FinetuneDefaults, AdamW8bit):
    """AdamW with both moments in 8 bits, torchao's, where a rank's part of a tensor fills blocks of 256."""


@dataclass(kw_only=True)
class PagedAdamW(FinetuneDefaults):
    """bitsandbytes' AdamW, whose moments move to host memory when the GPU is full."""

    title = "PagedAdamW"
    kind: Literal["paged_adamw"] = "paged_adamw"

    def state_bytes(self, numel: int, itemsize: float, matrix: bool) -> tuple[int, int]:
        moments = 2 * 4 * numel
        return (0, moments) if numel >= LEAST_PAGED else (moments, 0)


@dataclass(kw_only=True)
class PagedAdamW8bit(FinetuneDefaults):
    """bitsandbytes' AdamW with moments in 8 bits, which move to host memory when the GPU is full."""

    title = "PagedAdamW8bit"
    kind: Literal["paged_adamw8bit"] = "paged_adamw8bit"
    shared_bytes = 2 * TABLE

    def state_bytes(self, numel: int, itemsize: float, matrix: bool) -> tuple[int, int]:
        if numel < LEAST_IN_8_BITS:
            return 2 * 4 * numel, 0
        scales = 2 * 4 * -(-numel // BLOCK)
        return (scales, 2 * numel) if numel >= LEAST_PAGED else (scales + 2 * numel, 0)


FinetuneOptimizer = FinetuneAdamW | FinetuneAdamW8bit | PagedAdamW | PagedAdamW8bit | FinetuneAdam


def of_kind(optimizer: FinetuneOptimizer, kind: str) -> FinetuneOptimizer:
    """The same options for a fine-tuning optimizer of another kind."""
    cls = next(cls for cls in get_args(FinetuneOptimizer) if cls.kind == kind)
    return cls(**{name: getattr(optimizer, name) for name in OF_ALL_KINDS})
