"""A fine-tuning run's plan for `farsight plan`: memory by part, changes that make it fit, FLOPs, traffic and time."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchtitan.config import TORCH_DTYPE_MAP

from farsight.checkpoints.load import read_model_config
from farsight.configs.finetuning import FinetuneConfig
from farsight.configs.load import load_config, read_toml
from farsight.configs.schema import Architecture, Position
from farsight.errors import ConfigError
from farsight.launch.plan.costs import (
    BYTES_A_LOGIT,
    OPTIMIZER_PASSES,
    Passes,
    Seconds,
    StepTime,
    bandwidth,
    memory_bytes,
    pairs_of_busiest_rank,
    tokens_per_step,
)
from farsight.launch.plan.finetune_fit import Change, Device, changes_as_dict, memory_text, suggestions
from farsight.launch.plan.finetune_memory import (
    FinetuneMemory,
    adapter_parameters,
    adapter_weights,
    base_weights,
    finetune_memory,
    is_linear,
    module_shapes,
    recomputed,
    types_of,
)
from farsight.launch.plan.hardware import Efficiency, Gpu, usable_bytes
from farsight.launch.plan.heads import layers_of
from farsight.launch.plan.layout import ParallelLayout
from farsight.launch.plan.memory import local_tokens
from farsight.launch.plan.suggest import Options
from farsight.model.adapt.layers import adapted
from farsight.model.build import ModelConfig, trained_layers
from farsight.model.flops import Adapters, batch_flops, layer_matmul_weights
from farsight.training.finetune.base import take_base
from farsight.training.start import names_theta
from farsight.units import count, duration, shown_seconds


def is_finetuning(path: Path) -> bool:
    """Whether a config file is for `train.py finetune`, judged by its sections or its folder."""
    values = read_toml(path)
    return bool({"base_model", "lora", "garfa"} & values.keys()) or "finetune" in path.resolve().parts


def read_finetune_config(path: Path, options: list[str]) -> FinetuneConfig:
    """Reads a config; the base's shapes and positions come from its directory, or from `model.flavor` if it does not exist.

    Raises:
        ConfigError: settings that can't be used, or a base of unknown shapes.
    """
    arguments = ["--job.config_file", str(path), *options]
    config = load_config(arguments, FinetuneConfig)
    directory = Path(config.base_model.path).expanduser()
    if config.base_model.path and (directory / "config.json").is_file():
        take_base(config, read_model_config(directory), names_theta(arguments))
    elif config.architecture == Architecture():
        raise ConfigError(
            f"base_model.path = {config.base_model.path!r} does not exist, so its shapes are unknown: name them for the plan, for "
            "example with --model.flavor llama3.1-8b (a file in configs/sizes/)."
        )
    config.position = config.position or Position()
    return config


@dataclass(frozen=True)
class FinetunePlan:
    """A fine-tuning run's plan on a number of GPUs of one kind."""

    name: str
    config: FinetuneConfig
    gpus: int
    kind: str
    gpu: Gpu
    efficiency: Efficiency
    layout: ParallelLayout
    memory: FinetuneMemory
    time: StepTime
    flops_per_token: float
    changes: list[Change]
    suggestion: Options | None

    @property
    def device(self) -> Device:
        """The GPU as a device with its usable memory."""
        return Device(self.kind, usable_bytes(self.gpu, self.efficiency))

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.device.usable

    @property
    def tokens_per_step(self) -> int:
        return tokens_per_step(self.config, self.layout)

    def as_dict(self) -> dict[str, Any]:
        """The plan as `--json` writes it; bytes and seconds throughout. `parts` adds up to more than `peak`."""
        memory, t = self.memory, self.time
        return {
            "name": self.name,
            "gpus": self.gpus,
            "layout": self.layout.degrees(),
            "per_rank_bytes": {
                "parameters": memory.base + memory.adapters,
                **{name: memory.parts[name] for name in ("gradients", "optimizer", "activations", "logits")},
                "parts": memory.parts,
                "sum": sum(memory.parts.values()),
                "paged": memory.paged,
                "peak": memory.peak,
            },
            "usable_bytes": int(self.device.usable),
            "fits": self.fits,
            "flops_per_token": self.flops_per_token,
            "step_seconds": t.total,
            "seconds": {**vars(t.compute), "data_parallel": t.data_parallel, "optimizer": t.optimizer},
            "tokens_per_step": self.tokens_per_step,
            "tokens_per_second": self.tokens_per_step / t.total,
            "steps": self.config.training.steps,
            "attention_imbalance": 1.0,
            "traffic_bytes": t.traffic,
            "trained_parameters": adapter_parameters(self.config),
            "changes": changes_as_dict(self.changes, memory.peak),
            "suggestion": self.suggestion,
            "assumptions": {"gpu": vars(self.gpu), "efficiency": vars(self.efficiency)},
        }

    def text(self) -> str:
        """The plan as text for a terminal."""
        c, t = self.config.training, self.time
        batch = self.tokens_per_step // c.seq_len
        shown = {"products": t.compute.matmul, "attention": t.compute.attention, "memory": t.compute.memory}
        shown |= {"data parallel": t.data_parallel, "optimizer": t.optimizer}
        parts = ", ".join(f"{name} {100 * s / t.total:.0f} %" for name, s in shown.items() if s > 0.005 * t.total)
        run = f"; {c.steps:,} steps take {duration(c.steps * t.total)}" if c.steps else ""
        return "\n".join(
            [
                f"{self.name} on {self.gpus} × {self.kind}: {self.layout}",
                f"{c.seq_len:,} tokens a row, {batch:,} rows a step ({self.layout.rows} on a rank at a time"
                + (f", accumulated {self.layout.accumulation} times)" if self.layout.accumulation > 1 else ")"),
                "",
                memory_text(self.memory, self.config, self.device, self.gpus),
                "",
                f"{count(self.flops_per_token, 'G')} FLOP a token; step {shown_seconds(t.total)}: {parts}",
                f"{self.tokens_per_step / t.total:,.0f} tokens/s{run}",
            ]
        )


