"""The choice, when a model is read, of whether scopes grow with the sequence past the trained length (`scope_max`)."""

import dataclasses
from typing import Any, Literal

from farsight.configs.schema import Scope
from farsight.model.build import ModelConfig


def with_scope_max(config: ModelConfig, scope_max: Literal["trained", "length"]) -> ModelConfig:
    """The config with this `scope_max` in all of its scopes; equal for both if it has none."""

    def changed(heads: Any) -> Any:
        return dataclasses.replace(heads, scope_max=scope_max) if isinstance(heads, Scope) else heads

    p = config.position
    rules = tuple(dataclasses.replace(rule, heads=changed(rule.heads)) for rule in p.rules)
    return dataclasses.replace(config, position=dataclasses.replace(p, heads=changed(p.heads), rules=rules))


def with_growing_scopes(config: ModelConfig) -> ModelConfig | None:
    """The config with scopes that grow with the length; None if that changes no layer's scopes."""
    grown = with_scope_max(config, "length")
    return None if grown == config else grown
