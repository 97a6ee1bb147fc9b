"""Scaled RoPE for models that were trained without scaling."""

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from farsight.configs.schema import (
    DynamicNtkRope,
    LinearRope,
    Llama3Rope,
    NoRotary,
    NtkRope,
    Rope,
    Rotary,
    Rotating,
    YarnRope,
)
from farsight.errors import ConfigError
from farsight.model.build import ModelConfig

if TYPE_CHECKING:
    from farsight.inference.kv_cache import Batch
    from farsight.model.llama import Llama


@dataclass(frozen=True)
class Interpolation(ABC):
    """A kind of scaling; `model.position.rope` has the formulas."""

    name: ClassVar[str]
    factor: float
    """Target length over trained length, 1 or more."""

    def __post_init__(self) -> None:
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"factor = {self.factor:g} must be a number of at least 1.")

    @abstractmethod
    def rotary(self, theta: float, trained: int) -> Rotating:
        """The scaled RoPE that replaces plain RoPE of base `theta`, trained on sequences of length `trained`."""

    def change(self, config: ModelConfig) -> ModelConfig:
        """Scales the RoPE of all layers that rotate.

        Raises:
            ConfigError: the model's RoPE is scaled already, or it has none.
        """
        p, shown = config.position, f"{self.name}:{self.factor:g}"
        if p.lasp is not None:
            raise ConfigError(f"{shown}: the model has LASP, which sets each layer's scale itself.")

        def scaled(rotary: Rotary) -> Rotary:
            match rotary:
                case NoRotary():
                    return rotary
                case Rope(theta=theta):
                    return self.rotary(theta, config.trained_length)
            raise ConfigError(f"{shown}: the model's RoPE is scaled already ({rotary.kind}).")

        rules = tuple(
            dataclasses.replace(rule, rotary=scaled(rule.rotary)) if rule.rotary is not None else rule
            for rule in p.rules
        )
        position = dataclasses.replace(p, rotary=scaled(p.rotary), rules=rules)
        if position == p:
            raise ConfigError(f"{shown}: no layer of the model rotates.")
        return dataclasses.replace(config, position=position)

    def caches(self, model: "Llama", config: ModelConfig, batch: "Batch") -> None:
        return None


@dataclass(frozen=True)
class Linear(Interpolation):
    """Position interpolation (Chen et al., 2023): every frequency divided by the factor."""

    name: ClassVar[str] = "linear"

    def rotary(self, theta: float, trained: int) -> Rotating:
        return LinearRope(theta=theta, factor=self.factor)


@dataclass(frozen=True)
class Ntk(Interpolation):
    """NTK-aware scaling (bloc97, 2023): the base times factor^(H/(H − 2))."""

    name: ClassVar[str] = "ntk"

    def rotary(self, theta: float, trained: int) -> Rotating:
        return NtkRope(theta=theta, factor=self.factor)


@dataclass(frozen=True)
class Dynamic(Interpolation):
    """Dynamic NTK (emozilla, 2023): NTK-aware scaling whose factor grows with the sequence past the trained length."""

    name: ClassVar[str] = "dynamic"

    def rotary(self, theta: float, trained: int) -> Rotating:
        return DynamicNtkRope(theta=theta, factor=self.factor, original_length=trained)


@dataclass(frozen=True)
class Yarn(Interpolation):
    """YaRN (Peng et al., 2023): fast dimensions kept, slow ones interpolated, with a temperature on the logits."""

    name: ClassVar[str] = "yarn"

    def rotary(self, theta: float, trained: int) -> Rotating:
        return YarnRope(theta=theta, factor=self.factor, original_length=trained)


@dataclass(frozen=True)
class Llama3(Interpolation):
    """Llama 3.1's scaling by band (Dubey et al., 2024): `llama3:8` gives Llama 3 the positions of Llama 3.1."""

    name: ClassVar[str] = "llama3"

    def rotary(self, theta: float, trained: int) -> Rotating:
        return Llama3Rope(theta=theta, factor=self.factor, original_length=trained)


INTERPOLATIONS: dict[str, type[Interpolation]] = {kind.name: kind for kind in (Linear, Ntk, Dynamic, Yarn, Llama3)}
