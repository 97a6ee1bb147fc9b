"""Typed access to a `config.json` of transformers: every error names the file, the field and its value."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farsight.errors import ConfigError

REQUIRED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings",
)  # fmt: skip
_SIZES = (*REQUIRED, "num_key_value_heads", "head_dim")


class Values:
    """The fields of a config, and its family's defaults for those that it leaves out.

    Args:
        given: content of `config.json`, or of its `text_config`.
        path: origin of the values, for errors.
    """

    def __init__(self, given: Mapping[str, Any], path: Path, defaults: Mapping[str, Any]) -> None:
        self.given, self.path, self.defaults = given, path, defaults

    def get(self, name: str) -> Any:
        """A field's value; null and a missing one are the family's default, or None."""
        value = self.given.get(name)
        return self.defaults.get(name) if value is None else value

    def check_sizes(self) -> None:
        """Raises `ConfigError` for sizes that are missing or are not whole numbers."""
        if missing := [name for name in REQUIRED if name not in self.given and name not in self.defaults]:
            raise ConfigError(f"{self.path} lacks {', '.join(missing)}.")
        for name in _SIZES:
            value = self.get(name)
            if (type(value) is not int or value < 1) and not (value is None and name not in REQUIRED):
                raise ConfigError(f"{self.path} has {name} = {value!r}; it must be a whole number of 1 or more.")

    def whole(self, name: str) -> int | None:
        """A number of 1 or more, or None; null is None too, as it is where transformers has a default.

        Raises:
            ConfigError: another value.
        """
        value = self.given.get(name, self.defaults.get(name))
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{self.path} has {name} = {value!r}; it must be a whole number of 1 or more.")
        return value

    def flag(self, name: str) -> bool:
        """A truth value; false by default.

        Raises:
            ConfigError: another value.
        """
        value = self.get(name)
        if value is not None and type(value) is not bool:
            raise ConfigError(f"{self.path} has {name} = {value!r}; it must be true or false.")
        return bool(value)

    def only(self, name: str, *allowed: Any) -> None:
        """Refuses a field whose value, if it is given, is none of those that our model has; without any, every value.

        Raises:
            ConfigError: naming the value.
        """
        value = self.get(name)
        if value is not None and value not in allowed:
            known = " or ".join(str(one) for one in allowed) or "null"
            raise ConfigError(f"{self.path} has {name} = {value!r}; only {known} can be read.")

    def by_layer(self, name: str, *allowed: Any) -> list[Any] | None:
        """A list with one of some values for each layer, or None.

        Raises:
            ConfigError: another value, or another number of layers.
        """
        found = self.get(name)
        if found is None:
            return None
        layers = self.get("num_hidden_layers")
        # SmolLM3's list may be longer than the model.
        if not isinstance(found, list) or len(found) < layers or any(value not in allowed for value in found):
            known = " or ".join(repr(one) for one in allowed)
            raise ConfigError(
                f"{self.path} has {name} = {found!r}; it must be a list with {known} for each of {layers} layers."
            )
        return found[:layers]
