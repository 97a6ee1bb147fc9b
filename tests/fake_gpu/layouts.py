"""The layouts that run on GPUs that don't exist."""

from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Layout:
    """A config on a number of GPUs."""

    gpus: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    finetunes: bool = False


SIZE_8B = {
    "model.flavor": "8b", "tokenizer.kind": "bytes", "parallelism.context_parallel_degree": 8, "training.seq_len": 131072,
    "training.local_batch_size": 1, "training.global_batch_size": 1, "architecture.n_layers": 8,
    "activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "attention",
}  # fmt: skip
LAYOUTS = {
    "one GPU": Layout(),
    "FSDP 8": Layout(8),
    "HSDP 2 × 4": Layout(8, {"parallelism.data_parallel_replicate_degree": 2}),
    "DDP 2": Layout(2, {"parallelism.data_parallel_replicate_degree": 2, "parallelism.data_parallel_shard_degree": 1}),
    "TP 2 × FSDP 2": Layout(4, {"parallelism.tensor_parallel_degree": 2}),
    "CP 4": Layout(4, {"parallelism.context_parallel_degree": 4}),
    "8 layers of 8B, CP 8": Layout(8, SIZE_8B),
    "LoRA and GARFA, FSDP 2": Layout(2, {"base_model.quantization": "none"}, finetunes=True),
}
DECODED = "a decoded token"
STEPS = 4
TINY = {
    "training.steps": STEPS, "lr_scheduler.warmup_steps": 1, "validation.enable": False, "tokenizer.kind": "bytes",
    "training.mixed_precision_param": "bfloat16", "training.local_batch_size": 2,
    "checkpoint.enable": False, "metrics.trackers": [], "metrics.log_freq": 100,
}  # fmt: skip


def config_of(layout: Layout, folder: Path) -> Any:
    """The config of a layout, for a run folder."""
    degrees = (layout.options.get(f"parallelism.{kind}_parallel_degree", 1) for kind in ("tensor", "context"))
    rows = 2 * TINY["training.local_batch_size"] * layout.gpus // prod(degrees)  # two micro-batches a step
    named = {"job.config_file": "configs/tiny.toml", "job.dump_folder": folder, "training.global_batch_size": rows}
    options = named | TINY | layout.options
    if layout.finetunes:
        from tests.finetuned import write_base

        folder.mkdir(exist_ok=True)
        write_base(folder / "base")
        (folder / "rows.jsonl").write_text('{"instruction": "Count.", "output": "One, two, three."}\n' * 64)
        (folder / "finetune.toml").write_text(
            f'[data]\nsources = [{{ kind = "jsonl", path = "{folder}/rows.jsonl" }}]\n[base_model]\npath = "{folder}/base"\n'
        )
        options |= {"job.config_file": folder / "finetune.toml", "training.seq_len": 128}
        del options["training.mixed_precision_param"]
    arguments = [
        part for name, value in options.items() for part in (f"--{name}", "false" if value is False else str(value))
    ]
    if layout.finetunes:
        from farsight.training.finetune.model import load_finetune_config

        return load_finetune_config(arguments)
    from farsight.configs.load import load_config

    return load_config(arguments)
