"""Training steps of real configs on GPUs that don't exist: host syncs, dispatches and collectives of one step, as JSON lines.

python -m tests.fake_gpu.steps LAYOUT …        all layouts without an argument
"""

from tests.fake_gpu import device  # isort: skip  before torch is imported

import json
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.fake_gpu.layouts import DECODED, LAYOUTS, STEPS, Layout, config_of


def trainer_of(layout: Layout, folder: Path) -> Any:
    """The trainer of a layout on rank 0."""
    from farsight.training.finetune.trainer import Finetuner
    from farsight.training.trainer import Trainer

    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(layout.gpus)}
    os.environ |= ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    config = config_of(layout, folder)
    with device.FakeGpu() as gpu:
        trainer = (Finetuner if layout.finetunes else Trainer)(config)
    return trainer, gpu


class Recorded(Exception):  # noqa: N818  no error
    """Ends the training."""


def step(name: str, layout: Layout) -> dict[str, Any]:
    """Records a step that is not logged on rank 0, from its start to the start of the next."""
    folder = Path(tempfile.mkdtemp())
    trainer, gpu = trainer_of(layout, folder)
    found: dict[str, Any] = {"layout": name, "syncs while building": sum(gpu.syncs.values())}
    train_step, meshes = trainer.train_step, {}
    for mesh in ("batch", "loss", "pp", "tp", "cp", "dp_replicate", "fsdp"):  # the last that has a group names it
        if (ranks := trainer.dims.mesh(mesh)) is not None:
            meshes[ranks.get_group().group_name] = mesh

    def recorded(*args: Any) -> None:
        if trainer.step == STEPS:
            found.update(
                syncs=dict(gpu.syncs),
                uploads=dict(gpu.uploads),
                dispatches=gpu.dispatches.total(),
                launches=gpu.launches.total(),
                collectives={f"{meshes.get(name, 'all')} {kind}": n for (name, kind), n in gpu.collectives.items()},
            )
            raise Recorded
        gpu.clear()
        train_step(*args)

    trainer.train_step = recorded
    try:
        with gpu, suppress(Recorded):
            trainer.train()
    finally:
        trainer.close()
        device.dist.destroy_process_group()
        shutil.rmtree(folder)
    return found


def decoded() -> dict[str, Any]:
    """Records two decoded tokens: one that warms up, and one that is replayed from a CUDA graph."""
    import torch

    from farsight.inference.decoder import Decoder
    from farsight.inference.step import WARM_UP, Step
    from farsight.model.build import ModelConfig, build_model

    model_config = ModelConfig.from_job(config_of(Layout(), Path("unused")))
    found: dict[str, Any] = {"layout": DECODED}
    with device.FakeGpu() as gpu:
        with torch.device("meta"):
            model = build_model(model_config).bfloat16()
        model.to_empty(device="cuda")
        model.init_weights(buffer_device=torch.device("cuda"))
        decoder = Decoder(model.eval(), model_config, chunk=128)
        rows = decoder.start([200, 150], new_tokens=20)
        gpu.clear()
        for h_BLD in rows.chunks(torch.zeros(2, 200, dtype=torch.int64, device="cuda")):
            logits_BLV = model.head(h_BLD).float()
        found["syncs in the prompt"] = dict(gpu.syncs)
        step = Step(rows, logits_BLV[:, -1], model_config.architecture.vocab_size)
        for number in range(WARM_UP + 2):
            gpu.clear()
            step()
            if number == WARM_UP - 1:
                found |= {
                    "syncs": dict(gpu.syncs),
                    "dispatches": gpu.dispatches.total(),
                    "launches": gpu.launches.total(),
                }
        found["replayed"] = dict(gpu.dispatches + gpu.launches)
    return found


if __name__ == "__main__":
    from farsight.kernels import head_rotation
    from farsight.kernels.scoped_attention import choice

    # Their trials need numbers.
    choice._pick = lambda kind, dtype, head_dim, decode: "banded" if kind == "cpu" else "triton" if decode else "hybrid"
    head_rotation._tried = lambda *args: True
    for name in sys.argv[1:] or [*LAYOUTS, DECODED]:
        print(json.dumps(decoded() if name == DECODED else step(name, LAYOUTS[name])), flush=True)
    os._exit(0)