def plan_finetuning(
    name: str, config: FinetuneConfig, gpus: int, kind: str, gpu: Gpu, efficiency: Efficiency
) -> FinetunePlan:
    """Plans a fine-tuning run.

    Args:
        kind: name of the GPU, for the text.

    Raises:
        ConfigError: the config can't run on this number of GPUs.
    """
    layout, memory = ParallelLayout.of(config, gpus), finetune_memory(config, gpus)
    device = Device(kind, usable_bytes(gpu, efficiency))
    changes, suggestion = suggestions(config, device, gpus) if memory.peak > device.usable else ([], None)
    time = _step_time(config, layout, gpu, efficiency)
    return FinetunePlan(
        name, config, gpus, kind, gpu, efficiency, layout, memory, time, _flops_per_token(config), changes, suggestion
    )


def _flops_per_token(config: FinetuneConfig) -> float:
    """FLOPs of training per token, as runs report them: without recomputation, and without gradients of frozen weights."""
    tokens = config.training.seq_len
    matrices = sum(weight.numel for weight in adapter_weights(config)["lora"])
    flops = batch_flops(
        config.architecture,
        layers_of(ModelConfig.from_job(config)),
        torch.arange(tokens)[None],
        trained_layers(config),
        Adapters(adapted(config).lowest, matrices),
    )
    return flops / tokens


def _step_time(config: FinetuneConfig, layout: ParallelLayout, gpu: Gpu, efficiency: Efficiency) -> StepTime:
    one = sum(
        (_layer_seconds(config, layout, n, gpu, efficiency) for n in range(config.architecture.n_layers)), Seconds()
    )
    compute = (one + _head_seconds(config, layout, gpu, efficiency)) * layout.accumulation
    traffic = _traffic(config, layout)
    exchanged = sum(traffic[name] / bandwidth(layout, name, gpu, efficiency) for name in traffic)
    trained = sum(weight.shard(layout.fsdp) for group in adapter_weights(config).values() for weight in group)
    return StepTime(
        compute,
        bubble=0.0,
        data_parallel=max(0.0, exchanged - efficiency.overlap * compute.total),
        optimizer=4 * OPTIMIZER_PASSES * trained / (gpu.hbm * efficiency.hbm),
        traffic=traffic,
    )


