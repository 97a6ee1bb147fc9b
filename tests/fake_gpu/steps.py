"""Training steps of real configs on GPUs that don't exist: host syncs, dispatches and collectives of one step, as JSON.

python -m tests.fake_gpu.steps LAYOUT …        all layouts without an argument
"""

from tests.fake_gpu import device  # isort: skip  before torch is imported

import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Layout:
    """A config on a number of GPUs."""

    gpus: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    config: str = "configs/tiny.toml"


SIZE_8B = {
    "model.flavor": "8b", "tokenizer.kind": "bytes", "parallelism.context_parallel_degree": 8, "training.seq_len": 131072,
    "training.local_batch_size": 1, "training.global_batch_size": 1, "activation_checkpoint.mode": "full",
}  # fmt: skip
LAYOUTS = {
    "one GPU": Layout(),
    "FSDP 8": Layout(8),
    "HSDP 2 × 4": Layout(8, {"parallelism.data_parallel_replicate_degree": 2}),
    "DDP 2": Layout(2, {"parallelism.data_parallel_replicate_degree": 2, "parallelism.data_parallel_shard_degree": 1}),
    "TP 2 × FSDP 2": Layout(4, {"parallelism.tensor_parallel_degree": 2}),
    "CP 4": Layout(4, {"parallelism.context_parallel_degree": 4}),
    "8B, CP 8": Layout(8, SIZE_8B),
}
STEPS = 4
TINY = {
    "training.steps": STEPS, "lr_scheduler.warmup_steps": 1, "validation.enable": False, "tokenizer.kind": "bytes",
    "training.mixed_precision_param": "bfloat16", "training.global_batch_size": 16, "training.local_batch_size": 2,
    "checkpoint.enable": False, "metrics.enable_tensorboard": False, "metrics.log_freq": 100,
}  # fmt: skip


def trainer_of(layout: Layout, folder: Path) -> Any:
    """The trainer of a layout on rank 0."""
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(layout.gpus),
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }
    from farsight.configs.load import load_config
    from farsight.training.trainer import Trainer

    options = {"job.config_file": layout.config, "job.dump_folder": str(folder), **TINY, **layout.options}
    arguments = [
        part
        for name, value in options.items()
        for part in (f"--{name}", str(value).lower() if isinstance(value, bool) else str(value))
    ]
    return Trainer(load_config(arguments))


def step(name: str, layout: Layout) -> dict[str, Any]:
    """What a step that is not logged asks of the device on rank 0, from its start to the start of the next."""
    folder = Path(tempfile.mkdtemp())
    with device.FakeGpu() as gpu:
        trainer = trainer_of(layout, folder)
        found: dict[str, Any] = {"layout": name, "syncs while building": sum(gpu.syncs.values())}
        train_step, meshes = trainer.train_step, {}
        for mesh in ("batch", "loss", "pp", "tp", "cp", "dp_replicate", "fsdp"):  # the last that has a group names it
            if (ranks := trainer.dims.mesh(mesh)) is not None:
                meshes[ranks.get_group().group_name] = mesh

        def recorded(*args: Any) -> None:
            if trainer.step == STEPS:
                found.update(
                    syncs={" ".join(key): count for key, count in gpu.syncs.items()},
                    uploads=dict(gpu.uploads),
                    dispatches=sum(gpu.dispatches.values()),
                    launches=sum(gpu.launches.values()),
                    collectives={
                        f"{meshes.get(name, 'all')} {kind}": counts for (name, kind), counts in gpu.collectives.items()
                    },
                )
            gpu.clear()
            train_step(*args)

        trainer.train_step = recorded
        try:
            trainer.train()
        finally:
            trainer.close()
            device.dist.destroy_process_group()
            shutil.rmtree(folder)
    return found


if __name__ == "__main__":
    from farsight.kernels import head_rotation
    from farsight.kernels.scoped_attention import choice

    # Their trials need numbers.
    choice._pick = lambda kind, dtype, head_dim, decode: "banded" if kind == "cpu" else "triton" if decode else "hybrid"
    head_rotation._tried = lambda *args: True
    for name in sys.argv[1:] or LAYOUTS:
        print(json.dumps(step(name, LAYOUTS[name]), indent=1), flush=True)
    os._exit(0)
