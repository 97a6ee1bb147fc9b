"""Parallelises a model, in the required order: tensor parallelism, recomputation and compilation, data parallelism.

Tensor parallelism shards the layers themselves. Recomputation then wraps each block, so that compilation sees it. Context
parallelism swaps the two, because its exchange breaks a block's graph and the compiler leaves a recomputed block that has a
break uncompiled. FSDP or DDP comes last, around the result.
"""

from typing import Literal, Protocol, cast

import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from farsight.configs.finetuning import FinetuneConfig
from farsight.configs.schema import JobConfig
from farsight.errors import ConfigError
from farsight.model.attention import Attention
from farsight.model.build import freeze_all_but, trained_layers
from farsight.model.llama import Llama
from farsight.parallel.halo import Context
from farsight.parallel.meshes import ParallelDims
from farsight.parallel.recompute import recompute
from farsight.parallel.tensor import apply_tensor_parallel
from farsight.parallel.zero import partition


class Degrees(Protocol):
    """Degrees of parallelism: `ParallelDims`, or a layout that is planned."""

    @property
    def world_size(self) -> int: ...
    @property
    def dp_replicate(self) -> int: ...


def wrapper(config: JobConfig, dims: Degrees) -> Literal["fsdp", "ddp", "zero", ""]:
    """The wrapper that shares a model among data-parallel ranks and casts its weights; "" if there is none.

    Pre-training in mixed precision takes FSDP everywhere, so that one process, copies and shards compute in the same types.
    Fine-tuning, whose weights have their final types, takes DDP for copies: 4-bit weights can't always be sharded.
    """
    if config.engine == "deepspeed":
        return "zero"
    if isinstance(config, FinetuneConfig) and dims.world_size == dims.dp_replicate:
        return "ddp" if dims.world_size > 1 else ""
    alone = dims.world_size == 1 and config.training.mixed_precision_param == config.training.dtype
    return "" if alone else "fsdp"


def parallelize(model: Llama, dims: ParallelDims, config: JobConfig) -> nn.Module:
    """Applies tensor and context parallelism, recomputation, per-block `torch.compile`, and FSDP, HSDP, DDP or ZeRO.

    In place, on the whole model or on a pipeline stage's part of it, before it has weights.
    """
    compiled = config.compile.enable
    if (mesh := dims.mesh("tp")) is not None:
        apply_tensor_parallel(model, mesh, config)
        freeze_all_but(model, trained_layers(config))  # again: tensor parallelism made new parameters
    context = Context.of(dims, config)
    for module in model.modules():
        if isinstance(module, Attention):
            module.context = context
    if context is None:
        recompute(model, config)
    if compiled:
        whole = context is None
        for name, block in model.layers.named_children():
            model.layers.register_module(
                name, cast(nn.Module, torch.compile(block, backend=config.compile.backend, fullgraph=whole))
            )
    if context is not None:
        recompute(model, config)
    match wrapper(config, dims):
        case "zero" if config.deepspeed.zero_stage == 3:
            partition(model, config)
        case "fsdp":
            apply_fsdp(model, dims.data_mesh(), config)
        case "ddp":
            if compiled:
                torch._dynamo.config.optimize_ddp = "ddp_optimizer"  # type: ignore[assignment]  # annotated bool, documented to take this string
            replicate(model, device_mesh=dims.need("dp_replicate"), bucket_cap_mb=100)
    return model


def apply_fsdp(model: Llama, mesh: DeviceMesh, config: JobConfig) -> None:
    """Shards the parameters block by block (FSDP2), or shards and replicates them on a two-dimensional mesh (HSDP).

    On a mesh of one it only casts them for each block.

    Raises:
        ConfigError: a quantised base, which PyTorch 2.11 can't shard.
    """
    finetuning = isinstance(config, FinetuneConfig)
    options: dict = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            # Fine-tuning's weights already have their final dtypes: fp32 adapters, the base as stored.
            param_dtype=None if finetuning else getattr(torch, config.training.mixed_precision_param),
            reduce_dtype=torch.float32,
            # Activations are in param_dtype from the embedding on; casting inputs would only round the RoPE tables.
            cast_forward_inputs=False,
        ),
    }
    if config.training.enable_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
    policy = config.parallelism.fsdp_reshard_after_forward
    # A pipeline stage needs its parameters again for the next micro-batch: it keeps them gathered for the whole step. On a mesh of
    # one they are only cast, and would be cast again.
    reshard = policy == "always" or (
        policy == "default" and config.parallelism.pipeline_parallel_degree == 1 and mesh.shape[-1] > 1
    )

    tied = model.output is not None and model.output.weight is None
    if model.tok_embeddings is not None and not tied:
        # A tied embedding is used first and last: it stays in the root's group, gathered throughout.
        fully_shard(model.tok_embeddings, **options, reshard_after_forward=reshard)
    garfas = [cast(Attention, block.attention).garfa for block in model.layers.values()]
    trained: list[nn.Module] = [garfa for garfa in garfas if garfa is not None and garfa.trained]
    if trained:
        # A group of their own, in fp32: rounded to bf16, w = −ln 10 is not a factor of 1. They are called outside the blocks.
        own = options | {"mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}
        fully_shard(trained, **own, reshard_after_forward=reshard)
    for block in model.layers.values():
        try:
            fully_shard(block, **options, reshard_after_forward=reshard)
        except RuntimeError as error:
            if "floating point" not in str(error):
                raise
            raise ConfigError(
                f"PyTorch {torch.__version__} can't shard a quantised base: use PyTorch 2.13, or copies of the model "
                '(parallelism.data_parallel_replicate_degree), or base_model.quantization = "none".'
            ) from error
    if model.norm is not None and model.output is not None and not tied:
        # The backward pass needs the last group again at once.
        fully_shard([model.norm, model.output], **options, reshard_after_forward=policy == "always")
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the tokens of the whole batch, so gradients are summed. gloo has no
            # averaging reduction. The order of these two calls matters.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def release_gathered(model: nn.Module) -> None:
    """Frees the parameters that FSDP keeps gathered after a forward pass without a backward pass.

    Until then the module's parameters are not those of the optimizer, and saving the optimizer fails.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
