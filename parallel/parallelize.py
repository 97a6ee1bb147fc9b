"""What is wrapped around the model, in the order it has to be: recomputation, compilation, data parallelism.

Recomputation wraps a block first, so that compilation sees it; FSDP and DDP come last, around what is then run.
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

from configs.schema import JobConfig
from model.attention import Attention
from model.llama import Llama
from parallel.halo import Context
from parallel.zero import partition


def parallelize(model: Llama, dims: ParallelDims, config: JobConfig) -> nn.Module:
    """Applies context parallelism, activation checkpointing, per-block `torch.compile`, and FSDP, HSDP, DDP or ZeRO, in place."""
    compiled = config.compile.enable and "model" in config.compile.components
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
        whole = context is None  # the exchange is not compiled: blocks are, up to it and after it
        for name, block in model.layers.named_children():
            model.layers.register_module(
                name, cast(nn.Module, torch.compile(block, backend=config.compile.backend, fullgraph=whole))
            )
    if config.engine == "deepspeed":
        if config.deepspeed.zero_stage == 3:
            partition(model, config)
    elif dims.fsdp_enabled:
        names = ["dp_replicate", "fsdp"] if dims.dp_replicate_enabled else ["fsdp"]
        apply_fsdp(model, dims.get_mesh(names), config)
    elif dims.dp_replicate_enabled:
        if compiled:
            torch._dynamo.config.optimize_ddp = "ddp_optimizer"  # type: ignore[assignment]  # annotated bool, documented to take this string
        replicate(model, device_mesh=dims.get_mesh("dp_replicate"), bucket_cap_mb=100)
    return model


def saved_ops(config: JobConfig) -> set:
    """Operators whose results selective checkpointing keeps, because they cost the most to run again."""
    attention: set = {torch.ops.farsight.banded_attention.default}
    match config.attention.backend:
        case "triton" | "auto" if torch.cuda.is_available() and find_spec("triton"):
            from kernels.scoped_attention import triton_attention  # noqa: F401  makes its operator known

            attention.add(torch.ops.farsight.triton_attention.default)
        case "flex":  # seen where blocks are compiled; elsewhere it is inside a compiled function, and run again
            attention.add(torch._higher_order_ops.flex_attention)
        case "flash":
            from kernels.scoped_attention import flash

            flash.package()  # makes its operators known
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
    options: dict = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[config.training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[config.training.mixed_precision_reduce],
            # Activations are in param_dtype from the embedding on; casting inputs would only round the RoPE tables.
            cast_forward_inputs=False,
        ),
    }
    if config.training.enable_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    policy = config.parallelism.fsdp_reshard_after_forward
    reshard = policy != "never"

    assert model.tok_embeddings is not None
    assert model.norm is not None
    assert model.output is not None
    tied = model.output.weight is None
    if not tied:
        # A tied embedding is used first and last: it stays in the root's group, gathered all the way through.
        fully_shard(model.tok_embeddings, **options, reshard_after_forward=reshard)
    for block in model.layers.values():
        fully_shard(block, **options, reshard_after_forward=reshard)
    if not tied:
        # The last group is needed again at once by the backward pass.
        fully_shard([model.norm, model.output], **options, reshard_after_forward=policy == "always")
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the tokens of the whole batch, so gradients are summed. gloo has no
            # averaging reduction; asking for sums has to come before the factor.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def release_gathered(model: nn.Module) -> None:
    """Lets go of the parameters that FSDP keeps gathered after a forward pass that no backward pass follows.

    Until then the module holds other parameters than the optimizer does, and saving the optimizer fails.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
