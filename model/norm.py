"""RMSNorm in its input's dtype."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """PyTorch's RMSNorm, but its output keeps the input's dtype under autocast, where PyTorch returns fp32 on GPUs.

    Sums are fp32 either way.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] in x's dtype."""
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
