"""A run's parameters: their shapes on a tensor-parallel rank, which of them train, and how they are stored.

In pre-training all have `training.dtype`. In fine-tuning bitsandbytes packs the blocks' frozen linear layers, other frozen
weights are in `base_model.dtype`, and trained ones in `training.dtype`, which is fp32.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch

from farsight.configs.finetuning import Base, FinetuneConfig, Projection
from farsight.configs.schema import JobConfig
from farsight.errors import ConfigError
from farsight.model.adapt.layers import AdaptedLayers, adapted
from farsight.model.adapt.lora import MODULES, by_linear
from farsight.model.adapt.quantized import BLOCK
from farsight.model.build import ModelConfig, build_model, trained_layers

SCALES_BLOCK = 256
"""Quantised scales, or numbers of an 8-bit moment, that share one scale."""
CODE_4BIT, CODE_8BIT = 16 * 4, 256 * 4
"""Bytes of the tables of values that 4 and 8 bits stand for."""


@dataclass(frozen=True)
class Weight:
    """A parameter, as a tensor-parallel rank holds it."""

    name: str
    layer: int | None
    shape: tuple[int, ...]
    trained: bool
    """Whether it gets gradients and optimizer state."""
    itemsize: float
    """Bytes per number as it is stored, without scales; 0.5 in 4 bits."""
    scales: int = 0
    """Bytes of a quantised weight's scales."""

    @property
    def linear(self) -> bool:
        """Whether it is a matrix of a block; the others are embedding, head and vectors."""
        return self.layer is not None and len(self.shape) == 2

    @property
    def group(self) -> str:
        """What it belongs to: "lora", "garfa", or "layers" for the model's own weights."""
        return "lora" if ".lora_" in self.name else "garfa" if self.name.endswith(".garfa") else "layers"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def packed(self) -> int:
        """Bytes without scales."""
        return math.ceil(self.itemsize * self.numel)

    def shard(self, ranks: int) -> int:
        """Numbers on the first of `ranks` FSDP ranks: rows are split into equal parts, of which the last may be shorter."""
        return -(-self.shape[0] // ranks) * math.prod(self.shape[1:])

    def held(self, ranks: int) -> int:
        """Bytes on the first of `ranks` FSDP ranks. A quantised weight is split by bytes, and its scales are not split, as they
        are not parameters."""
        if self.scales:
            return -(-self.packed // ranks) + self.scales
        return math.ceil(self.itemsize * self.shard(ranks))


def itemsize(dtype: str) -> int:
    """Bytes per number of a type, by torch's name."""
    return getattr(torch, dtype).itemsize


def layers_that_train(config: JobConfig) -> AdaptedLayers:
    """The layers that train, by method; pre-training trains the model's own weights, in all layers unless it names some.

    Raises:
        ConfigError: layers that the model does not have, or nothing to train.
    """
    if not isinstance(config, FinetuneConfig):
        return AdaptedLayers((), (), trained_layers(config) or tuple(range(config.architecture.n_layers)))
    layers = adapted(config)
    if not (layers.lora or layers.garfa or layers.whole):
        raise ConfigError("Nothing would train: set lora.enable or garfa.enable, or name layers in training.layers.")
    return layers


def weights(config: JobConfig, tp: int = 1) -> Iterator[Weight]:
    """Yields the model's parameters as a tensor-parallel rank holds them, and adapters.

    Raises:
        ConfigError: as `layers_that_train`, or rank patterns that match none of LoRA's layers.
    """
    layers, kept = layers_that_train(config), itemsize(config.training.dtype)
    finetune = config if isinstance(config, FinetuneConfig) else None
    everything = not (finetune or config.training.layers)
    for name, layer, shape in _shapes(ModelConfig.from_job(config), tp):
        weight = Weight(name, layer, shape, everything or layer in layers.whole, kept)
        yield _stored(weight, finetune.base_model) if finetune and not weight.trained else weight
    if finetune:
        yield from _adapters(finetune, layers, kept)


_QK_NORMS = ("q_norm.weight", "k_norm.weight")


@cache
def _shapes(model: ModelConfig, tp: int) -> tuple[tuple[str, int | None, tuple[int, ...]], ...]:
    """Names, layers and shapes of the parameters on a tensor-parallel rank, read off the model on the meta device."""
    projection_norms = model.architecture.qk_norm_span == "projection"
    with torch.device("meta"):
        parameters = [(name, name.split("."), tuple(p.shape)) for name, p in build_model(model).named_parameters()]
    return tuple(
        (name, int(path[1]) if path[0] == "layers" else None, _divided(name, shape, tp, projection_norms))
        for name, path, shape in parameters
    )


def _divided(name: str, shape: tuple[int, ...], tp: int, projection_norms: bool) -> tuple[int, ...]:
    """A parameter's shape on a tensor-parallel rank: norms of tokens or heads and biases of `wo` and `w2` are whole, their weights
    split by inputs, all others by rows."""
    if name.endswith(("norm.weight", "wo.bias", "w2.bias")) and not (projection_norms and name.endswith(_QK_NORMS)):
        return shape
    if name.endswith(("wo.weight", "w2.weight")):
        return shape[0], shape[1] // tp
    return shape[0] // tp, *shape[1:]


def _stored(weight: Weight, base: Base) -> Weight:
    """A frozen weight of a base as it is stored. Quantised ones have a scale per block or, in 8 bits, per row; scales that are
    quantised too take 8 bits, with scales of their own and an offset."""
    if not weight.linear or base.quantization == "none":
        return replace(weight, itemsize=itemsize(base.dtype))
    if base.quantization == "int8":
        return replace(weight, itemsize=1, scales=4 * weight.shape[0])
    blocks = -(-weight.numel // BLOCK)
    scales = blocks + 4 * -(-blocks // SCALES_BLOCK) + 4 if base.double_quantization else 4 * blocks
    return replace(weight, itemsize=0.5, scales=scales + CODE_4BIT)


# Adapters


def module_shapes(config: JobConfig) -> dict[Projection, tuple[int, ...]]:
    """(outputs, inputs) of a block's linear layers."""
    shapes = {
        name.split(".")[-2]: shape
        for name, layer, shape in _shapes(ModelConfig.from_job(config), 1)
        if layer == 0 and name.endswith(".weight")
    }
    return {module: shapes[ours] for module, ours in MODULES.items()}


def lora_ranks(config: FinetuneConfig, layers: AdaptedLayers) -> dict[int, dict[Projection, int]]:
    """The ranks of LoRA's matrices, by layer and module."""
    lora, own = config.lora, by_linear(config.lora.rank_pattern, config.lora, layers.lora)
    return {layer: {module: own.get((layer, module), lora.rank) for module in lora.modules} for layer in layers.lora}


def _adapters(config: FinetuneConfig, layers: AdaptedLayers, kept: int) -> Iterator[Weight]:
    shapes = module_shapes(config)
    for layer, ranks in lora_ranks(config, layers).items():
        for module, rank in ranks.items():
            (outputs, inputs), name = shapes[module], f"layers.{layer}.{module}"
            yield Weight(f"{name}.lora_A", layer, (rank, inputs), True, kept)
            yield Weight(f"{name}.lora_B", layer, (outputs, rank), True, kept)
            if config.lora.dora:
                yield Weight(f"{name}.lora_magnitude_vector", layer, (outputs,), True, kept)
    for layer in layers.garfa:
        yield Weight(f"layers.{layer}.attention.garfa", layer, (config.architecture.n_kv_heads,), True, kept)
