"""Builds config dataclasses from nested dicts, every name, type and range checked, and turns them back into TOML."""

import dataclasses
import tomllib
import types
import typing
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from farsight.configs.former import HERE, is_former
from farsight.configs.shipped import shipped_file
from farsight.errors import ConfigError, nearest
from farsight.ranges import FINITE, Range

T = TypeVar("T")


class Raw(str):
    """A command-line value: text that is still to be converted to its field's type."""


class Switch(Raw):
    """The value of an option that was given none: "true"."""


def from_dict(cls: type[T], values: Any, where: str = "") -> T:
    """Builds dataclass `cls` from nested dicts and checks every name and type.

    Raises:
        ConfigError: an unknown key, or a value of the wrong type or out of range.
    """
    prefix = f"{where}." if where else ""
    if not isinstance(values, dict):
        raise ConfigError(f"{where} = {values!r} must be a table with the keys {', '.join(field_names(cls))}.")
    for key in values:
        if key not in field_names(cls):
            raise ConfigError(f"There is no option {_unknown(cls, prefix, key, values)}")
    hints = typing.get_type_hints(cls, include_extras=True)
    converted = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # cls is a dataclass; mypy cannot say so of T
        if field.name in values:
            default = default_of(field)
            converted[field.name] = convert(hints[field.name], values[field.name], prefix + field.name, default)
    try:
        return cls(**converted)
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _unknown(cls: type, prefix: str, key: str, values: dict[str, Any]) -> str:
    """The name of an option that `cls` lacks, and what to use instead."""
    within = values[key] if isinstance(values[key], dict) else ()
    names = [prefix + key, *(f"{prefix}{key}.{option}" for option in within)]
    for name in names:
        if name in HERE:
            return f"{name}: it is {HERE[name]} here."
    if is_former(prefix + key):
        return f"{names[:2][-1]}: torchtitan has it, Farsight does not. Leave it out."
    kind = f" for the kind {str(values['kind'])!r}" if "kind" in values and "kind" in field_names(cls) else ""
    on_command_line = not prefix and isinstance(values[key], Raw)
    hint = _option_named(cls, key) if on_command_line else nearest(key, field_names(cls))
    return f"{prefix}{key}{kind}.{hint}"


def _option_named(cls: type, name: str) -> str:
    """A hint at the option that was meant: one given without its section ("lr") or in part ("config"), or a similar name."""
    sections = {field.name: type(default_of(field)) for field in dataclasses.fields(cls)}
    options = [(s, o) for s, kind in sections.items() if dataclasses.is_dataclass(kind) for o in field_names(kind)]
    for fits in (str.__eq__, str.startswith):
        if found := [f"{section}.{option}" for section, option in options if fits(option, name)]:
            return f" Did you mean {found[0]!r}?"
    return nearest(name, [*field_names(cls), "dry-run", "tiny"])


