"""Formulas for the memory of fine-tuning at the peak of a step, from the shapes of the base and the trained parameters.

Bytes throughout. The base's linear layers are packed by bitsandbytes; norms, embedding and head are in `base_model.dtype`.
Trained parameters, their gradients and moments are fp32. With a bf16 base, products run under autocast: trained parameters
have a bf16 copy, and activations are bf16. `launch/plan/memory.py` has the formulas shared with pre-training.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchtitan.config import TORCH_DTYPE_MAP

from farsight.configs.finetuning import FinetuneConfig, Projection
from farsight.configs.schema import Architecture, NoRotary
from farsight.errors import ConfigError
from farsight.launch.plan.heads import layers_of
from farsight.launch.plan.layout import ParallelLayout
from farsight.launch.plan.memory import (
    ADAM_MOMENTS,
    Types,
    Weight,
    block_bytes,
    block_gradients,
    last_norm_bytes,
    local_tokens,
    loss_bytes,
    recomputes,
    rope_tables_bytes,
    weights,
)
from farsight.model.adapt.layers import adapted
from farsight.model.adapt.lora import by_linear
from farsight.model.adapt.quantized import BLOCK
from farsight.model.build import ModelConfig
from farsight.model.position.layers import LayerPosition

SCALES_BLOCK = 256
"""Quantised scales, or numbers of an 8-bit moment, that share one scale."""
CODE_4BIT, CODE_8BIT = 16 * 4, 256 * 4
"""Bytes of the tables of values that 4 and 8 bits stand for."""
MIN_8BIT, MIN_PAGED = 4096, 100_000
"""Tensors with fewer numbers than these have moments in fp32, and on the GPU, in bitsandbytes."""


@dataclass(frozen=True)
class FinetuneMemory:
    """Memory of one rank in bytes."""

    base: int
    """Frozen weights, with their scales."""
    adapters: int
    """Trained parameters: LoRA's and GARFA's, or those of `training.layers`."""
    gradients: int
    optimizer: int
    saved: int
    """Activations kept for the backward pass."""
    recomputed: int
    """Activations of one block that is recomputed in the backward pass."""
    gradients_of_activations: int
    """Those of one block."""
    logits: int
    """Those of a chunk of tokens, and the loss's gradient with respect to hidden states."""
    dequantized: int
    """One linear layer's weight, dequantised for its product."""
    casts: int
    """Copies of trained parameters in the type of the products, in blocks for which autograd keeps them."""
    gathered: int
    """FSDP's copies of two blocks."""
    other: int
    """RoPE tables, token ids and labels."""
    paged: int
    """Moments that bitsandbytes moves to host memory when the GPU is full; not in any sum."""

    @property
    def activations(self) -> int:
        return self.saved + self.recomputed + self.gradients_of_activations

    @property
    def transient(self) -> int:
        return self.dequantized + self.casts + self.gathered

    @property
    def parts(self) -> dict[str, int]:
        """The estimate by part, in the order in which a run allocates them."""
        names = ("base", "adapters", "gradients", "optimizer", "activations", "logits", "transient", "other")
        return {name: getattr(self, name) for name in names}

    @property
    def peak(self) -> int:
        """Less than the parts' sum: a block's gradients and the loss's are not computed at the same time."""
        held = self.base + self.adapters + self.gradients + self.optimizer + self.saved + self.casts + self.other
        in_block = self.recomputed + self.gradients_of_activations + self.dequantized + self.gathered
        return held + max(in_block, self.logits)


