"""`--help`: every option with its type, default and meaning, read from the config classes themselves."""

import ast
import dataclasses
import functools
import inspect
import itertools
import sys
import textwrap
import typing
from collections.abc import Sequence
from typing import get_args, get_origin

from farsight.configs.schema import JobConfig
from farsight.configs.typed import default_of, field_names
from farsight.errors import ConfigError, nearest
from farsight.ranges import Range


def help_text(sections: Sequence[str] = (), cls: type = JobConfig) -> str:
    """Describes every option of the named sections (all if empty): type, default and meaning.

    Raises:
        ConfigError: there is no such section.
    """
    hints, lines = {name: _section(hint) for name, hint in typing.get_type_hints(cls).items()}, []
    # Top-level options first: after a section they would look like part of it.
    for field in sorted(dataclasses.fields(cls), key=lambda f: dataclasses.is_dataclass(hints[f.name])):
        if sections and field.name not in sections:
            continue
        if dataclasses.is_dataclass(hints[field.name]):
            lines += _section_help(hints[field.name], field.name)
        else:
            lines += ["", *_option_help(field, field.name, hints[field.name], _field_docs(cls), _ranges(cls))]
    if sections and not lines:
        names = field_names(cls)
        raise ConfigError(f"There is no section {', '.join(sections)}.{nearest(sections[0], names)}")
    return "\n".join(lines)


def _section(hint: typing.Any) -> typing.Any:
    """The dataclass of an optional section, or else the hint unchanged."""
    kinds = [a for a in get_args(hint) if a is not type(None)]
    return kinds[0] if len(kinds) == 1 and dataclasses.is_dataclass(kinds[0]) else hint


def _section_help(cls: type, path: str) -> list[str]:
    lines = ["", f"[{path}]" + (f"  {_first_line(cls)}" if cls.__module__.startswith("farsight.") else "")]
    hints, docs, spans = typing.get_type_hints(cls), _field_docs(cls), _ranges(cls)
    nested = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        kinds = [a for a in (hint, *get_args(hint), *(b for a in get_args(hint) for b in get_args(a)))
                 if dataclasses.is_dataclass(a)]  # fmt: skip
        if kinds:
            nested += [(k, f"{path}.{field.name}") for k in kinds]
            continue
        lines += _option_help(field, f"{path}.{field.name}", hint, docs, spans)
    for kind, where in nested:
        lines += _section_help(typing.cast(type, kind), where)
    return lines


def _option_help(
    field: dataclasses.Field, name: str, hint: typing.Any, docs: dict[str, str], spans: dict[str, Range]
) -> list[str]:
    shown = str(hint.__name__ if isinstance(hint, type) and not get_args(hint) else hint).replace("typing.", "")
    if field.name in spans:
        shown += f", {spans[field.name]}"
    return [
        f"  --{name}  {shown}  (default: {default_of(field)!r})",
        *textwrap.wrap(docs.get(field.name, ""), 100, initial_indent="      ", subsequent_indent="      "),
    ]


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
