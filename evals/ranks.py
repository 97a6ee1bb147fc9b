"""Processes started by torchrun that share an evaluation's work."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def sharing_processes() -> Iterator[tuple[int, int]]:
    """Yields this process's rank and the number of processes. They exchange only a few figures, so on the CPU."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield 0, 1
        return
    dist.init_process_group("gloo")
    try:
        yield rank, world
    finally:
        dist.destroy_process_group()
