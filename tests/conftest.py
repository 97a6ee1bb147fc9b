"""Fixtures and marks for all tests. Without a GPU, Triton's kernels are interpreted: its variable is set before it is imported."""

import gc
import os
import re
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton") and version("triton").startswith("3.6."):
        # Its interpreter converts arrays of one number with int(), which NumPy refuses from 2.4 on.
        from triton.runtime import interpreter

        patch_tensors = interpreter._patch_lang_tensor

        def patch_tensors_and_index(tensor, scope):
            patch_tensors(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

        interpreter._patch_lang_tensor = patch_tensors_and_index


def pytest_collection_modifyitems(items):
    """Marks the tests of files that start processes, so that `make test-quick` can leave them out."""

    @cache
    def starts_processes(path):
        return re.search(
            r"tests\.running|run_elsewhere|subprocess|[Ff]orked|multiprocessing|\.spawn\(",
            path.read_text(encoding="utf-8"),
        )

    for item in items:
        if starts_processes(item.path):
            item.add_marker("processes")


def pytest_collection_finish():
    """Spares collections the objects of all modules and tests: trainers and benchmarks collect often."""
    gc.freeze()


@pytest.fixture(autouse=True)
def no_rank_variables():
    """Removes the rank variables that a trainer sets in this process: Accelerate would start a process group by them."""
    yield
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


@pytest.fixture
def unreadable(monkeypatch):
    """Makes a file raise an error when it is opened, as a network file system may for a while."""
    broken, opened = {}, Path.open

    def fail(path, *arguments, **options):
        if path in broken:
            raise broken[path]
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", fail)
    return broken.__setitem__


@pytest.fixture
def start_run(tmp_path):
    """Starts runs in one run folder, one after the other, in a process group of one rank."""
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
