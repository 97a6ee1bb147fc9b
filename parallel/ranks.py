"""Work that one rank does for all, or that fails on all ranks where it fails on one."""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from farsight.parallel.device import wait_for_rank_zero

T = TypeVar("T")


def on_rank_zero(work: Callable[[], T], for_hours: bool = False) -> T:
    """Does work on rank 0 alone; what it returns or raises is returned or raised on every rank.

    Args:
        for_hours: the work may take longer than a collective waits.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except Exception as error:
            outcome[1] = _portable(error)
    if for_hours:
        wait_for_rank_zero()
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _portable(error: Exception) -> Exception:
    """The error, or one with its text where it can't travel between processes: then the others would wait for ever."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def on_every_rank(work: Callable[[], T], for_hours: bool = False) -> list[T]:
    """Does work on every rank and returns what each of them returned; the first error is raised on all.

    Args:
        for_hours: the work may take longer than a collective waits.
    """
    own: list[Any] = [None, None]
    try:
        own[0] = work()
    except Exception as error:
        own[1] = _portable(error)
    if for_hours:
        wait_for_rank_zero()
    outcomes = [own] * dist.get_world_size()
    if dist.get_world_size() > 1:
        dist.all_gather_object(outcomes, own)
    errors = [error for _, error in outcomes if error is not None]
    if errors:
        raise errors[0]
    return [result for result, _ in outcomes]
