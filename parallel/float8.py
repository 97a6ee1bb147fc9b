"""Linear layers computed in float8, by torchao."""

import dataclasses
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from farsight.configs.schema import JobConfig
from farsight.errors import ConfigError
from farsight.extras import install_command

logger = logging.getLogger("farsight")


def check_float8(config: JobConfig) -> None:
    """Refuses float8 layers where they are not available.

    Raises:
        ConfigError: the package or the GPU is missing.
    """
    if not config.model.converters:
        return
    if find_spec("torchao") is None:
        raise ConfigError(
            f"model.converters = {config.model.converters} needs a package that is not installed: "
            f"{install_command('float8')}."
        )
    emulated = config.quantize.linear.float8.emulate and not config.compile.enable
    capable = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    if not capable and not emulated:
        raise ConfigError(
            f"model.converters = {config.model.converters} needs a GPU with float8 products (compute capability 8.9: L40, H100 "
            "and later). On other machines quantize.linear.float8.emulate = true with compile.enable = false shows its effect on losses, slowly."
        )


def convert_to_float8(model: nn.Module, config: JobConfig, sharded: bool) -> None:
    """Replaces the linear layers of a model on the meta device, in place, if `model.converters` asks for it.

    Args:
        sharded: whether FSDP gathers the weights, and so can do so in float8.
    """
    if not config.model.converters:
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    options = config.quantize.linear.float8
    recipe = options.recipe_name or "tensorwise"
    settings = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe),
        enable_fsdp_float8_all_gather=sharded and options.enable_fsdp_float8_all_gather,
        emulate=options.emulate,
    )
    if recipe == "rowwise":
        # Inductor otherwise fuses away roundings that the scales count on (pytorch issue 150859).
        torch._inductor.config.emulate_precision_casts = True
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for part in options.filter_fqns:
        if not any(part in name for name in linear):
            raise ConfigError(
                f"quantize.linear.float8.filter_fqns: no linear layer has {part!r} in its name, as layers.0.feed_forward.w1 has w1."
            )

    def converted(module: nn.Module, name: str) -> bool:
        if name not in linear or any(part in name for part in options.filter_fqns):
            return False
        return linear[name].in_features % 16 == linear[name].out_features % 16 == 0  # what the products need

    layers = sum(converted(module, name) for name, module in model.named_modules())
    convert_to_float8_training(model, config=settings, module_filter_fn=converted)
    logger.info(f"float8: {layers} linear layers, scaled {recipe}")


def plain(weight: Tensor) -> Tensor:
    """A weight in the same memory without the class by which torchao has FSDP gather it in float8; any other tensor as it is.

    A tensor of that class can't be read from a checkpoint where torchao is not imported.
    """
    local: Any = weight.to_local() if isinstance(weight, DTensor) else weight
    if type(local).__name__ != "WeightWithDynamicFloat8CastTensor":
        return weight
    if not isinstance(weight, DTensor):
        return local._tensor
    shape, stride = weight.shape, weight.stride()
    return DTensor.from_local(local._tensor, weight.device_mesh, weight.placements, shape=shape, stride=stride)


def after_step(model_parts: Sequence[nn.Module], config: JobConfig, sharded: bool) -> None:
    """Computes all weights' scales at once, where FSDP's float8 all-gather is to use them."""
    options = config.quantize.linear.float8
    if not (config.model.converters and sharded and options.precompute_float8_dynamic_scale_for_fsdp):
        return
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    for part in model_parts:
        precompute_float8_dynamic_scale_for_fsdp(part)
