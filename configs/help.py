"""`--help`: every option with its type, default and meaning, read from the config classes themselves."""

import ast
import dataclasses
import functools
import inspect
import itertools
import json
import sys
import textwrap
import types
import typing
from collections.abc import Collection, Iterator, Sequence
from typing import Literal, get_args, get_origin

from farsight.configs.schema import JobConfig
from farsight.configs.typed import default_of, field_names
from farsight.errors import ConfigError, nearest
from farsight.ranges import Range


def help_text(sections: Sequence[str] = (), cls: type = JobConfig, hidden: Collection[str] = ()) -> str:
    """Describes every option of the named sections (all if empty): type, default and meaning.

    Args:
        sections: names of options or sections, dotted below the top level ("position.rotary").
        hidden: options to leave out.

    Raises:
        ConfigError: there is no such section.
    """
    blocks = list(_blocks(cls, hidden))
    paths = {path for path, _ in blocks}
    for section in sections:
        if section not in paths:
            raise ConfigError(f"There is no section {section}.{nearest(section, field_names(cls))}")
    chosen = [block for path, block in blocks if not sections or any(f"{path}.".startswith(f"{s}.") for s in sections)]
    return "\n".join(line for block in chosen for line in block)


def _blocks(cls: type, hidden: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields each top-level option and each section: its dotted name and its lines."""
    hints = typing.get_type_hints(cls)
    shown: dict[tuple[type, ...], str] = {}
    # Top-level options first: after a section they would look like part of it.
    for field in sorted(dataclasses.fields(cls), key=lambda f: bool(_classes(hints[f.name]))):
        if field.name in hidden:
            continue
        if _classes(hints[field.name]):
            yield from _field_blocks(field, hints[field.name], field.name, hidden, shown)
        else:
            yield field.name, ["", *_option_help(field, field.name, hints[field.name], _field_docs(cls), _ranges(cls))]


def _section_blocks(
    cls: typing.Any,
    path: str,
    header: str,
    hidden: Collection[str],
    shown: dict[tuple[type, ...], str],
    alike: set[str],
    usual: bool = False,
) -> Iterator[tuple[str, list[str]]]:
    """Yields a section and those inside it.

    Args:
        path: its dotted name; items of lists are called N.
        header: its name as TOML writes it, and its kind.
        hidden: options to leave out.
        shown: sections described so far: choices of classes, and where they were described.
        alike: options described so far in kinds of this section; they are only named.
        usual: whether this is the kind that is used by default.
    """
    hints, docs, spans = typing.get_type_hints(cls), _field_docs(cls), _ranges(cls)
    lines = ["", f"{header}{' (the default)' * usual}  {_first_line(cls)}".rstrip()]
    nested, above = [], []
    for field in dataclasses.fields(cls):
        name = f"{path}.{field.name}"
        if name in hidden:
            continue
        if _classes(hints[field.name]):
            nested.append((field, name))
        elif not (field.name == "kind" and "kind =" in header):
            own = _option_help(field, name, hints[field.name], docs, spans)
            if (said := "\n".join(own)) in alike:
                above.append(f"--{name}")
            else:
                lines += own
                alike.add(said)
    if above:
        lines += textwrap.wrap(f"as above: {', '.join(above)}", 110, initial_indent="  ", subsequent_indent="      ")
    yield path.replace(".N", ""), lines
    for field, name in nested:
        yield from _field_blocks(field, hints[field.name], name, hidden, shown)


def _field_blocks(
    field: dataclasses.Field,
    hint: typing.Any,
    name: str,
    hidden: Collection[str],
    shown: dict[tuple[type, ...], str],
) -> Iterator[tuple[str, list[str]]]:
    """Yields the sections that an option may be, one for each kind; arguments as of `_section_blocks`."""
    kinds = _classes(hint)
    if kinds in shown:
        yield name.replace(".N", ""), [f"  --{name}.…  as {shown[kinds]}"]
        return
    brackets = "[{}]"
    if get_origin(hint) is tuple:
        name, brackets = f"{name}.N", "[[{}]]"
    header = brackets.format(name.replace(".N", ""))
    if len(kinds) > 1:
        shown[kinds] = header
    default, alike = default_of(field), set[str]()
    for kind in kinds:
        usual = type(default[0] if isinstance(default, tuple) and default else default) is kind
        own = f'{header} kind = "{kind.__dataclass_fields__["kind"].default}"' if len(kinds) > 1 else header
        yield from _section_blocks(kind, name, own, hidden, shown, alike, usual and len(kinds) > 1)


def _classes(hint: typing.Any) -> tuple[typing.Any, ...]:
    """The config classes that a field may hold, one or a tuple of them."""
    inner = [hint, *get_args(hint), *(b for a in get_args(hint) for b in get_args(a))]
    return tuple(a for a in inner if dataclasses.is_dataclass(a))


def _option_help(
    field: dataclasses.Field, name: str, hint: typing.Any, docs: dict[str, str], spans: dict[str, Range]
) -> list[str]:
    shown = _type_name(hint)
    if field.name in spans:
        shown += f", {spans[field.name]}"
    default = default_of(field)
    # As the command line and config files take it.
    written = json.dumps(default) if isinstance(default, list | tuple) else repr(default)
    return [
        f"  --{name}  {shown}  (default: {written})",
        *textwrap.wrap(docs.get(field.name, ""), 100, initial_indent="      ", subsequent_indent="      "),
    ]


def _type_name(hint: typing.Any) -> str:
    if get_origin(hint) is Literal:
        return " | ".join(map(str, get_args(hint)))
    if get_origin(hint) in (typing.Union, types.UnionType):
        return " | ".join("none" if a is type(None) else _type_name(a) for a in get_args(hint))
    if get_origin(hint) in (list, tuple):
        return f"list of {_type_name(get_args(hint)[0])}"
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")


def _ranges(cls: type) -> dict[str, Range]:
    """The range of each field that declares one, including optional fields and items of lists."""

    def declared(hint: typing.Any) -> Range | None:
        if get_origin(hint) is typing.Annotated:
            return get_args(hint)[1]
        return next(filter(None, map(declared, get_args(hint))), None)

    hints = typing.get_type_hints(cls, include_extras=True)
    return {name: span for name, hint in hints.items() if (span := declared(hint)) is not None}


def _first_line(cls: type) -> str:
    """First line of the docstring, or "" for the signature that Python gives to dataclasses without one."""
    doc = inspect.getdoc(cls) or ""
    return "" if doc.startswith(f"{cls.__name__}(") else doc.partition("\n")[0]


@functools.cache
def _field_docs(cls: type) -> dict[str, str]:
    """The docstring after each field in the source of a dataclass and its bases."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base) or base.__module__ not in sys.modules:
            continue
        body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]).body
        for statement, after in itertools.pairwise(body):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                docs[statement.target.id] = " ".join(after.value.value.split())
    return docs
