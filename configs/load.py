"""Reads TOML files and command-line options into a checked `JobConfig`.

Precedence: command line > with --tiny, the file's `[tiny]` table > TOML file > the file its `base` names >
`configs/sizes/<model.flavor>.toml` > defaults. Every value is checked against its field's type, and an error about an unknown
key suggests the nearest known one; torchtitan's own manager accepts TOML values of the wrong type.
"""

import dataclasses
import functools
import glob
import os
import sys
import tomllib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import tomli_w

from farsight.configs.check import ConfigError, check, training_steps
from farsight.configs.schema import JobConfig
from farsight.errors import nearest
from farsight.ranges import FINITE, Range

T = TypeVar("T")
C = TypeVar("C", bound=JobConfig)

CONFIGS = Path(__file__).resolve().parent
SIZES = CONFIGS / "sizes"
ROOT = CONFIGS.parent
"""The checkout or the installed package: shipped configs and examples are below it."""


class _Raw(str):
    """A command-line value: text that is still to be converted to its field's type."""


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────────


def load_config(arguments: Sequence[str], cls: type[C] = JobConfig) -> C:  # type: ignore[assignment]  # JobConfig is a C
    """Reads the file named by `--job.config_file` and the other `--section.key value` options.

    Args:
        cls: the config class, `JobConfig` or `FinetuneConfig`.

    Raises:
        ConfigError: unknown key, wrong type, missing file, or settings that contradict each other.
    """
    values = read_arguments(arguments)
    if "stages" in values:
        file = values["job"]["config_file"]
        raise ConfigError(f"{file} is a recipe of several stages: farsight recipe {file}")
    return build_config(values, cls)


def read_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """The settings of the file named by `--job.config_file`, with the other options laid over them; unchecked.

    Raises:
        ConfigError: the file can't be read, or the options can't be parsed.
    """
    options = parse_options(arguments)
    tiny, job = pop_tiny(options), options.get("job", {})
    if not job.get("config_file"):
        if tiny:
            raise ConfigError("--tiny shrinks a config file: name one with --job.config_file.")
        return options
    path = find_config(Path(job["config_file"]))
    job["config_file"] = _Raw(path)
    return merge(read_toml(path, tiny), options)


def pop_tiny(options: dict[str, Any]) -> bool:
    """Removes `--tiny` from parsed options; returns whether it was given."""
    return _convert(bool, options.pop("tiny", False), "tiny")


def build_config(values: dict[str, Any], cls: type[C] = JobConfig) -> C:  # type: ignore[assignment]  # as above
    """Builds and checks a config from nested dicts; `model.flavor` fills in the architecture."""
    model = values.get("model")
    flavor = model.get("flavor") if isinstance(model, dict) else None
    if isinstance(flavor, str) and flavor:
        values = merge(read_toml(size_file(flavor)), values)
    config = from_dict(cls, _rules_with_theta(values))
    check(config)
    return _filled_in(config)


def _filled_in(config: C) -> C:
    """Replaces zeros and empty strings that mean "same as another setting" by that setting's value."""
    config.training.steps = training_steps(config)
    config.training.tokens = 0.0
    config.validation.seq_len = config.validation.seq_len or config.training.seq_len
    config.validation.local_batch_size = config.validation.local_batch_size or config.training.local_batch_size
    if not config.job.dump_folder:
        config.job.dump_folder = f"runs/{Path(config.job.config_file or 'run').stem}"
    return config


def size_file(flavor: str) -> Path:
    """The TOML file of a model size.

    Raises:
        ConfigError: there is no such size.
    """
    path = SIZES / f"{flavor}.toml"
    if not path.is_file():
        known = sorted(p.stem for p in SIZES.glob("*.toml"))
        raise ConfigError(f"model.flavor = {str(flavor)!r} is not a known size.{nearest(flavor, known)}")
    return path


