"""DeepSpeed as the engine: ZeRO 1 to 3 in place of FSDP and DDP.

The loop, the data, the schedule and the checkpoints are the same as with PyTorch's FSDP. DeepSpeed takes the model and torch's
AdamW; forward and step go through its engine, and its fp32 weights and optimizer state are initialised, saved and loaded in
place, each rank its own part. DeepSpeed's own checkpoints, which are pickles, are neither written nor read.
"""

from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from farsight.configs.finetuning import FinetuneConfig
from farsight.configs.schema import JobConfig
from farsight.model.llama import Llama, unwrapped
from farsight.parallel.device import default_device, import_deepspeed
from farsight.parallel.parts import TensorShard

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state for each parameter, besides the step."""


def deepspeed_config(config: JobConfig) -> dict[str, Any]:
    """Our settings as a DeepSpeed config."""
    z, finetuning = config.deepspeed, isinstance(config, FinetuneConfig)
    host = {"device": "cpu", "pin_memory": torch.accelerator.is_available()}
    zero: dict[str, Any] = {"stage": z.zero_stage}
    if z.offload_optimizer:
        zero["offload_optimizer"] = host
    if z.offload_parameters:
        zero["offload_param"] = host
    if z.zero_stage == 3:
        # Norm weights stay whole on every rank: gathering one would take as long as gathering a matrix.
        zero["stage3_param_persistence_threshold"] = config.architecture.dim
    return {
        "train_micro_batch_size_per_gpu": config.training.local_batch_size,
        # The loss is already divided by the tokens of the global batch, so not by the number of micro-batches.
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.training.max_norm,
        # Fine-tuning's trained parameters stay fp32; autocast computes its products in bf16.
        "bf16": {"enabled": config.training.mixed_precision_param == "bfloat16" and not finetuning},
        # DeepSpeed turns off an outer autocast and has its own; communication stays fp32.
        "torch_autocast": {
            "enabled": isinstance(config, FinetuneConfig) and config.base_model.dtype == "bfloat16",
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        },
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": zero,
        # torch's AdamW works on the host too; DeepSpeed's own would need a compiler.
        "zero_force_ds_cpu_optimizer": False,
    }


def partition(model: Llama, config: JobConfig) -> None:
    """Shards the parameters of a model on the meta device over the ranks (stage 3), block by block, uninitialised."""
    deepspeed = import_deepspeed()
    dtype = getattr(torch, config.training.mixed_precision_param)
    for module in (model.tok_embeddings, *model.layers.values(), model.norm, model.output):
        assert module is not None
        module.to_empty(device=default_device())
        for parameter in module.parameters():
            parameter.data = parameter.data.to(dtype)
        deepspeed.zero.Init(module=module, config_dict_or_path=deepspeed_config(config))
    for block in model.layers.values():
        # A block is gathered and released as a whole, as in FSDP. With hooks on its submodules it could not be recomputed:
        # their parameters would be released before their gradients are computed.
        deepspeed.utils.set_z3_leaf_module(block, True)


@dataclass(frozen=True)
class _Held:
    """This rank's part of a parameter: `length` elements from `start` on, stored from `offset` in a flat fp32 tensor."""

    flat: Tensor
    offset: int
    start: int
    length: int

    def of(self, flat: Tensor) -> Tensor:
        """The same elements of another tensor laid out like `flat`."""
        return flat.detach()[self.offset : self.offset + self.length]


