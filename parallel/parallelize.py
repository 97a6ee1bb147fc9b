"""Parallelises a model, in the required order: tensor parallelism, recomputation, compilation, data parallelism.

Tensor parallelism shards the layers themselves. Recomputation then wraps each block, so that compilation sees it; FSDP and
DDP come last, around the result.
"""

from importlib.util import find_spec
from typing import cast

import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac

from farsight.configs.finetuning import FinetuneConfig
from farsight.configs.schema import JobConfig
from farsight.model.attention import Attention
from farsight.model.build import freeze_all_but, trained_layers
from farsight.model.llama import Llama
from farsight.parallel.halo import Context
from farsight.parallel.tensor import apply_tensor_parallel
from farsight.parallel.zero import partition


def parallelize(model: Llama, dims: ParallelDims, config: JobConfig) -> nn.Module:
    """Applies tensor and context parallelism, recomputation, per-block `torch.compile`, and FSDP, HSDP, DDP or ZeRO.

    In place, on the whole model or on a pipeline stage's part of it, before it has weights.
    """
    compiled = config.compile.enable and "model" in config.compile.components
    if dims.tp_enabled:
        apply_tensor_parallel(model, dims.get_mesh("tp"), config)
        freeze_all_but(model, trained_layers(config))  # again: tensor parallelism made new parameters
    context = Context.of(dims, config)
    for module in model.modules():
        if isinstance(module, Attention):
            module.context = context
    if config.activation_checkpoint.mode != "none":
        apply_ac(
            model,
            config.activation_checkpoint,
            model_compile_enabled=compiled,
            op_sac_save_list=saved_ops(config),
            base_folder=config.job.dump_folder,
        )
    if compiled:
        whole = context is None  # the exchange is not compiled, so it breaks a block's graph in two
        for name, block in model.layers.named_children():
            model.layers.register_module(
                name, cast(nn.Module, torch.compile(block, backend=config.compile.backend, fullgraph=whole))
            )
    if config.engine == "deepspeed":
        if config.deepspeed.zero_stage == 3:
            partition(model, config)
    elif dims.fsdp_enabled or dims.tp_enabled or dims.pp_enabled:
        apply_fsdp(model, _data_mesh(dims), config)
    elif dims.dp_replicate_enabled:
        if compiled:
            torch._dynamo.config.optimize_ddp = "ddp_optimizer"  # type: ignore[assignment]  # annotated bool, documented to take this string
        replicate(model, device_mesh=dims.get_mesh("dp_replicate"), bucket_cap_mb=100)
    return model


def _data_mesh(dims: ParallelDims) -> DeviceMesh:
    """The ranks that hold shards, and replicas, of the same parameters.

    With tensor or pipeline parallelism FSDP is applied even to a single shard: it provides mixed precision and accumulates
    gradients there. torchtitan's `get_mesh` gives no mesh of one rank, hence the private attribute.
    """
    dims.world_mesh  # noqa: B018  makes the meshes
    dense = dims._global_meshes["dense"]
    return dense["dp_replicate", "fsdp"] if dims.dp_replicate_enabled else dense["fsdp"]


def saved_ops(config: JobConfig) -> set:
    """Operators whose results selective checkpointing saves, because they are the most expensive to recompute."""
    attention: set = {torch.ops.farsight.banded_attention.default}
    match config.attention.backend:
        case "triton" | "auto" if torch.cuda.is_available() and find_spec("triton"):
            from farsight.kernels.scoped_attention.triton import attention as triton_attention  # noqa: F401  registers its operator

            attention.add(torch.ops.farsight.triton_attention.default)
        case (
            "flex"
        ):  # visible only if blocks are compiled; otherwise it is inside a compiled function and is recomputed
            attention.add(torch._higher_order_ops.flex_attention)
        case "flash":
            from farsight.kernels.scoped_attention import flash

            flash.package()  # registers its operators
            ops = torch.ops.flash_attn
            attention |= {ops._flash_attn_forward.default, ops._flash_attn_varlen_forward.default}
    return {
        *attention,
        torch.ops.aten.mm.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        # The absolute maximum scales a float8 cast.
        torch.ops.aten.max.default,
        torch._higher_order_ops.inductor_compiled_code,
    }


def apply_fsdp(model: Llama, mesh: DeviceMesh, config: JobConfig) -> None:
    """Shards the parameters block by block (FSDP2), or shards and replicates them on a two-dimensional mesh (HSDP)."""
    finetuning = isinstance(config, FinetuneConfig)
    options: dict = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            # Fine-tuning's weights already have their final dtypes: fp32 adapters, the base as stored.
            param_dtype=None if finetuning else TORCH_DTYPE_MAP[config.training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[config.training.mixed_precision_reduce],
            # Activations are in param_dtype from the embedding on; casting inputs would only round the RoPE tables.
            cast_forward_inputs=False,
        ),
    }
    if config.training.enable_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
    policy = config.parallelism.fsdp_reshard_after_forward
    # A pipeline stage needs its parameters again for the next micro-batch: it keeps them gathered for the whole step.
    reshard = policy == "always" or (policy == "default" and config.parallelism.pipeline_parallel_degree == 1)

    tied = model.output is not None and model.output.weight is None
    if model.tok_embeddings is not None and not tied:
        # A tied embedding is used first and last: it stays in the root's group, gathered throughout.
        fully_shard(model.tok_embeddings, **options, reshard_after_forward=reshard)
    for block in model.layers.values():
        garfa = cast(Attention, block.attention).garfa
        if garfa is not None and garfa.trained:
            # A separate group, in fp32: rounded to bf16, w = −ln 10 is not a factor of 1. It is called before its block.
            own = options | {"mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}
            fully_shard(garfa, **own, reshard_after_forward=reshard)
        fully_shard(block, **options, reshard_after_forward=reshard)
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