def find_config(path: Path, folder: Path = Path()) -> Path:
    """Finds a config file: in `folder`, or else among the shipped ones.

    A shipped config is found by its path below the package (`configs/tiny.toml`, `finetune/ablation_a`) or by its name alone
    (`scope_llama3_8b`). A path through a folder `configs` that is not there counts as a name: shipped files may move.

    Raises:
        ConfigError: there is none.
    """
    there = folder / path
    if there.exists():
        return there
    name = path.name.removesuffix(".toml")
    if path.parent.name == "tiny" and name in shipped_configs():
        raise ConfigError(f"There is no config file {there}. Name {name} and add --tiny.")
    for shipped in (ROOT / path, CONFIGS / path.with_name(f"{name}.toml")):
        if shipped.is_file():
            return _taken(there, shipped)
    if name in shipped_configs() and (path.parent == Path() or "configs" in path.parts):
        return _taken(there, shipped_configs()[name])
    siblings = [str(p) for p in there.parent.glob("*.toml")]
    hint = nearest(str(there), siblings, say_known=False) or nearest(name, shipped_configs(), say_known=False)
    raise ConfigError(f"There is no config file {there}.{hint or nearest(str(there), siblings)}")


@functools.cache
def shipped_configs() -> dict[str, Path]:
    """The configs that come with Farsight, by name: those that can be run, without sizes and shared parts."""
    paths = sorted(CONFIGS.rglob("*.toml"), key=lambda path: (-len(path.parts), path))
    return {path.stem: path for path in paths if not {"sizes", "parts"} & {*path.parts}}


@functools.cache
def _taken(asked: Path, shipped: Path) -> Path:
    """Says once, on the first rank's stderr, which file stands in for the one that was asked for."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{asked}: taking {shipped}", file=sys.stderr)
    return shipped


def read_toml(path: Path, tiny: bool = False) -> dict[str, Any]:
    """A TOML file merged over its bases: those that its top-level `base` names, a path relative to it or a list of them, later
    over earlier.

    Args:
        tiny: lay the `[tiny]` table over it, which has a `base` of its own. Its entries for stages that the file lacks are ignored.

    Raises:
        ConfigError: a file that is missing, unreadable, not TOML or its own base, or `tiny` without a `[tiny]` table.
    """
    values = _read(path, ())
    overlay = values.pop("tiny", None)
    if not tiny:
        return values
    if overlay is None:
        raise ConfigError(f"{path} has no [tiny] table: --tiny does not apply to it.")
    stages = overlay.get("stages", {})
    there = {str(number) for number in range(len(values.get("stages", [])))}
    return merge(values, {**overlay, "stages": {n: s for n, s in stages.items() if n in there}} if stages else overlay)


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """`above`: the files whose `base` led here."""
    if path.resolve() in above:
        raise ConfigError(f"{path} is its own base: {' → '.join(p.name for p in (*above, path))}. Remove one of them.")
    try:
        # Windows editors put a byte-order mark before UTF-8, which TOML does not allow.
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ConfigError(f"There is no config file {path}.") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:  # tomllib's own, undecodable text, numbers of thousands of digits
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    if not isinstance(tiny := values.get("tiny", {}), dict):
        raise ConfigError(f"{path}: tiny = {tiny!r} must be a table, [tiny].")
    if tiny:
        values["tiny"] = _over_bases(tiny, path, above)
    return _over_bases(values, path, above)


def _over_bases(values: dict[str, Any], path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """A table of the file at `path`, merged over the files that its `base` names."""
    bases = values.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{path}: base = {bases!r} must name TOML files by paths relative to this one.")
    below: dict[str, Any] = {}
    for base in bases:
        below = merge(below, _read(find_config(Path(base), path.parent), (*above, path.resolve())))
    return merge(below, values)


def merge(below: dict[str, Any], above: dict[str, Any], section: str = "") -> dict[str, Any]:
    """Merges `above` over `below`, table by table. A table of another `kind` replaces the one below it, except for the RoPE base:
    theta belongs to the weights, whatever scaling is applied to it.

    Args:
        section: prefix of the option's name in messages.
    """
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(value, dict) and isinstance(old, list):
            merged[key] = _merge_items(f"{section}{key}", old, value)
        elif (
            isinstance(value, dict) and isinstance(old, dict) and value.get("kind", old.get("kind")) == old.get("kind")
        ):
            merged[key] = merge(old, value, f"{section}{key}.")
        else:
            table = _inline(value, key) if isinstance(value, _Raw) and value.startswith("{") else value
            merged[key] = _with_theta(table, old) if isinstance(table, dict) else value
    return merged


def _with_theta(rotary: dict[str, Any], other: Any) -> dict[str, Any]:
    """`rotary` with `other`'s RoPE base, unless it sets one itself or does not rotate."""
    if isinstance(other, dict) and "theta" in other and rotary.get("kind") != "none":
        return {"theta": other["theta"], **rotary}
    return rotary