class ZeroOptimizer:
    """DeepSpeed's engine with the interface of `training.optimizers.container.Optimizers`.

    Its state dict has the same names and full shapes, so that either engine's checkpoints resume under the other and on any
    number of ranks.

    Args:
        optimizer: PyTorch's AdamW or Adam over the model's trained parameters, which DeepSpeed steps with.
    """

    can_skip = False  # it looks at the gradients itself

    def __init__(self, config: JobConfig, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        assert isinstance(model, Llama)
        self.optimizers = [optimizer]
        group_of = {id(p): i for i, group in enumerate(self.optimizers[0].param_groups) for p in group["params"]}
        self.parameters = {unwrapped(name): p for name, p in model.named_parameters() if p.requires_grad}
        self.group_of = {name: group_of[id(parameter)] for name, parameter in self.parameters.items()}
        self.names = {id(parameter): name for name, parameter in self.parameters.items()}
        self.stage = config.deepspeed.zero_stage
        with redirect_stdout(None):  # in bf16, stage 1 prints its memory use
            self.engine, self.zero, *_ = import_deepspeed().initialize(
                model=model, optimizer=self.optimizers[0], config=deepspeed_config(config), dist_init_required=False
            )
        if not isinstance(config, FinetuneConfig):  # in fine-tuning the model's own weights are fp32 too
            self._fill(model)

    def _fill(self, model: Llama) -> None:
        """Initialises the fp32 weights directly, not from the bf16 copies that DeepSpeed was given."""
        for name, parameter in self.parameters.items():
            whole = torch.empty(self._shape(parameter), dtype=torch.float32, device=default_device())
            model.init_parameter(name, whole)
            held = self._held(parameter)
            held.of(held.flat).copy_(whole.flatten()[held.start : held.start + held.length])
        self.refresh()

    # A step ──────────────────────────────────────────────────────────────────────────────────────

    def expect_step(self, last: bool) -> None:
        """Tells the engine whether the next micro-batch is the last one before a step."""
        self.engine.set_gradient_accumulation_boundary(last)

    def clip_and_step(self) -> float:
        """Clips, steps, and returns the gradient norm before clipping; if it is not finite, the step is skipped."""
        self.engine.step()
        return float(self.engine.get_global_grad_norm())

    def zero_grad(self) -> None:
        """Does nothing: DeepSpeed's step already zeroes gradients."""

    # Weights and state ───────────────────────────────────────────────────────────────────────────

    def weights(self) -> dict[str, Tensor]:
        """This rank's parts of the fp32 weights, by name."""
        return self._parts(lambda held: held.flat)

    @torch.no_grad()
    def refresh(self) -> None:
        """Updates the weights that the model computes with from the fp32 ones."""
        if self.stage < 3:
            self.zero.update_lp_params()
            return
        self.zero.checkpoint_event_prologue()  # releases gathered parameters
        for group in range(len(self.zero.fp16_groups)):
            self.zero._reassign_or_swap_out_partitioned_parameters(group)
        self.zero.checkpoint_event_epilogue()  # gathers the parameters that stay whole

    def state_dict(self) -> dict[str, Any]:
        """Optimizer state by parameter; moments are this rank's parts, `TensorShard`, for loading in place."""
        self._make_state()
        state: dict[str, Any] = {}
        for key in MOMENTS:
            parts = self._parts(lambda held: self.optimizers[0].state[held.flat][key])  # noqa: B023  called at once
            state |= {f"state.{name}.{key}": part for name, part in parts.items()}
        for name, parameter in self.parameters.items():
            state[f"state.{name}.step"] = self.optimizers[0].state[self._held(parameter).flat]["step"]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing: moments and steps were loaded in place."""

    def _parts(self, flat_of: Callable[[_Held], Tensor]) -> dict[str, Tensor]:
        parts: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            held = self._held(parameter)
            parts[name] = TensorShard(held.of(flat_of(held)), self._shape(parameter), held.start)
        return parts

    def _make_state(self) -> None:
        """Creates the state that AdamW would create in its first step."""
        for flat in self._flats():
            if not self.optimizers[0].state[flat]:
                fused = self.optimizers[0].defaults["fused"]
                step = torch.zeros((), dtype=torch.float32, device=flat.device if fused else None)
                self.optimizers[0].state[flat] = {"step": step, **{key: torch.zeros_like(flat) for key in MOMENTS}}

    # Where DeepSpeed keeps things ────────────────────────────────────────────────────────────────

    def _flats(self) -> Sequence[Tensor]:
        if self.stage == 3:
            return self.zero.fp32_partitioned_groups_flat
        if hasattr(self.zero, "fp32_groups_flat_partition"):  # stage 1 in bf16
            return self.zero.fp32_groups_flat_partition
        return self.zero.single_partition_of_fp32_groups

    def _shape(self, parameter: nn.Parameter) -> torch.Size:
        return parameter.ds_shape if self.stage == 3 else parameter.shape  # type: ignore[attr-defined]  # DeepSpeed's

    def _held(self, parameter: Any) -> _Held:
        if self.stage == 3:
            group, offset, padded = self.zero.grad_position[self.zero.get_param_id(parameter)]
            start = min(padded * torch.distributed.get_rank(), parameter.ds_numel)
            return _Held(self._flats()[group], offset, start, min(padded, parameter.ds_numel - start))
        mapping = parameter._hp_mapping
        if mapping is None:
            return _Held(self._flats()[self.group_of[self.names[id(parameter)]]], 0, 0, 0)
        here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
        return _Held(self._flats()[mapping.param_group_index], here.start, there.start, there.numel)


class ZeroWeights:
    """The model's fp32 weights, for saving in a checkpoint."""

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """This rank's parts of the weights, by name."""
        return dict(self.optimizer.weights())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Updates the model's copies; the fp32 weights were loaded in place."""
        self.optimizer.refresh()
