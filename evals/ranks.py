"""Processes that share an evaluation's work, as torchrun starts them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def sharing_processes() -> Iterator[tuple[int, int]]:
    """This process's rank and how many there are; they exchange a few figures, on the CPU."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield 0, 1
        return
    dist.init_process_group("gloo")
    try:
        yield rank, world
    finally:
        dist.destroy_process_group()