def convert(hint: Any, value: Any, where: str, default: Any = None) -> Any:
    """Converts a value to a field's type, or raises ConfigError.

    Args:
        where: the option's name, for messages.
        default: the field's default, whose `kind` a table without one takes.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _in_range(convert(arguments[0], value, where), arguments[1], where)
    if origin in (Union, types.UnionType):
        if type(None) in arguments and (value is None or (isinstance(value, Raw) and value.lower() == "none")):
            return None
        kinds = [a for a in arguments if dataclasses.is_dataclass(a)]
        if len(kinds) > 1:
            return _convert_kind(kinds, value, where, default)
        hints = tuple(a for a in arguments if a is not type(None))
        if isinstance(value, Raw) and value.lstrip().startswith(
            "["
        ):  # where text is possible too, brackets make a list
            hints = tuple(a for a in hints if get_origin(a) in (list, tuple)) or hints
        return _convert_first(hints, value, where)
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), inline(value, where), where)
    if origin in (list, tuple):
        items = _inline_list(value, where)
        if not isinstance(items, (list, tuple)):
            remedy = f": [[{where}]] in a config file, whose first item --{where}.0.KEY changes" * isinstance(
                value, dict
            )
            raise ConfigError(f"{where} = {value!r} must be a list{remedy}.")
        item_hint = arguments[0] if arguments else Any
        return origin(convert(item_hint, item, f"{where}.{i}") for i, item in enumerate(items))
    if origin is Literal:
        for choice in arguments:
            if value == choice or (isinstance(value, Raw) and value == str(choice)):
                return choice
        raise ConfigError(
            f"{where} = {_shown(value)} must be one of {', '.join(map(repr, arguments))}."
            f"{nearest(str(value), [str(a) for a in arguments], say_known=False)}"
        )
    if origin is dict and isinstance(value := inline(value, where), dict):
        return {key: convert(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if hint is Any or origin is dict or hint is dict:
        return value
    value = _convert_scalar(hint, value, where)
    if hint is str:
        return shipped_file(value)
    return _in_range(value, FINITE, where) if hint in (int, float) else value


def _in_range(value: Any, span: Range, where: str) -> Any:
    if problem := span.problem(value):
        raise ConfigError(f"{where} = {value} {problem}.")
    return value


def _convert_scalar(hint: type, value: Any, where: str) -> Any:
    if isinstance(value, Switch) and hint is not bool:
        raise ConfigError(f"{where} was given no value.")
    if isinstance(value, Raw):
        try:
            if hint is bool:
                return {"true": True, "false": False}[value.lower()]
            # People write token counts as 2e9 or 500_000.
            written_out = hint is not int or value.lstrip("+-").isdigit()
            return hint(value) if written_out or not float(value).is_integer() else int(float(value))
        except (KeyError, ValueError, OverflowError):
            raise ConfigError(f"{where} = {value} must be {_TYPE_NAMES[hint]}.") from None
    if hint is float and type(value) is int:
        return float(_in_range(value, FINITE, where))
    # type() instead of isinstance(), to which True is an int.
    if type(value) is not hint:
        raise ConfigError(f"{where} = {_shown(value)} must be {_TYPE_NAMES.get(hint, hint)}.")
    return value


def _convert_first(hints: tuple[Any, ...], value: Any, where: str) -> Any:
    """Converts to the first type of a union (`float | int`) that accepts the value."""
    for position, hint in enumerate(hints):
        try:
            return convert(hint, value, where)
        except ConfigError:
            if position == len(hints) - 1:
                raise
    raise AssertionError(f"{where} has an empty type")


def _convert_kind(kinds: list[Any], value: Any, where: str, default: Any) -> Any:
    value = inline(value, where)
    names = {k.__dataclass_fields__["kind"].default: k for k in kinds}
    if not isinstance(value, dict):
        raise ConfigError(f'{where} = {value!r} must be a table with a kind, such as {{ kind = "{min(names)}" }}.')
    kind = value.get("kind", getattr(default, "kind", None))
    if kind is None:
        raise ConfigError(f"{where} needs a kind: one of {', '.join(sorted(names))}.")
    if str(kind) not in names:
        raise ConfigError(f"{where}.kind = {str(kind)!r} is unknown.{nearest(str(kind), sorted(names))}")
    return from_dict(names[str(kind)], value, where)


def inline(value: Any, where: str) -> Any:
    """Parses a table given on the command line, in TOML's inline form."""
    if not isinstance(value, Raw):
        return value
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError) as error:
        raise ConfigError(f'{where} = {value} must be a table such as {{ kind = "…" }}: {error}') from None


def _inline_list(value: Any, where: str) -> Any:
    """The items of a list given on the command line: TOML's, or words in brackets or without, as shells leave them."""
    if not isinstance(value, Raw):
        return value
    text = value.strip()
    if text.startswith("["):
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError) as error:
            if not text.endswith("]") or {*text[1:-1]} & {*"[]{}\"'"}:
                raise ConfigError(f"{where} = {value} must be a list, such as [a, b] or a,b: {error}") from None
            text = text[1:-1]
    return [Raw(item.strip()) for item in text.split(",") if item.strip()]


_TYPE_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string (in quotes)",
}


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, Raw) else repr(value)


def field_names(cls: type) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]


def default_of(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def to_dict(config: Any) -> dict[str, Any]:
    """A config as nested dicts and lists, without the fields that are None (TOML has no null)."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            fields = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
            return {name: v for name, v in fields.items() if v is not None}
        return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value

    return plain(config)


def to_toml(config: Any) -> str:
    """A config as TOML that `load_config` reads back to an equal one."""
    import tomli_w  # here, so that --help and a message about missing packages need none of them

    return tomli_w.dumps(to_dict(config))
