"""Changes to a config: applied, written as options, and suggested for fine-tuning that does not fit, mildest first."""

import copy
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from farsight.configs.check import check
from farsight.configs.check_finetuning import shares_out
from farsight.configs.finetuning import FinetuneConfig
from farsight.configs.optimizers import of_kind
from farsight.configs.schema import JobConfig
from farsight.errors import ConfigError
from farsight.launch.plan.hardware import Device
from farsight.launch.plan.memory import memory_of, rank_memory
from farsight.launch.plan.run import Run
from farsight.units import gib

C = TypeVar("C", bound=JobConfig)

Options = dict[str, Any]
"""Values by `section.key`, as on the command line."""


@dataclass(frozen=True)
class Change:
    """A change to a config that was tried."""

    options: Options
    peak: int
    """Bytes at the peak with this change."""
    why: str
    """The effect of the change, or its cost."""


def changed(config: C, options: Options) -> C:
    """A copy of the config with these options set.

    Raises:
        ConfigError: they contradict other settings.
    """
    new = copy.copy(config)  # its sections are replaced, never changed
    # Validation uses training's batch size unless it is set.
    follows = new.validation.local_batch_size == new.training.local_batch_size
    for name, value in options.items():
        section, key = name.split(".")
        if name == "optimizer.kind":
            new.optimizer = of_kind(new.optimizer, str(value))  # type: ignore[assignment,arg-type]  # only changes to fine-tuning name a kind
            continue
        setattr(new, section, dataclasses.replace(getattr(new, section), **{key: value}))
    if follows:
        new.validation = dataclasses.replace(new.validation, local_batch_size=new.training.local_batch_size)
    check(new)
    return new


def as_options(options: Options) -> str:
    """The options as command-line arguments."""
    return " ".join(
        f"--{name} {str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items()
    )


def change_text(change: Change, peak: int) -> str:
    """A line with the memory that the change saves, its options, and its effect or cost."""
    return f"  {gib(peak - change.peak):>6} GiB  {as_options(change.options)}  ({change.why})"


def peak_with(config: JobConfig, options: Options, device: Device, gpus: int) -> float:
    """The peak with these options, in bytes, on the rank that takes most; infinite if they are refused."""
    try:
        return max(memory.peak for memory in memory_of(Run.of(changed(config, options), gpus, device.cpu)))
    except ConfigError:
        return math.inf


def suggestions(run: Run, device: Device) -> tuple[list[Change], Options | None]:
    """Changes that save memory in fine-tuning, mildest first.

    Args:
        run: one that fine-tunes.
        device: each of its GPUs.

    Returns:
        The changes, each tried alone; and the options of the shortest run of them, from the first, with which the run fits, or
        None if all together are not enough.
    """
    assert run.finetune is not None
    config, gpus, peak = run.finetune, run.layout.world_size, rank_memory(run).peak
    alone: list[Change] = []
    taken: Options = {}
    enough = False
    for options, why in _finetuning(run, config, device):
        below = peak_with(config, options, device, gpus)
        if below >= peak:
            continue
        alone.append(Change(options, int(below), why))
        if not enough and (together := peak_with(config, taken | options, device, gpus)) < math.inf:
            taken, enough = taken | options, together <= device.usable
    return alone, taken if enough else None


def _finetuning(run: Run, config: FinetuneConfig, device: Device) -> Iterator[tuple[Options, str]]:
    """Changes and their cost, mildest first: first those that do not change training, then those that cost speed, precision,
    length, and trained parameters."""
    t, base, optimizer, layers = config.training, config.base_model, config.optimizer.kind, run.layers
    layout, shared = run.layout, shares_out(config, run.layout.world_size)
    # Runs refuse these (configs/check_finetuning.py): bitsandbytes' moments can't be sharded, nor sharded 4-bit bases compiled.
    eight = not (device.cpu or config.engine == "deepspeed")
    four = not (shared and config.compile.enable)
    if t.local_batch_size > 1:
        options: Options = {"training.local_batch_size": 1}
        if t.global_batch_size < 1:
            options["training.global_batch_size"] = t.local_batch_size * layout.dp_replicate * layout.dp_shard
        yield options, "the same batch, accumulated row by row"
    if config.activation_checkpoint.mode != "full":
        yield {"activation_checkpoint.mode": "full"}, "a third more computation"
    if four and base.quantization in ("none", "int8") and not layers.whole:
        four_bits = {"base_model.quantization": "nf4", "base_model.double_quantization": True}
        yield four_bits, "the base is rounded to 4 bits"
    elif base.quantization != "none" and not base.double_quantization:
        yield {"base_model.double_quantization": True}, "scales are quantised too"
    if base.dtype == "float32":
        yield {"base_model.dtype": "bfloat16"}, "products in bf16"
    if eight and optimizer in ("adam", "adamw"):
        yield {"optimizer.kind": "adamw8bit"}, "moments in 8 bits"
    if eight and not shared and optimizer in ("adam", "adamw", "adamw8bit"):
        yield {"optimizer.kind": "paged_adamw8bit"}, "moments in 8 bits, moved to host memory when the GPU is full"
    if t.seq_len > 512:
        yield {"training.seq_len": t.seq_len // 2}, "longer rows are cut or dropped (data.overlong)"
    if config.lora.enable and config.lora.rank > 8:
        yield {"lora.rank": config.lora.rank // 2, "lora.alpha": config.lora.alpha / 2}, "half the adapters' size"
    if len(layers.lora) > 1:
        yield _upper("lora", layers.lora, layers.garfa), "only the upper half of LoRA's layers"
    if len(layers.whole) > 1:
        yield _upper("training", layers.whole, layers.garfa), "only the upper half of the trained layers"


def _upper(section: str, layers: tuple[int, ...], garfa: tuple[int, ...]) -> Options:
    """Options for only the upper half of these layers, and for GARFA on none below them: no activations are kept below the
    lowest trained layer."""
    upper = layers[len(layers) // 2 :]
    left = [layer for layer in garfa if layer >= upper[0]]
    chosen = {section: upper} | ({"garfa": left} if 0 < len(left) < len(garfa) else {})
    return {f"{name}.layers": ",".join(map(str, numbers)) for name, numbers in chosen.items()}
