"""Work that one rank does for all, and errors that are raised on all ranks when one fails."""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from farsight.parallel.device import wait_for_rank_zero

T = TypeVar("T")


def on_rank_zero(work: Callable[[], T], may_take_hours: bool = False) -> T:
    """Runs `work` on rank 0 only; its result or error is returned or raised on every rank. Collective.

    Args:
        may_take_hours: the work may take longer than the timeout of a collective.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except Exception as error:
            outcome[1] = portable(error)
    if may_take_hours:
        wait_for_rank_zero()
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(outcome)
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


def on_every_rank(work: Callable[[], T], may_take_hours: bool = False) -> list[T]:
    """Runs `work` on every rank and returns all results, by rank; the first error is raised on all. Collective.

    Args:
        may_take_hours: the work may take longer than the timeout of a collective.
    """
    own: list[Any] = [None, None]
    try:
        own[0] = work()
    except Exception as error:
        own[1] = portable(error)
    if may_take_hours:
        wait_for_rank_zero()
    outcomes = [own] * dist.get_world_size()
    if dist.get_world_size() > 1:
        dist.all_gather_object(outcomes, own)
    errors = [error for _, error in outcomes if error is not None]
    if errors:
        raise errors[0]
    return [result for result, _ in outcomes]
