"""Without a GPU Triton's kernels are interpreted: it has to be said before anything imports Triton."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def unreadable(monkeypatch):
    """Has a file raise when it is opened, as a network file system may for a while."""
    broken, opened = {}, Path.open

    def fail(path, *arguments, **options):
        if path in broken:
            raise broken[path]
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", fail)
    return broken.__setitem__


@pytest.fixture
def start_run(tmp_path):
    """Managers of one run folder, one after the other, in a process group of one rank."""
    from tests.checkpoints.saved_runs import Run

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    runs = []

    def start(**options):
        runs.append(Run(tmp_path / "run", **options))
        return runs[-1]

    yield start
    for started in runs:
        started.manager.close()
    dist.destroy_process_group()
