"""Tensor parallelism with sequence parallelism: how each matrix is sharded, and what ranks exchange.

Heads and hidden units are sharded over the ranks, and so is the vocabulary in the embedding and the head. Between them, in
the residual stream and the norms, each rank holds a span of the tokens. So a block all-gathers its tokens before attention
and before the feed-forward, and reduce-scatters after each: the traffic of one all-reduce, at a fraction of the memory.
The loss is computed on the sharded vocabulary (`kernels/chunked_loss.py`): full logits never exist.

Scopes, slopes and other per-head settings are looked up by the head's number in the whole layer (`Attention.hold_heads`).
"""

from typing import cast

import torch._inductor.config
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from farsight.configs.check import check_tensor_parallel
from farsight.configs.schema import Architecture, JobConfig
from farsight.errors import ConfigError
from farsight.model.attention import Attention
from farsight.model.llama import Llama
from farsight.model.norm import DividedRMSNorm


def apply_tensor_parallel(model: Llama, mesh: DeviceMesh, config: JobConfig) -> None:
    """Shards a model, or a pipeline stage's part of one, over the ranks of `mesh`, in place, before it has weights.

    Raises:
        ConfigError: heads, vocabulary or hidden units that the ranks do not divide.
    """
    check_tensor_parallel(config)
    if config.parallelism.enable_async_tensor_parallel:
        torch._inductor.config._micro_pipeline_tp = True
    for block in model.layers.values():
        parallelize_module(block, mesh, _block_plan(config.architecture))
        attention = cast(Attention, block.attention)
        _hold_heads(attention, mesh, config.architecture)
        if attention.garfa is not None and attention.garfa.trained:
            attention.garfa.raw = nn.Parameter(distribute_tensor(attention.garfa.raw, mesh, [Shard(0)]))
    ends: dict[str, ParallelStyle] = {}
    if model.tok_embeddings is not None:
        ends["tok_embeddings"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        model.token_shard = mesh.get_local_rank(), mesh.size()
    if model.norm is not None:
        ends["norm"] = SequenceParallel()
    parallelize_module(model, mesh, ends)
    if model.tok_embeddings is not None:
        # If its input is an unfinished asynchronous tensor, a compiled block silently loses the gradient (torch 2.13); the
        # product waits for it.
        model.tok_embeddings.register_forward_hook(lambda module, inputs, embedded: embedded * 1.0)
    if model.output is not None and model.output.weight is not None:
        model.output.weight = nn.Parameter(distribute_tensor(model.output.weight, mesh, [Shard(0)]))


def shard_for_decoding(model: Llama, mesh: DeviceMesh) -> None:
    """Shards a model over the ranks of `mesh` for generation, in place, before it has weights.

    Every rank has all tokens, since a decoding step has only one per row. So attention and feed-forward each end in an
    all-reduce, and each rank's caches hold its own heads.

    Raises:
        ConfigError: heads, vocabulary or hidden units that the ranks do not divide.
    """
    architecture, ranks = model.architecture, mesh.size()
    for name in ("n_heads", "n_kv_heads", "ffn_dim", "vocab_size"):
        if getattr(architecture, name) % ranks:
            raise ConfigError(
                f"the model's {name} is {getattr(architecture, name)}, which is not a multiple of {ranks} processes: start "
                "another number of processes"
            )
    columns = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
    rows = ("attention.wo", "feed_forward.w2")
    for block in model.layers.values():
        plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
        parallelize_module(block, mesh, plan | {name: RowwiseParallel() for name in rows})
        _hold_heads(cast(Attention, block.attention), mesh, architecture)
    whole = Replicate()
    ends: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=whole, output_layouts=whole),
        # The head takes a DTensor where its weight is one.
        "norm": PrepareModuleOutput(output_layouts=whole, desired_output_layouts=whole, use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    assert model.output is not None
    if model.output.weight is not None:
        model.output.weight = nn.Parameter(distribute_tensor(model.output.weight, mesh, [Shard(0)]))


def _hold_heads(attention: Attention, mesh: DeviceMesh, architecture: Architecture) -> None:
    """Gives the rank its heads: their scopes and slopes, and its part of a norm over all of them."""
    per_rank = architecture.n_heads // mesh.size()
    attention.hold_heads(mesh.get_local_rank() * per_rank, (mesh.get_local_rank() + 1) * per_rank)
    if attention.norms_whole_projection:
        attention.q_norm, attention.k_norm = (_divided(norm, mesh) for norm in (attention.q_norm, attention.k_norm))


def _divided(norm: nn.Module | None, mesh: DeviceMesh) -> DividedRMSNorm:
    assert isinstance(norm, nn.RMSNorm)
    norm.weight = nn.Parameter(distribute_tensor(norm.weight, mesh, [Shard(0)]))
    return DividedRMSNorm(norm)


def _block_plan(architecture: Architecture) -> dict[str, ParallelStyle]:
    whole_sequence = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan: dict[str, ParallelStyle] = {
        "attention": whole_sequence,
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward": whole_sequence,
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    }
    if architecture.norm_placement != "post":
        plan |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
    if architecture.norm_placement != "pre":
        tokens = SequenceParallel(use_local_output=True)
        plan |= {"attention_post_norm": tokens, "ffn_post_norm": tokens}
    if architecture.qk_norm and architecture.qk_norm_span == "head":
        # One weight for all heads: sharding the heads, not the tokens, makes its gradient a sum over the ranks.
        heads = SequenceParallel(sequence_dim=2, use_local_output=True)
        plan |= {"attention.q_norm": heads, "attention.k_norm": heads}
    return plan
