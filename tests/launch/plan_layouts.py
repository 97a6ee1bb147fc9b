"""Prints the bytes that one rank of a recipe's layout allocates on the meta device; `test_plan.py` runs it.

    python -m tests.plan_layouts '[{"recipe": "lasp_llama3_8b", "gpus": 64, "options": {}}, …]'

Process groups are fake: their ranks exist in number alone. So a process is needed that no other test shares. Each stage is
built by the repository's own `parallelize` and `pipeline` on the recipe's GPUs, for the first rank, and the last of a
pipeline, and AdamW steps once.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from farsight.configs.schema import JobConfig
from farsight.configs.shipped import shipped_configs
from farsight.model.build import ModelConfig, build_model, freeze_all_but, trained_layers
from farsight.parallel.device import prepare_device
from farsight.parallel.meshes import ParallelDims
from farsight.parallel.parallelize import parallelize
from farsight.parallel.pipeline import LossShare, pipeline
from farsight.training.stages import load_recipe

CONFIGS = shipped_configs()


def parts_of_rank(config: JobConfig, rank: int, gpus: int) -> list[nn.Module]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=gpus)
    dims = ParallelDims.of(config, gpus)
    with torch.device("meta"):
        model = build_model(ModelConfig.from_job(config))
    freeze_all_but(model, trained_layers(config))
    if dims.pp > 1:
        config.training.local_batch_size = max(config.training.local_batch_size, dims.pp)  # as the schedule asks for
        _, parts = pipeline(model, dims, config, torch.device("cpu"), LossShare())
        return parts
    return [parallelize(model, dims, config)]


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def optimizer_bytes(parameters: list[nn.Parameter]) -> int:
    trained = [p for p in parameters if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=False)  # a loop: lists of DTensors take the dispatcher minutes
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return sum(local(value).nbytes for state in optimizer.state.values() for value in state.values())


def main(cases: list[dict]) -> None:
    prepare_device()
    known: dict[tuple, int] = {}  # stages that differ in length or position alone have the same optimizer
    for case in cases:
        _, stages = load_recipe(CONFIGS[case["recipe"]], case["options"])
        for stage in stages:
            pipelined = stage.config.parallelism.pipeline_parallel_degree > 1
            for rank in (0, case["gpus"] - 1) if pipelined else (0,):
                parts = parts_of_rank(stage.config, rank, case["gpus"])
                parameters = [parameter for part in parts for parameter in part.parameters()]
                alike = tuple((*local(p).shape, p.requires_grad) for p in parameters)
                if alike not in known:
                    known[alike] = optimizer_bytes(parameters)
                held = sum(local(p).nbytes for p in parameters)
                row = {**case, "stage": stage.name, "rank": rank, "parameters": held, "optimizer": known[alike]}
                print(json.dumps(row), flush=True)
                dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