def finetune_memory(config: FinetuneConfig, ranks: int = 1, cpu: bool = False) -> FinetuneMemory:
    """The memory of one of `ranks` ranks.

    Args:
        config: with the base's `architecture` and `position`.
        cpu: count activations as PyTorch keeps them on a CPU: norms also keep their output, and dropout keeps its factors in
            the activations' type.

    Raises:
        ConfigError: layers that the base does not have, or nothing to train.
    """
    layout, types = ParallelLayout.of(config, ranks), types_of(config)
    trained = [weight for group in adapter_weights(config).values() for weight in group]
    shards = [weight.shard(layout.fsdp) for weight in trained]
    moments = [_moments(config.optimizer.name, number) for number in shards]
    base = dict(base_weights(config))
    linears = [weight for weight, size in base.items() if is_linear(weight)]
    codes = CODE_8BIT * (config.base_model.quantization in ("nf4", "fp4") and config.base_model.double_quantization)
    saved = saved_activations(config, layout, cpu)
    blocks = [_block(config, layout, number, cpu) for number in _passed(config) if recomputed(config, number)]
    model, tokens = ModelConfig.from_job(config), local_tokens(config, layout)
    rotaries = {layer.rotary for layer in layers_of(model)} - {NoRotary()}
    return FinetuneMemory(
        # A quantised weight's scales are not parameters: FSDP does not shard them.
        base=sum(_divided(config, weight, size, layout.fsdp) for weight, size in base.items()) + codes,
        adapters=4 * sum(shards),
        gradients=4 * sum(shards),
        optimizer=sum(held for held, _ in moments) + 2 * CODE_8BIT * config.optimizer.name.endswith("8bit"),
        saved=saved,
        recomputed=max(blocks, default=0),
        gradients_of_activations=block_gradients(config, layout, types),
        logits=loss_bytes(config, layout, types, head_trained=False)[0],
        dequantized=_dequantized(config, linears, types) if linears else 0,
        casts=_casts(config, trained, types),
        gathered=_gathered(config, base, trained) if layout.fsdp > 1 else 0,
        other=rope_tables_bytes(config.architecture.head_dim, tokens, len(rotaries)) + 4 * 8 * tokens,
        paged=sum(paged for _, paged in moments),
    )


def types_of(config: FinetuneConfig) -> Types:
    """Bytes per number: residual stream and products have the base's type; gradients are reduced in fp32."""
    size = TORCH_DTYPE_MAP[config.base_model.dtype].itemsize
    return Types(size, size, 4)


# Trained parameters


def module_shapes(a: Architecture) -> dict[Projection, tuple[int, int]]:
    """(outputs, inputs) of a block's linear layers."""
    heads, kv_heads = a.n_heads * a.head_dim, a.n_kv_heads * a.head_dim
    return {
        "q_proj": (heads, a.dim),
        "k_proj": (kv_heads, a.dim),
        "v_proj": (kv_heads, a.dim),
        "o_proj": (a.dim, heads),
        "gate_proj": (a.ffn_dim, a.dim),
        "up_proj": (a.ffn_dim, a.dim),
        "down_proj": (a.dim, a.ffn_dim),
    }


def adapter_parameters(config: FinetuneConfig) -> dict[str, int]:
    """Number of trained parameters by group: "lora", "garfa", and "layers" that train in full."""
    return {name: sum(weight.numel for weight in group) for name, group in adapter_weights(config).items()}


def adapter_weights(config: FinetuneConfig) -> dict[str, list[Weight]]:
    """The trained parameters by group: "lora", "garfa", and "layers" that train in full.

    Raises:
        ConfigError: layers that the base does not have, patterns that match none of LoRA's, or nothing to train.
    """
    whole = adapted(config).whole
    groups = {
        "lora": [weight for number in adapted(config).lora for weight in _lora_weights(config, number)],
        "garfa": [
            Weight(f"layers.{number}.attention.garfa", (config.architecture.n_kv_heads,))
            for number in adapted(config).garfa
        ],
        "layers": [weight for weight in weights(ModelConfig.from_job(config), 1) if weight.layer in whole],
    }
    if not any(groups.values()):
        raise ConfigError("Nothing would train: set lora.enable or garfa.enable, or name layers in training.layers.")
    return groups


def _ranks(config: FinetuneConfig, layer: int) -> dict[Projection, int]:
    """The ranks of a layer's LoRA matrices."""
    ranks = by_linear(config.lora.rank_pattern, config.lora, adapted(config).lora)
    return {module: ranks.get((layer, module), config.lora.rank) for module in config.lora.modules}


def _lora_weights(config: FinetuneConfig, layer: int) -> Iterator[Weight]:
    shapes = module_shapes(config.architecture)
    for module, rank in _ranks(config, layer).items():
        outputs, inputs = shapes[module]
        yield Weight(f"layers.{layer}.{module}.lora_A", (rank, inputs))
        yield Weight(f"layers.{layer}.{module}.lora_B", (outputs, rank))
        if config.lora.dora:
            yield Weight(f"layers.{layer}.{module}.lora_magnitude_vector", (outputs,))


