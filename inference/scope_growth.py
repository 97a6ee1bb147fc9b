"""Lets scopes grow with the sequence past the trained length (`scope_max`) in models whose scopes stay as trained."""

import dataclasses
from typing import Any

from farsight.configs.schema import Scope
from farsight.model.build import ModelConfig


def with_growing_scopes(config: ModelConfig) -> ModelConfig | None:
    """The config with scopes that grow with the length; None if that changes no layer's scopes."""

    def growing(heads: Any) -> Any:
        return dataclasses.replace(heads, scope_max="length") if isinstance(heads, Scope) else heads

    p = config.position
    rules = tuple(dataclasses.replace(rule, heads=growing(rule.heads)) for rule in p.rules)
    position = dataclasses.replace(p, heads=growing(p.heads), rules=rules)
    return None if position == p else dataclasses.replace(config, position=position)
