"""What a fine-tuning config takes from its base."""

from dataclasses import replace

from configs.finetuning import FinetuneConfig
from model.build import ModelConfig


def take_base(config: FinetuneConfig, base: ModelConfig) -> None:
    """Fills in the base's shapes, and its positions and trained length where the config has none of its own.

    GARFA that the base has learned belongs to its weights: other positions keep it, unless they say
    `[position.garfa] layers = []`.
    """
    position = config.position or base.position
    if position.garfa is None:
        position = replace(position, garfa=base.position.garfa)
    config.architecture, config.position = base.architecture, position
    config.trained_length = config.trained_length or max(base.trained_length, config.training.seq_len)
