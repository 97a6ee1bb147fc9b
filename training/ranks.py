"""Errors between ranks: a wrong number of processes, a failed rendezvous, a lost rank."""

import os
from typing import NamedTuple

import torch.distributed as dist

from farsight.configs.check import check_processes, model_parallel_ranks
from farsight.configs.schema import JobConfig
from farsight.errors import ConfigError
from farsight.training.hangs.watch import explain


def check_layout(config: JobConfig, processes: int) -> None:
    """Refuses to run with a number of processes that the layout does not fit.

    Raises:
        ConfigError: with the number of processes needed, and how to start them.
    """
    try:
        check_processes(config, processes)
    except ConfigError as error:
        p = config.parallelism
        needed = model_parallel_ranks(config) * p.data_parallel_replicate_degree * max(1, p.data_parallel_shard_degree)
        if needed == processes:
            raise
        raise ConfigError(
            f"{error} This run has {processes}; start {needed}{' or a multiple' * (p.data_parallel_shard_degree == -1)} with "
            f"torchrun --nproc_per_node {needed} train.py …, or farsight recipe … --nproc {needed}."
        ) from error


class Lost(NamedTuple):
    """The message of a rank that failed because of another one."""

    sentence: str
    follows: bool = True
    """Another rank knows better why."""
    said: bool = False
    """Another rank has logged the same sentence."""


def lost_rank(error: BaseException) -> Lost | None:
    """Returns the message for a rank that failed because of another rank, or None for other errors."""
    text = str(error).strip()
    first = text.partition("\n")[0].partition(". ")[0]
    # gloo raises plain RuntimeErrors.
    if not (isinstance(error, dist.DistError) or (type(error) is RuntimeError and ("gloo" in text or "NCCL" in text))):
        return None
    if dist.is_initialized():
        if (hang := explain(error)) is not None:
            sentence, said = hang
            return Lost(sentence, follows=said, said=said)
        return Lost(f"lost contact with another rank, whose own message says why ({first})")
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if "EADDRINUSE" in text or "in use" in text:
        return Lost(
            f"the ranks can't meet at {place} (MASTER_ADDR, MASTER_PORT): another program uses that port; name another."
        )
    return Lost(f"the ranks did not meet at {place} (MASTER_ADDR, MASTER_PORT): {first}")