def _passes(config: FinetuneConfig, layer: int) -> Passes:
    """A layer's passes, as `Passes.of`; only layers that train in full compute gradients of their weights."""
    if layer < adapted(config).lowest:
        return Passes(1, 4, 1, 0)
    again, own = recomputed(config, layer), layer in adapted(config).whole
    return Passes(2 + own + again, 14 + 4 * again, 3 + again, 0)


def _layer_seconds(
    config: FinetuneConfig, layout: ParallelLayout, layer: int, gpu: Gpu, efficiency: Efficiency
) -> Seconds:
    """Time of a layer for a micro-batch, forward and backward. Each product with a quantised weight first dequantises it."""
    a, types, tokens = config.architecture, types_of(config), local_tokens(config, layout)
    position, passes = layers_of(ModelConfig.from_job(config))[layer], _passes(config, layer)
    flops = 2 * layer_matmul_weights(a) * tokens * passes.matmul
    moved = memory_bytes(config, position) * tokens * types.product // 2 * passes.memory
    if layer in adapted(config).lora:
        shapes = module_shapes(a)
        matrices = sum(w.numel for w in adapter_weights(config)["lora"] if w.layer == layer)
        flops += 2 * matrices * tokens * (passes.matmul + 1)
        # Dropout reads and writes its input; the adapter's output is scaled and added.
        numbers = sum((2 * bool(config.lora.dropout)) * shapes[m][1] + 4 * shapes[m][0] for m in config.lora.modules)
        moved += types.product * numbers * tokens * passes.memory
    if config.base_model.quantization != "none":
        kept = [
            (weight.numel, size) for weight, size in base_weights(config) if weight.layer == layer and is_linear(weight)
        ]
        moved += sum(types.product * numel + size for numel, size in kept) * passes.matmul
    pairs = layout.rows * pairs_of_busiest_rank(config, layout, position, efficiency.windows)
    peak = gpu.fp32_flops if types.product == 4 else gpu.bf16_flops
    return Seconds(
        matmul=flops / (peak * efficiency.matmul),
        attention=a.head_dim * pairs * passes.attention / (peak * efficiency.attention),
        memory=moved / (gpu.hbm * efficiency.hbm),
    )


def _head_seconds(config: FinetuneConfig, layout: ParallelLayout, gpu: Gpu, efficiency: Efficiency) -> Seconds:
    a, logits = config.architecture, local_tokens(config, layout) * config.architecture.vocab_size
    peak = gpu.fp32_flops if types_of(config).product == 4 else gpu.bf16_flops
    return Seconds(
        matmul=2 * a.dim * logits * 2 / (peak * efficiency.matmul),
        memory=BYTES_A_LOGIT * logits / (gpu.hbm * efficiency.hbm),
    )


def _traffic(config: FinetuneConfig, layout: ParallelLayout) -> dict[str, int]:
    """Bytes that a rank sends (and receives) in a step, by mesh dimension: gradients of trained parameters, and FSDP's gathers of
    all others, twice in layers that gradients pass through."""
    n, r, lowest = layout.fsdp, layout.dp_replicate, adapted(config).lowest
    trained = 4 * sum(weight.numel for group in adapter_weights(config).values() for weight in group)
    plain = TORCH_DTYPE_MAP[config.base_model.dtype].itemsize
    gathered = sum(
        (size if is_linear(weight) else plain * weight.numel)
        * (2 if weight.layer is not None and weight.layer >= lowest else 1)
        for weight, size in base_weights(config)
    )
    passes = layout.accumulation
    return {
        "dp_replicate": 2 * (r - 1) * (trained // n) // r,
        "dp_shard": (n - 1) * (gathered + 3 * trained) * passes // n,
    }
