"""Compares fine-tuning's memory with a device's, and tries changes that would make it fit."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from farsight.configs.check_finetuning import shares_out
from farsight.configs.finetuning import FinetuneConfig
from farsight.errors import ConfigError
from farsight.launch.plan.finetune_memory import FinetuneMemory, adapter_parameters, finetune_memory
from farsight.launch.plan.hardware import Efficiency, find_gpu, usable_bytes
from farsight.launch.plan.layout import ParallelLayout
from farsight.launch.plan.suggest import Options, as_options, changed
from farsight.model.adapt.layers import adapted
from farsight.parallel.device import total_memory
from farsight.units import GIB, gib


@dataclass(frozen=True)
class Device:
    """A device and the memory that a run can use on it."""

    name: str
    usable: float
    """Bytes: those free on a GPU in this machine, or a run's share of one listed in launch/plan/hardware.py."""
    cpu: bool = False


def find_device(kind: str = "") -> Device:
    """The GPU of this name in launch/plan/hardware.py; without a name, this machine's GPU, or its main memory.

    Raises:
        ConfigError: an unknown name.
    """
    if kind:
        return Device(kind, usable_bytes(find_gpu(kind), Efficiency()))
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        return Device(torch.cuda.get_device_name(), free)
    return Device("this machine's memory", total_memory(), cpu=True)


@dataclass(frozen=True)
class Change:
    """A change to a config that was tried."""

    options: Options
    peak: int
    """Bytes at the peak with this change."""
    why: str
    """The effect of the change, or its cost."""


def suggestions(config: FinetuneConfig, device: Device, ranks: int = 1) -> tuple[list[Change], Options | None]:
    """Changes that save memory, mildest first.

    Returns:
        The changes, each tried alone; and the options of the shortest run of them, from the first, with which the run fits, or
        None if all together are not enough.
    """
    peak = finetune_memory(config, ranks, device.cpu).peak
    alone, together, enough = [], config, None
    taken: Options = {}
    for options, why in _candidates(config, device, ranks):
        change = _try(config, options, ranks, device)
        if change is None or change >= peak:
            continue
        alone.append(Change(options, change, why))
        below = _try(together, options, ranks, device)
        if enough is None and below is not None:
            taken, together = taken | options, changed(together, options)
            if below <= device.usable:
                enough = dict(taken)
    return alone, enough


def _try(config: FinetuneConfig, options: Options, ranks: int, device: Device) -> int | None:
    """The peak with these options in bytes; None if they are refused."""
    try:
        return finetune_memory(changed(config, options), ranks, device.cpu).peak
    except ConfigError:
        return None