def _rules_with_theta(values: dict[str, Any]) -> dict[str, Any]:
    """Settings whose `position.rules` have the RoPE base of `position.rotary` where they rotate and set none."""
    position = values.get("position")
    if not isinstance(position, dict) or not isinstance(position.get("rules"), list):
        return values
    rules = [
        {**rule, "rotary": _with_theta(rule["rotary"], position.get("rotary"))}
        if isinstance(rule, dict) and isinstance(rule.get("rotary"), dict)
        else rule
        for rule in position["rules"]
    ]
    return {**values, "position": {**position, "rules": rules}}


def _merge_items(key: str, items: list[Any], changes: dict[str, Any]) -> list[Any]:
    """Changes single items of a list by index, as in `--data.sources.1.weight 2`."""
    items = list(items)
    for index, change in changes.items():
        if not index.isdigit() or int(index) >= len(items):
            items_there = f"{len(items)} item{'s' * (len(items) != 1)}"
            raise ConfigError(f"{key}.{index}: this list has {items_there}, counted from 0.")
        item, place = items[int(index)], f"{key}.{index}."
        items[int(index)] = (
            merge(item, change, place) if isinstance(change, dict) and isinstance(item, dict) else change
        )
    return items


def parse_options(arguments: Sequence[str]) -> dict[str, Any]:
    """Parses `--a.b value`, `--a.b=value`, `--a.flag`, `--a.no_flag` and `--c value` into {"a": {"b": …}, "c": …}."""
    options: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        option = rest.pop(0)
        if not option.startswith("--"):
            raise ConfigError(f"{option!r} is not an option; options look like --section.key value. See --help.")
        name, equals, value = option[2:].partition("=")
        path = name.replace("-", "_").split(".")
        if not equals:
            # A value may be negative (-1) but not another option.
            if rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            elif path[-1].startswith("no_"):
                path[-1], value = path[-1][len("no_") :], "false"
            else:
                value = "true"
        table = options
        for key in path[:-1]:
            table = table.setdefault(key, {})
            if isinstance(table, _Raw):
                raise ConfigError(f"--{name}: {key} was given the value {table} before, and has options of its own.")
        if isinstance(table.get(path[-1]), dict):
            raise ConfigError(f"{option}: {path[-1]} has options of its own, such as --{name}.{min(table[path[-1]])}.")
        table[path[-1]] = _Raw(value)
    return options


