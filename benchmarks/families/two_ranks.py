"""Families of models divided over two ranks, compared with transformers: a training step, and decoding through the cache.

    torchrun --nproc_per_node 2 -m benchmarks.families.two_ranks FOLDER NAME [NAME …]

Writes FOLDER/NAME.json with the largest difference of each; `cells.tensor_parallel` starts it.
"""

import dataclasses
import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from farsight.benchmarks.families.cells import PROMPT, by_hf_names, gradients_of, hf_load, largest, loss, relative
from farsight.benchmarks.families.models import LENGTH, tokens, write_hf
from farsight.checkpoints.load import load_model, read_model_config
from farsight.checkpoints.model_dir.api import directory_names
from farsight.configs.load import build_config
from farsight.inference.decoder import Decoder
from farsight.parallel.device import prepare_device
from farsight.parallel.tensor import apply_tensor_parallel, shard_for_decoding


def training_step(directory: Path, mesh: DeviceMesh) -> float:
    """Loss and gradients of every parameter under tensor parallelism with sequence parallelism, relative to the largest of each."""
    config = build_config(
        {
            "architecture": dataclasses.asdict(read_model_config(directory).architecture),
            "training": {"seq_len": LENGTH, "local_batch_size": 2, "mixed_precision_param": "float32"},
            "parallelism": {"tensor_parallel_degree": mesh.size()},
        }
    )
    divide = partial(apply_tensor_parallel, mesh=mesh, config=config)
    ours, _ = load_model(directory, length=LENGTH, divide=divide)
    theirs, rows = hf_load(directory), tokens()
    ours.train().requires_grad_(True)
    labels = torch.cat([rows[:, 1:], torch.full_like(rows[:, :1], -100)], dim=1)
    found = ours(rows, labels=labels) / (labels >= 0).sum()
    expected = loss(theirs(rows).logits, rows)
    found.backward()
    expected.backward()
    gradients = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients_of(ours).items()}
    named = by_hf_names(gradients, directory_names(directory))
    return max(largest(found, expected), relative(named, gradients_of(theirs)))


def decoding(directory: Path, mesh: DeviceMesh) -> float:
    """Logits of tokens that are read one at a time after a prompt."""
    ours, config = load_model(directory, divide=partial(shard_for_decoding, mesh=mesh))
    rows, decoder = tokens(), Decoder(ours, config)
    state = decoder.start([PROMPT] * len(rows), LENGTH - PROMPT)
    parts = [decoder.logits(state.read(rows[:, :PROMPT]))]
    parts += [decoder.logits(state.read(column)) for column in rows[:, PROMPT:].split(1, dim=1)]
    with torch.no_grad():
        return largest(torch.cat(parts, dim=1), hf_load(directory)(rows).logits)


def main() -> None:
    folder, *names = sys.argv[1:]
    prepare_device()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for name in names:
        directory = Path(folder) / name
        if dist.get_rank() == 0:
            write_hf(name, directory)
        dist.barrier()
        differences = torch.tensor([max(training_step(directory, mesh), decoding(directory, mesh))])
        dist.all_reduce(differences, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            (Path(folder) / f"{name}.json").write_text(json.dumps(differences.item()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
