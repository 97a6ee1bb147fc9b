"""RMSNorm in its input's dtype."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from farsight.configs.schema import Architecture


class RMSNorm(nn.RMSNorm):
    """PyTorch's RMSNorm, but its output keeps the input's dtype under autocast, where PyTorch returns fp32 on GPUs.

    Sums are fp32 either way.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] in x's dtype."""
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class ZeroCenteredRMSNorm(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight, in fp32: rounded to bf16, 1 + weight would lose what a small weight says."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] in x's dtype."""
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)


class DividedRMSNorm(nn.Module):
    """A norm over all heads of a projection, of which each rank holds a part: the ranks sum their squares.

    Args:
        norm: the whole norm, whose weight is a `DTensor` [N·H] that is sharded like the heads.
    """

    def __init__(self, norm: nn.RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps or 0.0
        self.width, self.offset = norm.normalized_shape[0], float(isinstance(norm, ZeroCenteredRMSNorm))

    def forward(self, x: Tensor) -> Tensor:
        """[..., the rank's part of N·H] in x's dtype."""
        assert isinstance(self.weight, DTensor)
        with torch.autocast(x.device.type, enabled=False):
            wide, mesh = x.float(), self.weight.device_mesh
            squares = DTensor.from_local(wide.square().sum(-1, keepdim=True), mesh, [Partial()], run_check=False)
            # Each rank's heads contribute a part of the sum's gradient.
            total = squares.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            scale = self.offset + self.weight.to_local().float()
            return (wide * torch.rsqrt(total / self.width + self.eps) * scale).to(x.dtype)


def build_norm(architecture: Architecture, dim: int) -> nn.RMSNorm:
    """A norm of the model's kind over `dim` numbers."""
    kind = ZeroCenteredRMSNorm if architecture.zero_centered_norms else RMSNorm
    return kind(dim, eps=architecture.norm_eps)