# ── Typed construction ────────────────────────────────────────────────────────────────────────────────


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
            raise ConfigError(f"There is no option {prefix}{key}.{nearest(key, field_names(cls))}")
    hints = typing.get_type_hints(cls, include_extras=True)
    converted = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # cls is a dataclass; mypy cannot say so of T
        if field.name in values:
            default = default_of(field)
            converted[field.name] = _convert(hints[field.name], values[field.name], prefix + field.name, default)
    try:
        return cls(**converted)
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _convert(hint: Any, value: Any, where: str, default: Any = None) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _in_range(_convert(arguments[0], value, where), arguments[1], where)
    if origin in (Union, types.UnionType):
        if type(None) in arguments and (value is None or (isinstance(value, _Raw) and value.lower() == "none")):
            return None
        kinds = [a for a in arguments if dataclasses.is_dataclass(a)]
        if len(kinds) > 1:
            return _convert_kind(kinds, value, where, default)
        return _convert_first(tuple(a for a in arguments if a is not type(None)), value, where)
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), _inline(value, where), where)
    if origin in (list, tuple):
        items = _inline_list(value, where)
        if not isinstance(items, (list, tuple)):
            raise ConfigError(f"{where} = {value!r} must be a list.")
        item_hint = arguments[0] if arguments else Any
        return origin(_convert(item_hint, item, f"{where}.{i}") for i, item in enumerate(items))
    if origin is Literal:
        for choice in arguments:
            if value == choice or (isinstance(value, _Raw) and value == str(choice)):
                return choice
        raise ConfigError(
            f"{where} = {_shown(value)} must be one of {', '.join(map(repr, arguments))}."
            f"{nearest(str(value), [str(a) for a in arguments], say_known=False)}"
        )
    if origin is dict and isinstance(value := _inline(value, where), dict):
        return {key: _convert(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if hint is Any or origin is dict or hint is dict:
        return value
    value = _convert_scalar(hint, value, where)
    if hint is str:
        return _shipped_file(value)
    return _in_range(value, FINITE, where) if hint in (int, float) else value


def _in_range(value: Any, span: Range, where: str) -> Any:
    if problem := span.problem(value):
        raise ConfigError(f"{where} = {value} {problem}.")
    return value


def _convert_scalar(hint: type, value: Any, where: str) -> Any:
    if isinstance(value, _Raw):
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


def _shipped_file(value: str) -> str:
    """Relative paths of shipped files (`examples/…`, `configs/…`) lead into the package where they do not exist here."""
    shipped = str(ROOT / value)
    if value.startswith(("examples/", "configs/")) and not glob.glob(value) and glob.glob(shipped):
        return shipped
    return value


def _convert_first(hints: tuple[Any, ...], value: Any, where: str) -> Any:
    """Converts to the first type of a union (`float | int`) that accepts the value."""
    for position, hint in enumerate(hints):
        try:
            return _convert(hint, value, where)
        except ConfigError:
            if position == len(hints) - 1:
                raise
    raise AssertionError(f"{where} has an empty type")


def _convert_kind(kinds: list[Any], value: Any, where: str, default: Any) -> Any:
    value = _inline(value, where)
    names = {k.__dataclass_fields__["kind"].default: k for k in kinds}
    if not isinstance(value, dict):
        raise ConfigError(f'{where} = {value!r} must be a table with a kind, such as {{ kind = "{min(names)}" }}.')
    kind = value.get("kind", getattr(default, "kind", None))
    if kind is None:
        raise ConfigError(f"{where} needs a kind: one of {', '.join(sorted(names))}.")
    if str(kind) not in names:
        raise ConfigError(f"{where}.kind = {str(kind)!r} is unknown.{nearest(str(kind), sorted(names))}")
    return from_dict(names[str(kind)], value, where)


def _inline(value: Any, where: str) -> Any:
    """Parses a table given on the command line, in TOML's inline form."""
    if not isinstance(value, _Raw):
        return value
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError) as error:
        raise ConfigError(f'{where} = {value} must be a table such as {{ kind = "…" }}: {error}') from None


def _inline_list(value: Any, where: str) -> Any:
    if not isinstance(value, _Raw):
        return value
    if value.startswith("["):
        return _inline(value, where)
    return [_Raw(item) for item in value.split(",") if item]


_TYPE_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string (in quotes)",
}


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, _Raw) else repr(value)


def field_names(cls: type) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]


def default_of(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


# ── Writing ──────────────────────────────────────────────────────────────────────────────────


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
    return tomli_w.dumps(to_dict(config))