def _candidates(config: FinetuneConfig, device: Device, ranks: int) -> Iterator[tuple[Options, str]]:
    """Changes and their cost, mildest first: first those that do not change training, then those that cost speed, precision,
    length, and trained parameters."""
    t, base, optimizer = config.training, config.base_model, config.optimizer.name
    layout, deepspeed = ParallelLayout.of(config, ranks), config.engine == "deepspeed"
    shared = shares_out(config, ranks)
    # Runs refuse these (configs/check_finetuning.py): bitsandbytes' moments can't be sharded, nor sharded 4-bit bases compiled.
    eight, four = not (device.cpu or shared or deepspeed), not (shared and config.compile.enable)
    if t.local_batch_size > 1:
        options: Options = {"training.local_batch_size": 1}
        if t.global_batch_size < 1:
            options["training.global_batch_size"] = t.local_batch_size * layout.dp_replicate * layout.dp_shard
        yield options, "the same batch, accumulated row by row"
    if config.activation_checkpoint.mode != "full":
        yield {"activation_checkpoint.mode": "full"}, "a third more computation"
    if four and base.quantization in ("none", "int8") and not adapted(config).whole:
        yield (
            {"base_model.quantization": "nf4", "base_model.double_quantization": True},
            "the base is rounded to 4 bits",
        )
    elif base.quantization != "none" and not base.double_quantization:
        yield {"base_model.double_quantization": True}, "scales are quantised too"
    if base.dtype == "float32":
        yield {"base_model.dtype": "bfloat16"}, "products in bf16"
    if eight and optimizer in ("Adam", "AdamW"):
        yield {"optimizer.name": "AdamW8bit"}, "moments in 8 bits"
    if eight and optimizer in ("Adam", "AdamW", "AdamW8bit"):
        yield {"optimizer.name": "PagedAdamW8bit"}, "moments in 8 bits, moved to host memory when the GPU is full"
    if t.seq_len > 512:
        yield {"training.seq_len": t.seq_len // 2}, "longer rows are cut or dropped (data.overlong)"
    if config.lora.enable and config.lora.rank > 8:
        yield {"lora.rank": config.lora.rank // 2, "lora.alpha": config.lora.alpha / 2}, "half the adapters' size"
    if len(layers := adapted(config).lora) > 1:
        yield _upper(config, "lora", layers), "only the upper half of LoRA's layers"
    if len(whole := adapted(config).whole) > 1:
        yield _upper(config, "training", whole), "only the upper half of the trained layers"


def _upper(config: FinetuneConfig, section: str, layers: tuple[int, ...]) -> Options:
    """Options for only the upper half of these layers, and for GARFA on none below them: no activations are kept below the
    lowest trained layer."""
    upper = layers[len(layers) // 2 :]
    options: Options = {f"{section}.layers": _listed(upper)}
    turned = adapted(config).garfa
    left = tuple(layer for layer in turned if layer >= upper[0])
    if left and len(left) < len(turned):
        options["garfa.layers"] = _listed(left)
    return options


def _listed(layers: tuple[int, ...]) -> str:
    return ",".join(map(str, layers))


PARTS = {
    "base": "base",
    "adapters": "trained parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "logits": "logits",
    "transient": "transient",
    "other": "other",
}


def memory_text(memory: FinetuneMemory, config: FinetuneConfig, device: Device, ranks: int = 1) -> str:
    """A table of memory by part, whether it fits the device, and if not, what to change."""
    notes = _notes(memory, config)
    unit, size_of = ("GiB", GIB) if memory.peak >= GIB else ("MiB", 2**20)  # a test's model takes a few MiB
    lines = [f"{'memory of a rank' if ranks > 1 else 'memory':<22}{unit:>8}"]
    lines += [
        f"  {PARTS[name]:<20}{size / size_of:>8.2f}  {notes[name]}".rstrip() for name, size in memory.parts.items()
    ]
    lines.append(
        f"  {'at the peak':<20}{memory.peak / size_of:>8.2f}  {unit} of {gib(device.usable)} GiB usable: {device.name}"
    )
    if memory.paged:
        lines.append(f"  and {gib(memory.paged)} GiB of moments that move to host memory when the GPU is full")
    if memory.peak <= device.usable:
        return "\n".join([*lines, "fits"])
    lines.append(
        f"does not fit: {gib(memory.peak - device.usable)} GiB too much. Changes, and what each alone would save:"
    )
    alone, enough = suggestions(config, device, ranks)
    for change in alone:
        saved = f"{gib(memory.peak - change.peak)} GiB"
        lines.append(f"  {saved:>10}  {as_options(change.options)}  ({change.why})")
    lines.append(
        "no change that was tried is enough: use a larger GPU, or several with data_parallel_shard_degree = -1"
        if enough is None
        else f"fits with {as_options(enough)}"
    )
    return "\n".join(lines)


def _notes(memory: FinetuneMemory, config: FinetuneConfig) -> dict[str, str]:
    base, trained = config.base_model, adapter_parameters(config)
    kind = base.quantization if base.quantization != "none" else base.dtype
    double = " with double quantisation" if base.quantization in ("nf4", "fp4") and base.double_quantization else ""
    counts = ", ".join(
        f"{label} {trained[name]:,}"
        for name, label in (("lora", "LoRA"), ("garfa", "GARFA"), ("layers", "layers"))
        if trained[name]
    )
    copies = ["one dequantised weight"] * bool(memory.dequantized)
    copies += [f"{base.dtype} copies of trained parameters"] * bool(memory.casts)
    copies += ["FSDP's copies of two blocks"] * bool(memory.gathered)
    return {
        "base": f"{kind}{double}; norms, embedding and head {base.dtype}",
        "adapters": f"{counts}, fp32",
        "gradients": "fp32",
        "optimizer": config.optimizer.name,
        "activations": f"{100 * memory.saved / memory.activations:.0f} % saved, the rest in one block; "
        f"checkpointing {config.activation_checkpoint.mode!r}",
        "logits": "of a chunk",
        "transient": ", ".join(copies),
        "other": "",
    }


def changes_as_dict(changes: list[Change], peak: int) -> list[dict[str, Any]]:
    """The changes as `--json` writes them."""
    return [{"options": change.options, "saves_bytes": peak - change.peak, "why": change.why} for change in changes]
