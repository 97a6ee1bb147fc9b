"""Reads TOML files and command-line options into a checked `JobConfig`.

Precedence: command line > with --tiny, the file's `[tiny]` table > TOML file > the file its `base` names >
`configs/sizes/<model.flavor>.toml` > defaults. Every value is checked against its field's type, and an error about an unknown
key suggests the nearest known one.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from farsight.configs.check import check, training_steps
from farsight.configs.former import current
from farsight.configs.optimizers import OF_ALL_KINDS
from farsight.configs.schema import JobConfig
from farsight.configs.shipped import find_config, size_file
from farsight.configs.typed import Raw, Switch, convert, from_dict, inline
from farsight.errors import ConfigError
from farsight.stores import is_remote

C = TypeVar("C", bound=JobConfig)


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
    path = find_config(Path(convert(str, job["config_file"], "job.config_file")))
    job["config_file"] = Raw(path)
    return merge(read_toml(path, tiny), options)


def pop_tiny(options: dict[str, Any]) -> bool:
    """Removes `--tiny` from parsed options; returns whether it was given."""
    return convert(bool, options.pop("tiny", False), "tiny")


def build_config(values: dict[str, Any], cls: type[C] = JobConfig) -> C:  # type: ignore[assignment]  # as above
    """Builds and checks a config from nested dicts; `model.flavor` fills in the architecture."""
    model = values.get("model")
    flavor = model.get("flavor") if isinstance(model, dict) else None
    if isinstance(flavor, str) and flavor:
        values = merge(read_toml(size_file(flavor)), values)
    config = from_dict(cls, _rules_with_theta(current(values)))
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
    elif is_remote(config.job.dump_folder):
        config.job.store, config.job.dump_folder = config.job.dump_folder, f"runs/{Path(config.job.dump_folder).name}"
    return config


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
    """Merges `above` over `below`, table by table. A table of another `kind` replaces the one below it, except for the options that
    every optimizer has and for the RoPE base: theta belongs to the weights, whatever scaling is applied to it.

    Args:
        section: prefix of the option's name in messages.
    """
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        if isinstance(value, dict) and isinstance(old, list):
            merged[key] = _merge_items(f"{section}{key}", old, value)
        elif isinstance(value, dict) and isinstance(old, dict) and _same_kind(value, old, f"{section}{key}"):
            merged[key] = merge(old, value, f"{section}{key}.")
        else:
            table = inline(value, key) if isinstance(value, Raw) and value.startswith("{") else value
            merged[key] = _with_theta(_with_shared(table, old), old) if isinstance(table, dict) else value
    return merged


def _same_kind(table: dict[str, Any], old: dict[str, Any], name: str) -> bool:
    """True if the two tables have the same kind: a table without one keeps the kind of the table that it is merged over."""
    below = old.get("kind", "adamw" if name == "optimizer" else None)
    return table.get("kind", below) == below


def _with_shared(optimizer: dict[str, Any], other: Any) -> dict[str, Any]:
    """An optimizer's table with the options that `other`, of another kind, has too."""
    shared = {name: other[name] for name in OF_ALL_KINDS if name in other} if isinstance(other, dict) else {}
    return {**shared, **optimizer}


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
                value = Switch("true")
        table = options
        for key in path[:-1]:
            table = table.setdefault(key, {})
            if isinstance(table, Raw):
                raise ConfigError(f"--{name}: {key} was given the value {table} before, and has options of its own.")
        if isinstance(table.get(path[-1]), dict):
            raise ConfigError(f"{option}: {path[-1]} has options of its own, such as --{name}.{min(table[path[-1]])}.")
        table[path[-1]] = value if isinstance(value, Switch) else Raw(value)
    return options


def named_options(options: dict[str, Any]) -> set[str]:
    """The names of parsed options, as section.key."""
    return {f"{section}.{key}" for section, keys in options.items() if isinstance(keys, dict) for key in keys}
