"""Work on files that ranks wait for, however long it takes, and errors that are raised on all ranks when one fails."""

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

T = TypeVar("T")

_files: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def file_group() -> dist.ProcessGroup:
    """The group in which ranks wait for each other's files, made at its first use. Collective."""
    world = dist.group.WORLD
    assert world is not None
    if world not in _files:
        _files[world] = new_file_group()
    return _files[world]


def new_file_group() -> dist.ProcessGroup:
    """Another such group, for a thread of its own: gloo, with a time limit of 12 hours. Collective.

    `comm.train_timeout_seconds` is a limit for collectives between GPUs, and a slow disk may keep one rank longer than that.
    """
    return dist.new_group(backend="gloo", timeout=timedelta(hours=12))


def on_rank_zero(work: Callable[[], T]) -> T:
    """Runs `work` on rank 0 only; its result or error is returned or raised on every rank. Collective, and may take hours."""
    group = file_group()  # made first: the work may take longer than the others would wait for a new group
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except Exception as error:
            outcome[1] = portable(error)
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(outcome, group=group)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def portable(error: Exception) -> Exception:
    """The error itself, or a RuntimeError with its text if it can't be pickled: other ranks would wait forever."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def on_every_rank(work: Callable[[], T]) -> list[T]:
    """Runs `work` on every rank and returns all results, by rank; the first error is raised on all.

    Collective, and may take hours.
    """
    group = file_group()
    own: list[Any] = [None, None]
    try:
        own[0] = work()
    except Exception as error:
        own[1] = portable(error)
    outcomes = [own] * dist.get_world_size()
    if dist.get_world_size() > 1:
        dist.all_gather_object(outcomes, own, group=group)
    errors = [error for _, error in outcomes if error is not None]
    if errors:
        raise errors[0]
    return [result for result, _ in outcomes]
