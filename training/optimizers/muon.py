"""Muon under sharding: every matrix is orthogonalised whole, each by one of the ranks that hold its parts.

Newton–Schulz iterations need a whole matrix. Ranks take turns in owning one: in each round, one all-to-all brings every rank
the parts of its matrix, and another takes the update back to where the parts are. So a rank holds one whole matrix at a time, and
the iterations are divided over the ranks; momentum and weights stay where they are.

Source: Jordan et al., 2024; scaling to AdamW's update size, Liu et al., 2025 (arXiv:2502.16982).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from farsight.configs.optimizers import AdamW, Muon
from farsight.training.optimizers.adam import TorchAdam
from farsight.training.optimizers.container import Group, param_groups
from farsight.training.optimizers.eight_bits import local

Block = tuple[slice, slice]
"""The rows and columns of a matrix that a rank holds."""


@dataclass(frozen=True)
class MuonKind:
    """Muon for the blocks' matrices, AdamW for everything else."""

    settings: Muon
    shards: dist.ProcessGroup | None
    """The ranks that share a copy of the weights, in the order of their meshes; None if each holds all of them."""
    can_skip: ClassVar[bool] = False

    def build(self, groups: Sequence[Group]) -> list[Optimizer]:
        matrices = param_groups(groups, lambda name, p: is_matrix(name, p.shape))
        rest = param_groups(groups, lambda name, p: not is_matrix(name, p.shape))
        return [
            *([ShardedMuon(matrices, self.settings.momentum, self.shards)] if matrices else []),
            *([self._adamw.over(rest)] if rest else []),
        ]

    def new_state(self, optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
        if isinstance(optimizer, ShardedMuon):
            return {"momentum_buffer": torch.zeros_like(parameter)}
        return self._adamw.new_state(optimizer, parameter)

    @property
    def _adamw(self) -> TorchAdam:
        o = self.settings
        return TorchAdam(AdamW(lr=o.lr, beta1=o.beta1, beta2=o.beta2, eps=o.eps, weight_decay=o.weight_decay))


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon steps a parameter: a matrix of a block, not the embedding or the head."""
    return name.startswith("layers.") and len(shape) == 2


class ShardedMuon(Optimizer):
    """`torch.optim.Muon` with Nesterov momentum and updates of AdamW's size, for parameters that may be sharded in any way.

    Args:
        shards: the ranks that hold the parts of each parameter.
    """

    def __init__(self, groups: list[dict[str, Any]], momentum: float, shards: dist.ProcessGroup | None) -> None:
        super().__init__(groups, {"momentum": momentum})
        self.shards = shards

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is ever given
        for group in self.param_groups:
            # Matrices of a round are about equally large, and so are the ranks' shares of the work.
            parameters = sorted((p for p in group["params"] if p.grad is not None), key=lambda p: -p.numel())
            ranks = 1 if self.shards is None else self.shards.size()
            for first in range(0, len(parameters), ranks):
                self._step(parameters[first : first + ranks], group)

    def _step(self, parameters: Sequence[Any], group: dict[str, Any]) -> None:
        """Steps a round of parameters, as many as there are ranks or fewer."""
        updates = []
        for p in parameters:
            state, gradient = self.state[p], local(p.grad)
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p)
            momentum = local(state["momentum_buffer"]).lerp_(gradient, 1 - group["momentum"])
            updates.append(gradient.lerp(momentum, group["momentum"]))
        if self.shards is None:
            updates = [orthogonalised(update) for update in updates]
        else:
            updates = self._exchanged(parameters, updates, self.shards)
        for p, update in zip(parameters, updates, strict=True):
            local(p).mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

    def _exchanged(self, parameters: Sequence[Any], updates: list[Tensor], shards: dist.ProcessGroup) -> list[Tensor]:
        """The rank's parts of the orthogonalised updates; rank n owns the n-th parameter while it is whole."""
        own = parameters[shards.rank()] if shards.rank() < len(parameters) else None
        blocks = [] if own is None else [block_of(own, rank) for rank in range(shards.size())]
        areas = [(rows.stop - rows.start) * (columns.stop - columns.start) for rows, columns in blocks]
        areas = areas or [0] * shards.size()
        sent = [update.numel() for update in updates] + [0] * (shards.size() - len(updates))
        packed = torch.cat([update.flatten() for update in updates])
        parts = packed.new_empty(sum(areas))
        dist.all_to_all_single(parts, packed, areas, sent, group=shards)
        if own is not None:
            whole = packed.new_empty(own.shape)
            for (rows, columns), part in zip(blocks, parts.split(areas), strict=True):
                whole[rows, columns] = part.view(rows.stop - rows.start, -1) if part.numel() else 0
            whole = orthogonalised(whole)
            parts = torch.cat([whole[rows, columns].flatten() for rows, columns in blocks])
        dist.all_to_all_single(packed, parts, sent, areas, group=shards)
        return [part.view_as(update) for part, update in zip(packed.split(sent), updates, strict=False)]


def orthogonalised(update: Tensor) -> Tensor:
    """PyTorch's Newton–Schulz iterations of a whole matrix, scaled as `match_rms_adamw`: its step from zero at a rate of −1."""
    scratch = nn.Parameter(torch.zeros_like(update))
    scratch.grad = update
    torch.optim.Muon(
        [scratch], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="match_rms_adamw"
    ).step()
    return scratch.detach().neg_()


def block_of(parameter: Any, rank: int) -> Block:
    """The block of a sharded matrix that a rank holds.

    Args:
        rank: its number among the ranks that hold shards, counted along the last mesh dimension first.
    """
    ends = [[0, size] for size in parameter.shape]
    mesh = parameter.device_mesh
    for size, placement in zip(reversed(mesh.shape), reversed(parameter.placements), strict=True):
        if placement.is_replicate():  # copies; they are the first dimension
            continue
        rank, place = divmod(rank, size)
        begin, end = ends[placement.dim]
        chunk = -(-(end - begin) // size)  # as torch.chunk divides
        ends[placement.dim] = [min(begin + place * chunk, end), min(begin + (place + 1) * chunk, end)]
    rows, columns = (slice(*span) for span in ends)
    return rows, columns
