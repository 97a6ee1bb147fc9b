"""The ranks of a run as device meshes: which ranks share a batch, a model's shards, a sequence, a layer or a pipeline."""

import os
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend "fake"

from farsight.configs.schema import JobConfig
from farsight.parallel.device import default_device


def connect(config: JobConfig) -> None:
    """Connects the run's processes, unless they already are; torch's flight recorder keeps their last collectives.

    The recorder dumps NCCL's by itself if one times out; `training.hangs` dumps those of any backend.
    """
    if dist.is_initialized():
        return
    device, comm = default_device().type, config.comm
    backend = dist.Backend.default_device_backend_map.get(device, "gloo")
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(comm.trace_buf_size if os.environ["WORLD_SIZE"] != "1" else 0)
    if device != "cpu":
        if config.training.enable_cpu_offload:
            backend = f"{device}:{backend},cpu:gloo"  # gradients are clipped on the host
        # 3: clean up without aborting, so that the recorder has time to write.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"
        if comm.trace_buf_size:
            traces = os.path.join(config.job.dump_folder, comm.save_traces_folder)
            os.makedirs(traces, exist_ok=True)
            os.environ |= {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_DUMP_TEMP_FILE": os.path.join(traces, "rank_")}
    dist.init_process_group(backend, timeout=timedelta(seconds=comm.init_timeout_seconds))


@dataclass
class ParallelDims:
    """The degrees of parallelism, and a mesh of ranks for each.

    Ranks are numbered with tensor parallelism innermost, then context, shard, replicate and pipeline parallelism.

    Raises:
        ValueError: the degrees do not multiply to the number of ranks.
    """

    world_size: int
    dp_replicate: int = 1
    dp_shard: int = 1
    """−1 takes the ranks that the other degrees leave."""
    cp: int = 1
    tp: int = 1
    pp: int = 1
    _meshes: dict[str, DeviceMesh] = field(default_factory=dict)

    def __post_init__(self) -> None:
        others = self.dp_replicate * self.cp * self.tp * self.pp
        if self.dp_shard == -1:
            self.dp_shard = self.world_size // others
        if others * self.dp_shard != self.world_size:
            raise ValueError(f"{others} × {self.dp_shard} (dp_shard) is not the number of ranks, {self.world_size}")

    @classmethod
    def of(cls, config: JobConfig, world_size: int) -> "ParallelDims":
        """The degrees that a config asks for."""
        p = config.parallelism
        return cls(
            world_size, p.data_parallel_replicate_degree, p.data_parallel_shard_degree, p.context_parallel_degree,
            p.tensor_parallel_degree, p.pipeline_parallel_degree,
        )  # fmt: skip

    @property
    def batch(self) -> int:
        """Ranks that hold different rows of the batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Ranks that share a copy of the weights: context-parallel ranks hold shards too."""
        return self.dp_shard * self.cp

    @property
    def loss(self) -> int:
        """Ranks that hold different rows or tokens."""
        return self.batch * self.cp

    def mesh(self, name: str) -> DeviceMesh | None:
        """The mesh of this rank's peers, None if it is alone.

        Args:
            name: "batch" (other rows), "loss" (other rows or tokens), "dp_replicate" (copies of the weights), "fsdp" (shards of
                them), "cp" (the rest of the sequence), "tp" (of the layer) or "pp" (of the stages).
        """
        degree: int = getattr(self, name)
        return self._all()[name] if degree > 1 else None

    def need(self, name: str) -> DeviceMesh:
        """The mesh of peers that this rank must have."""
        mesh = self.mesh(name)
        assert mesh is not None, f"the {name} mesh has one rank"
        return mesh

    def data_mesh(self) -> DeviceMesh:
        """What FSDP shards over, and replicates over if there are copies (HSDP); also where either is a single rank."""
        self._all()
        return self._weights["dp_replicate", "fsdp"] if self.dp_replicate > 1 else self._weights["fsdp"]

    def shards(self) -> dist.ProcessGroup | None:
        """The ranks that hold the parts of one copy of a layer's weights, tensor parallelism innermost; None if one holds all."""
        if self.fsdp == 1 or self.tp == 1:
            mesh = self.mesh("fsdp") or self.mesh("tp")
            return None if mesh is None else mesh.get_group()
        if "shards" not in self._all():
            both = self._divided(pp=self.pp, dp_replicate=self.dp_replicate, shards=self.fsdp * self.tp)
            self._meshes["shards"] = both["shards"]
        return self._meshes["shards"].get_group()

    def set_timeout(self, seconds: int) -> None:
        """Sets the time limit of all collectives, after a barrier: a slow rank may still be in one under the former limit."""
        dist.barrier(device_ids=None if default_device().type == "cpu" else [torch.accelerator.current_device_index()])
        if default_device().type != "cpu":
            torch.accelerator.synchronize()
        groups = [mesh.get_group() for mesh in self._all().values() if mesh.size() > 1]
        for group in (*groups, None):
            _set_pg_timeout(timedelta(seconds=seconds), group)

    def _all(self) -> dict[str, DeviceMesh]:
        """Makes the meshes on first use, when all ranks have connected."""
        if not self._meshes:
            self._weights = self._divided(pp=self.pp, dp_replicate=self.dp_replicate, fsdp=self.fsdp, tp=self.tp)
            data = self._divided(pp=self.pp, batch=self.batch, cp=self.cp, tp=self.tp)
            loss = self._divided(pp=self.pp, loss=self.loss, tp=self.tp)
            self._meshes = {name: self._weights[name] for name in ("pp", "dp_replicate", "fsdp", "tp")} | {
                "batch": data["batch"], "cp": data["cp"], "loss": loss["loss"],
            }  # fmt: skip
        return self._meshes

    def _divided(self, **degrees: int) -> DeviceMesh:
        """All ranks as a grid; dimensions of one rank get no process group of their own."""
        assert prod(degrees.values()) == self.world_size
        alone: Any = {name: "fake" for name, degree in degrees.items() if degree == 1}
        return init_device_mesh(
            default_device().type, tuple(degrees.values()), mesh_dim_names=tuple(degrees), backend_override=alone
        )
