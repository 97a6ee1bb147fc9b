"""Completes a fine-tuning config from its base."""

from dataclasses import replace

from farsight.configs.finetuning import FinetuneConfig
from farsight.configs.schema import NoRotary
from farsight.model.build import ModelConfig


def take_base(config: FinetuneConfig, base: ModelConfig, names_theta: bool) -> None:
    """Fills in the base's shapes, and its positions and trained length if the config has none of its own.

    GARFA factors that the base has learned belong to its weights: new positions keep them, unless they set
    `[position.garfa] layers = []`. They also keep the RoPE base, unless the config sets one.

    Args:
        names_theta: whether the config sets position.rotary.theta.
    """
    position, theirs = config.position or base.position, base.position.rotary
    if not (names_theta or isinstance(position.rotary, NoRotary) or isinstance(theirs, NoRotary)):
        position = replace(position, rotary=replace(position.rotary, theta=theirs.theta))
    if position.garfa is None:
        position = replace(position, garfa=base.position.garfa)
    config.architecture, config.position = base.architecture, position
    config.trained_length = config.trained_length or max(base.trained_length, config.training.seq_len)