def _moments(optimizer: str, numbers: int) -> tuple[int, int]:
    """Bytes of a tensor's moments: those that stay on the GPU, and those that can be paged out."""
    if optimizer in ("AdamW", "Adam"):
        return ADAM_MOMENTS * 4 * numbers + 4, 0  # plus the tensor's step count
    small = not optimizer.endswith("8bit") or numbers < MIN_8BIT
    size = ADAM_MOMENTS * (4 if small else 1) * numbers
    scales = 0 if small else ADAM_MOMENTS * 4 * -(-numbers // SCALES_BLOCK)
    return (scales, size) if optimizer.startswith("Paged") and numbers >= MIN_PAGED else (size + scales, 0)


# The base


def base_weights(config: FinetuneConfig) -> Iterator[tuple[Weight, int]]:
    """Yields each frozen weight and its size in bytes."""
    whole = adapted(config).whole
    plain = TORCH_DTYPE_MAP[config.base_model.dtype].itemsize
    for weight in weights(ModelConfig.from_job(config), 1):
        if weight.layer is None or weight.layer not in whole:
            yield (
                weight,
                _packed(config, weight) + _scales(config, weight) if is_linear(weight) else plain * weight.numel,
            )


def is_linear(weight: Weight) -> bool:
    """Whether the weight belongs to one of a block's linear layers, which are quantised."""
    return weight.layer is not None and len(weight.shape) == 2


def _packed(config: FinetuneConfig, weight: Weight) -> int:
    match config.base_model.quantization:
        case "nf4" | "fp4":
            return -(-weight.numel // 2)
        case "int8":
            return weight.numel
    return TORCH_DTYPE_MAP[config.base_model.dtype].itemsize * weight.numel


def _scales(config: FinetuneConfig, weight: Weight) -> int:
    """Bytes of a quantised weight's scales, one per block; if quantised too, in 8 bits with scales of their own and an offset."""
    match config.base_model.quantization:
        case "nf4" | "fp4":
            blocks = -(-weight.numel // BLOCK)
            if not config.base_model.double_quantization:
                return 4 * blocks + CODE_4BIT
            return blocks + 4 * -(-blocks // SCALES_BLOCK) + 4 + CODE_4BIT
        case "int8":
            return 4 * weight.shape[0]
    return 0


def _divided(config: FinetuneConfig, weight: Weight, size: int, ranks: int) -> int:
    scales = _scales(config, weight) if is_linear(weight) else 0
    return -(-(size - scales) // ranks) + scales


def _dequantized(config: FinetuneConfig, linears: Sequence[Weight], types: Types) -> int:
    """Bytes of the largest dequantised weight; for its row norms, DoRA also computes LoRA's product with an identity matrix, and
    its sum with the weight."""
    largest = max(linears, key=lambda weight: weight.numel)
    size = types.product * largest.numel if config.base_model.quantization != "none" else 0
    if not (config.lora.enable and config.lora.dora):
        return size
    inputs = max(
        inputs for module, (_, inputs) in module_shapes(config.architecture).items() if module in config.lora.modules
    )
    identity = inputs**2 * (4 if types.product == 4 else 4 + types.product)
    return size + max(identity + types.product * largest.numel, 3 * types.product * largest.numel)


def _gathered(config: FinetuneConfig, base: dict[Weight, int], trained: Sequence[Weight]) -> int:
    """FSDP's unsharded copies of a block's packed weights and adapters and the next one's, and one's gradients to reduce."""
    sizes: dict[int, int] = {}
    for weight in base:
        if weight.layer is not None:
            packed = _packed(config, weight) if is_linear(weight) else 4 * weight.numel
            sizes[weight.layer] = sizes.get(weight.layer, 0) + packed
    adapters: dict[int, int] = {}
    for weight in trained:
        if weight.layer is not None:
            adapters[weight.layer] = adapters.get(weight.layer, 0) + 4 * weight.numel
    largest = max(adapters.values())
    return 2 * (max(sizes.values(), default=0) + largest) + largest


# Activations


def saved_activations(config: FinetuneConfig, layout: ParallelLayout, cpu: bool = False) -> int:
    """Bytes kept for the backward pass, without the loss's gradient."""
    a, types = config.architecture, types_of(config)
    stream = local_tokens(config, layout) * a.dim * types.stream
    if config.base_model.quantization == "int8":
        # bitsandbytes' layers keep their inputs where recomputation does not free them.
        stream += local_tokens(config, layout) * types.product * (2 * a.dim + a.n_heads * a.head_dim + a.ffn_dim)
    kept = [stream if recomputed(config, n) else _block(config, layout, n, cpu) for n in _passed(config)]
    return sum(kept) + last_norm_bytes(config, layout, types, not cpu or types.stream == 4)


def _passed(config: FinetuneConfig) -> range:
    """The layers that gradients pass through."""
    return range(adapted(config).lowest, config.architecture.n_layers)


def _casts(config: FinetuneConfig, trained: Sequence[Weight], types: Types) -> int:
    """Bytes of cast weights that products keep for their input's gradient: in all blocks, but in only one of the recomputed ones."""
    if types.product == 4:
        return 0
    of_block: dict[int, int] = {}
    for weight in trained:
        of_block[weight.layer or 0] = of_block.get(weight.layer or 0, 0) + types.product * weight.numel
    again = {layer: size for layer, size in of_block.items() if recomputed(config, layer)}
    return sum(of_block.values()) - sum(again.values()) + max(again.values(), default=0)


def recomputed(config: FinetuneConfig, layer: int) -> bool:
    """Whether the whole block is recomputed. Operator-wise and memory-budget recomputation count as none."""
    ac = config.activation_checkpoint
    if ac.mode == "selective" and ac.selective_ac_option != "op":
        return recomputes(ac.selective_ac_option, layer)
    return ac.mode == "full"


def _block(config: FinetuneConfig, layout: ParallelLayout, layer: int, cpu: bool) -> int:
    """Bytes that autograd keeps for one block."""
    a, types, tokens = config.architecture, types_of(config), local_tokens(config, layout)
    position = layers_of(ModelConfig.from_job(config))[layer]
    # On a CPU a frozen norm keeps its input in fp32, which is twice the bf16 one.
    fused = not cpu or (types.stream == 4 and layer not in adapted(config).whole)
    kept = block_bytes(config, layout, types, position, _read(config, layer, types, cpu), fused)
    if (
        config.lora.dora
        and config.lora.dropout
        and config.base_model.quantization != "none"
        and layer in adapted(config).lora
    ):
        # DoRA also multiplies dropout's output by the weight, which autograd keeps dequantised.
        kept += types.product * sum(math.prod(module_shapes(a)[module]) for module in config.lora.modules)
    if layer in adapted(config).garfa:
        kept += tokens * _garfa_numbers(config, position) * types.product
    if layer == adapted(config).lowest and layer not in adapted(config).whole:
        # Its input needs no gradient: the first norm keeps nothing, and the projections' dropouts keep no masks.
        norm = (1 if fused else 2) * a.dim * types.stream + 4
        norm += types.product * a.dim * (config.base_model.quantization == "int8")
        masked = sum(module in config.lora.modules for module in ("q_proj", "k_proj", "v_proj"))
        kept -= tokens * (norm + masked * (layer in adapted(config).lora) * a.dim * _mask(config, types, cpu))
    return kept


def _read(config: FinetuneConfig, layer: int, types: Types, cpu: bool) -> int:
    """Bytes per token kept for linear layers' inputs.

    Frozen weights keep none, except 8-bit ones in bitsandbytes. Adapters share their inputs with the projections that read
    the same, unless dropout gives each a copy.
    """
    a, shapes = config.architecture, module_shapes(config.architecture)
    shared: dict[Projection, str] = {"q_proj": "attention", "k_proj": "attention", "v_proj": "attention"}
    shared |= {"gate_proj": "ffn", "up_proj": "ffn", "down_proj": "hidden"}  # o_proj reads what attention keeps
    sizes = {"attention": a.dim, "ffn": a.dim, "hidden": a.ffn_dim}
    if layer in adapted(config).whole:
        return types.product * sum(sizes.values())
    read = {*sizes} if config.base_model.quantization == "int8" else set()
    own = 0
    if layer in adapted(config).lora:
        for module, rank in _ranks(config, layer).items():
            outputs, inputs = shapes[module]
            own += types.product * rank
            if config.lora.dropout:
                own += inputs * (types.product + _mask(config, types, cpu))
            elif module in shared:
                read.add(shared[module])
            if config.lora.dora:
                own += 2 * outputs * types.product
    return own + types.product * sum(sizes[name] for name in read)


def _mask(config: FinetuneConfig, types: Types, cpu: bool) -> int:
    """Bytes that dropout keeps per number: its mask, or on CPUs its factor."""
    if not config.lora.dropout:
        return 0
    return types.product if cpu else 1


def _garfa_numbers(config: FinetuneConfig, position: LayerPosition) -> int:
    """Numbers that GARFA keeps per token: keys before their rotation, and queries if they are rotated too."""
    a = config.architecture
    return a.head_dim * (a.n_kv_heads + a.n_heads * config.garfa.queries)
