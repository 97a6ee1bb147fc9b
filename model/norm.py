"""RMSNorm in its input's type."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """PyTorch's, whose result has its input's type under autocast too: there PyTorch raises it to fp32 on GPUs.

    It sums in fp32 either way.
    """

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
