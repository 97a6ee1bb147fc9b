"""Learning-rate schedules: a function of the step alone, so that a resumed run needs no state for them."""

import math
from collections.abc import Callable
from functools import partial

from farsight.configs.finetuning import FinetuneConfig, GarfaTraining
from farsight.configs.schema import JobConfig

Rate = Callable[[int], float]
"""The learning rate at a step, counted from 0, as a share of its peak."""


def schedule(config: JobConfig) -> Rate:
    """The schedule of `[lr_scheduler]`."""
    s = config.lr_scheduler
    total = s.total_steps or config.training.steps
    decay = total - config.warmup_steps
    if s.decay_ratio is not None:
        decay = min(decay, round(total * s.decay_ratio))
    return partial(
        rate, total=total, warmup=config.warmup_steps, decay=decay, shape=s.decay_type, least=s.min_lr_factor
    )


def garfa_schedule(config: FinetuneConfig) -> Rate:
    """The schedule of `[garfa]`: warm-up, then a cosine."""
    g: GarfaTraining = config.garfa
    steps, warmup = config.training.steps, round(g.warmup_ratio * config.training.steps)
    return partial(rate, total=steps, warmup=warmup, decay=steps - warmup, shape="cosine", least=g.min_lr_factor)


def rate(step: int, *, total: int, warmup: int, decay: int, shape: str, least: float) -> float:
    """Rises linearly to 1 over the warm-up, stays there, and falls to `least` over the last steps.

    Args:
        step: from 0.
        total, warmup, decay: steps of the schedule, of its warm-up and of its decay.
        shape: "linear", "sqrt" or "cosine".
        least: value at the end of the decay.
    """
    if step < warmup:
        return (step + 1) / warmup
    # The decay would end one step after the last, so that the last step still learns.
    progress = (step - (total - decay)) / max(1, decay)
    if progress <= 0:
        return 1.0
    match shape:
        case "linear":
            left = 1 - progress
        case "sqrt":
            left = 1 - math.sqrt(progress)
        case _:
            left = 0.5 * (1 + math.cos(math.pi * progress))
    return least + (1 - least) * left
