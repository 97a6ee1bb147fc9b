"""Finds changes with which a run fits: tries a list of them, mildest first."""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from farsight.configs.check import check, model_parallel_ranks
from farsight.configs.schema import JobConfig
from farsight.errors import ConfigError

C = TypeVar("C", bound=JobConfig)

Options = dict[str, Any]
"""Values by `section.key`, as on the command line."""

DEGREES = (2, 4, 8, 16, 32)
"""Degrees of parallelism to try."""


def changed(config: C, options: Options) -> C:
    """A copy of the config with these options set.

    Raises:
        ConfigError: they contradict other settings.
    """
    new = copy.deepcopy(config)
    # Validation uses training's batch size unless it is set.
    follows = new.validation.local_batch_size == new.training.local_batch_size
    for name, value in options.items():
        section, key = name.split(".")
        setattr(new, section, dataclasses.replace(getattr(new, section), **{key: value}))
    if follows:
        new.validation.local_batch_size = new.training.local_batch_size
    check(new)
    return new


def suggest(config: JobConfig, gpus: int, fits: Callable[[JobConfig], bool]) -> Options | None:
    """The first change with which the run fits; None if none of those tried helps.

    Args:
        fits: whether a config's plan fits; may raise ConfigError for one that can't run.
    """
    for options in _candidates(config, gpus):
        try:
            if fits(changed(config, options)):
                return options
        except ConfigError:
            continue
    return None


def as_options(options: Options) -> str:
    """The options as command-line arguments."""
    return " ".join(
        f"--{name} {str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items()
    )


def _candidates(config: JobConfig, gpus: int) -> Iterator[Options]:
    """Single changes, then all that cost little speed together, then those combined with the others."""
    checkpointing: list[Options] = []
    if config.activation_checkpoint.mode != "full":
        checkpointing.append({"activation_checkpoint.mode": "full"})
    filled = [_pipelined(config, {}, gpus)] if config.parallelism.pipeline_parallel_degree > 1 else []
    batches: list[Options] = [
        {"training.local_batch_size": size} for size in _smaller(config.training.local_batch_size)
    ]
    p = config.parallelism
    everywhere: Options = {
        "parallelism.data_parallel_replicate_degree": 1,
        "parallelism.data_parallel_shard_degree": -1,
    }
    sharding = [everywhere] if (p.data_parallel_replicate_degree, p.data_parallel_shard_degree) != (1, -1) else []
    tensor, context = ([*_degrees(config, name, gpus)] for name in ("tensor", "context"))
    pipeline = [_pipelined(config, options, gpus) for options in _degrees(config, "pipeline", gpus)]
    offload: list[Options] = [{"training.enable_cpu_offload": True}]
    yield from (*checkpointing, *filled, *batches, *sharding, *tensor, *context, *pipeline, *offload)

    together: Options = {}
    for options in (*checkpointing, *batches[-1:], *sharding):
        together |= options
    yield together
    yield from (together | options for options in (*tensor, *context, *pipeline, *offload))
    for degree in tensor:
        yield from (together | degree | options for options in (*context, *offload))
    for degree in tensor[-1:]:
        yield from (together | degree | options | offload[0] for options in context)


def _smaller(size: int) -> list[int]:
    return [divisor for divisor in range(size - 1, 0, -1) if size % divisor == 0]


def _degrees(config: JobConfig, name: str, gpus: int) -> Iterator[Options]:
    key = f"{name}_parallel_degree"
    now, shard = getattr(config.parallelism, key), config.parallelism.data_parallel_shard_degree
    for degree in DEGREES:
        if degree > now and (name != "tensor" or degree <= 8):
            freed = {} if shard == -1 else {"parallelism.data_parallel_shard_degree": -1}
            yield {f"parallelism.{key}": degree, **freed}


def _pipelined(config: JobConfig, options: Options, gpus: int) -> Options:
    """Adds as many micro-batches as the global batch has for each pipeline, as fewer would leave ranks waiting."""
    now = config.parallelism.pipeline_parallel_degree
    others = model_parallel_ranks(config) // now
    copies = gpus // (others * options.get("parallelism.pipeline_parallel_degree", now))
    batch = config.training.global_batch_size
    if batch < 1 or copies < 1 or batch % copies:
        return options
    return options | {"training.local_batch_size": batch // copies}
