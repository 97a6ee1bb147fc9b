"""Scopes past the trained length: as they were trained, or growing with the sequence (`scope_max`)."""

import dataclasses
from typing import Any

from farsight.configs.schema import Scope
from farsight.model.build import ModelConfig


def with_growing_scopes(config: ModelConfig) -> ModelConfig | None:
    """The config with scopes that grow with the length; None where no layer has scopes that this changes."""

    def growing(heads: Any) -> Any:
        return dataclasses.replace(heads, scope_max="length") if isinstance(heads, Scope) else heads

    p = config.position
    rules = tuple(dataclasses.replace(rule, heads=growing(rule.heads)) for rule in p.rules)
    position = dataclasses.replace(p, heads=growing(p.heads), rules=rules)
    return None if position == p else dataclasses.replace(config, position=position)
