"""Settings of position probes and their training."""

from dataclasses import dataclass
from typing import Literal

from farsight.errors import ConfigError

Kind = Literal["mlp", "linear"]
Target = Literal["class", "number"]
"""The probe's target: the position as one of many classes, or as a share of the sequence."""


@dataclass(frozen=True)
class ProbeSettings:
    """Settings of the probes, their data and their training.

    Raises:
        ConfigError: a setting that nothing can be trained with.
    """

    length: int
    """Tokens per sequence, and so the number of possible positions."""
    probe: Kind = "mlp"
    target: Target = "number"
    epochs: int = 5
    width: int = 128
    """Units in the MLP's hidden layer."""
    learning_rate: float = 3e-3
    batch: int = 256
    """Tokens per step."""
    held_out: float = 0.2
    """Share of the sequences held out to measure the error on."""
    tokens_per_sequence: int = 1024
    """At most, and drawn uniformly of longer sequences: all tokens at the paper's length, and no more memory beyond it."""
    buckets: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.length < 2:
            raise ConfigError(f"--length {self.length}: there is one position; set 2 or more.")
        if not 1 <= self.buckets <= self.length:
            raise ConfigError(f"--buckets {self.buckets}: set from 1 to the {self.length} tokens of a sequence.")
