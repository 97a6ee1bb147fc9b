"""Activation checkpointing: what the backward pass recomputes, block by block."""

import os
from collections import Counter
from importlib.util import find_spec
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from farsight.configs.schema import JobConfig
from farsight.model.llama import Llama


def recompute(model: Llama, config: JobConfig) -> None:
    """Wraps the blocks that `activation_checkpoint` asks for, in place."""
    options, compiled = config.activation_checkpoint, config.compile.enable
    if options.mode == "none":
        return
    if compiled:
        # Dynamo prefers its newest graph, so a pipeline's second micro-batch would run forward in one with dynamic shapes, while its
        # recomputation follows the first, and fail (pytorch issue 166926).
        torch._C._dynamo.eval_frame._set_lru_cache(False)  # type: ignore[attr-defined]  # not in PyTorch's stubs
    if options.mode == "memory_budget":
        if options.visualize_memory_budget_pareto:
            folder = os.path.join(config.job.dump_folder, "memory_budget_pareto")
            os.makedirs(folder, exist_ok=True)
            torch._functorch.config.memory_budget_pareto_dir = folder
            torch._functorch.config.visualize_memory_budget_pareto = True
        torch._functorch.config.activation_memory_budget = options.memory_budget
        return
    how: dict[str, Any] = {"preserve_rng_state": options.preserve_rng_state, "early_stop": options.early_stop}
    every = 1
    if options.mode == "selective" and options.selective_ac_option in ("op", "attention"):
        kept, products = attention_ops(config), options.selective_ac_option == "op"
        kept |= expensive_ops() if products else exchanges()
        how["context_fn"] = lambda: create_selective_checkpoint_contexts(_Policy(kept, products))
    elif options.mode == "selective":
        every = max(1, int(options.selective_ac_option))
    for name, block in [*model.layers.named_children()]:  # by their numbers in the whole model
        if (int(name) + 1) % every == 0:
            model.layers.register_module(name, checkpoint_wrapper(block, **how))


PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
"""Linear layers, without and with a bias."""


class _Policy:
    """Keeps the results of some operators, and of every second matrix product if `half_of_products` is set."""

    def __init__(self, kept: set[Any], half_of_products: bool) -> None:
        self.kept, self.half_of_products, self.products = kept, half_of_products, Counter[bool]()

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = operator in self.kept
        if operator in PRODUCTS and self.half_of_products:
            self.products[context.is_recompute] += 1  # forward and recomputation count the same products
            keep = self.products[context.is_recompute] % 2 == 1
        elif operator == torch.ops.aten._to_copy.default and "cuda" in str(args[0].device):
            keep = str(kwargs.get("device")) == "cpu"  # a copy to the host waits for the GPU
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def attention_ops(config: JobConfig) -> set[Any]:
    """The operators of the attention backend."""
    attention: set[Any] = {torch.ops.farsight.banded_attention.default}
    match config.attention.backend:
        case "triton" | "hybrid" | "auto" if torch.cuda.is_available() and find_spec("triton"):
            from farsight.kernels.scoped_attention import hybrid  # noqa: F401  registers its operators and Triton's

            ours = torch.ops.farsight
            attention |= {ours.triton_attention.default, ours.triton_segmented_attention.default}
            attention |= {ours.hybrid_attention.default, ours.hybrid_segmented_attention.default}
        case "flex":  # visible only in a compiled block; elsewhere it is inside a compiled function and is recomputed
            attention.add(torch._higher_order_ops.flex_attention)
        case "flash":
            from farsight.kernels.scoped_attention import flash

            flash.package()  # registers its operators
            ops = torch.ops.flash_attn
            attention |= {ops._flash_attn_forward.default, ops._flash_attn_varlen_forward.default}
    return attention


def exchanges() -> set[Any]:
    """The operator with which context parallelism exchanges keys and values."""
    return {torch.ops._c10d_functional.all_to_all_single.default}


def expensive_ops() -> set[Any]:
    """Operators besides attention whose results "op" saves, because they are the most expensive to recompute."""
    return {
        *exchanges(),
        *PRODUCTS,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        # The absolute maximum scales a float8 cast.
        torch.ops.aten.max.default,
        torch._higher_order_ops.inductor_compiled_code,
    }
