"""Adam and AdamW: PyTorch's, torchao's with moments in 8 bits, and bitsandbytes' with moments that move to host memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from farsight.configs.optimizers import BLOCK, Adam, AdamW, AdamW8bit, PagedAdamW, PagedAdamW8bit
from farsight.errors import ConfigError
from farsight.extras import install_command
from farsight.training.optimizers.container import Group, param_groups


@dataclass(frozen=True)
class TorchAdam:
    """`torch.optim.AdamW` and `Adam`."""

    settings: AdamW | Adam

    @property
    def can_skip(self) -> bool:
        return self.settings.implementation == "fused"

    def build(self, groups: Sequence[Group]) -> list[Optimizer]:
        return [self.over(param_groups(groups))]

    def over(self, groups: list[dict[str, Any]]) -> Optimizer:
        """The optimizer of parameter groups."""
        o, cls = self.settings, torch.optim.Adam if self.settings.kind == "adam" else torch.optim.AdamW
        how = {"fused": o.implementation == "fused", "foreach": o.implementation == "foreach"}
        return cls(groups, betas=(o.beta1, o.beta2), eps=o.eps, **how)

    def new_state(self, optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
        fused = optimizer.defaults["fused"]
        step = torch.zeros((), dtype=torch.float32, device=parameter.device if fused else None)
        return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}


@dataclass(frozen=True)
class TorchaoAdamW8bit:
    """`torchao.optim.AdamW8bit`, under FSDP2 and tensor parallelism too: each rank quantises its own part."""

    settings: AdamW8bit
    can_skip: ClassVar[bool] = False

    def build(self, groups: Sequence[Group]) -> list[Optimizer]:
        try:
            from torchao.optim import AdamW8bit as Torchao
        except ImportError as error:
            raise ConfigError(
                f'optimizer.kind = "adamw8bit" needs the package torchao: {install_command("float8")}'
            ) from error
        o = self.settings
        return [Torchao(param_groups(groups), betas=(o.beta1, o.beta2), eps=o.eps, block_size=BLOCK)]

    def new_state(self, optimizer: Any, parameter: nn.Parameter) -> dict[str, Any]:
        first, second = (optimizer._new_buffer(parameter, signed) for signed in (True, False))
        return {"step": torch.tensor(0.0), "exp_avg": first, "exp_avg_sq": second}


@dataclass(frozen=True)
class Bitsandbytes:
    """bitsandbytes' paged optimizers."""

    settings: PagedAdamW | PagedAdamW8bit
    can_skip: ClassVar[bool] = False

    def build(self, groups: Sequence[Group]) -> list[Optimizer]:
        import bitsandbytes as bnb

        o = self.settings
        optimizer = getattr(bnb.optim, o.title)(param_groups(groups), betas=(o.beta1, o.beta2), eps=o.eps)
        # What a first step does, before state is loaded.
        optimizer.check_overrides()
        optimizer.initialized = True
        return [optimizer]

    def new_state(self, optimizer: Any, parameter: nn.Parameter) -> dict[str, Any]:
        for number, group in enumerate(optimizer.param_groups):
            for place, other in enumerate(group["params"]):
                if other is parameter:
                    optimizer.init_state(group, parameter, number, place)
        return optimizer.state[parameter]
