"""Options that take lists: every form on the command line gives what a config file gives, and so does what --help shows."""

import dataclasses
import re
import typing
from typing import Literal, get_args, get_origin

import pytest

from farsight.configs.finetuning import FinetuneConfig
from farsight.configs.help import help_text
from farsight.configs.load import load_config
from farsight.configs.schema import JobConfig
from farsight.configs.typed import Raw, convert, default_of
from farsight.errors import ConfigError


def inside(hint):
    """A type, and all types in it."""
    yield hint
    for argument in get_args(hint):
        yield from inside(argument)


def lists(cls, path=""):
    """(option, type, type of items, default) of each option below a config class that takes a list of numbers or words."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint, name = hints[field.name], f"{path}{field.name}"
        classes = [one for one in inside(hint) if dataclasses.is_dataclass(one)]
        many = next((one for one in inside(hint) if get_origin(one) in (list, tuple)), None)
        for one in classes:
            yield from lists(one, f"{name}.N." if many else f"{name}.")
        if many and not classes:
            yield name, hint, get_args(many)[0], default_of(field)


EVERY = {name: (cls, *rest) for cls in (JobConfig, FinetuneConfig) for name, *rest in lists(cls)}


def samples(kind):
    """Two items, as TOML writes them."""
    if get_origin(kind) is Literal:
        return [f'"{choice}"' for choice in (*get_args(kind), *get_args(kind))[:2]]
    return {int: ["0", "40"], float: ["1.5", "2.5"], str: ['"a"', '"b/c"']}[kind]


def test_there_are_lists():
    assert {
        "lora.layers",
        "garfa.layers",
        "lora.modules",
        "data.sources.N.data_dir",
        "position.garfa.layers.N.raw",
    } <= {*EVERY}
    assert len(EVERY) >= 10


@pytest.mark.parametrize("name", EVERY)
def test_all_forms_are_one_list(name):
    _, hint, kind, _ = EVERY[name]
    one, other = samples(kind)
    expected = convert(hint, [eval(one), eval(other)], name)  # as a file gives it
    assert list(expected) == [eval(one), eval(other)]
    bare = f"{one},{other}".replace('"', "")
    forms = [
        f"[{one},{other}]",
        f"[{one}, {other}]",
        f" [ {one} , {other} ] ",
        f"[{bare}]",
        f"[{bare.replace(',', ', ')}]",
    ]
    if str not in get_args(hint)[:1]:  # such text has a meaning of its own, as "0,23:32" for lora.layers
        forms += [bare, bare.replace(",", ", ")]
    for form in forms:
        assert convert(hint, Raw(form), name) == expected, form
    assert list(convert(hint, Raw("[]"), name)) == []


@pytest.mark.parametrize(
    "name", [name for name in EVERY if "rules.N.rotary" not in name]
)  # there it refers to position.rotary
def test_what_help_shows_can_be_given(name):
    cls, hint, _, default = EVERY[name]
    text = help_text(cls=cls)
    shown = re.search(rf"--{re.escape(name)}  (.*?)  \(default: (.*)\)\n", text)
    assert shown is not None, name
    assert "tuple" not in shown[1]
    assert "list of" in shown[1]
    assert convert(hint, Raw(shown[2].strip("'")), name) in (default, tuple(default), list(default))


def test_layers_on_the_command_line():
    for given, expected in (
        ("[0,40]", (0, 40)),
        ("[0, 23]", (0, 23)),
        ("0,23:32", "0,23:32"),
        ("sensitive:10", "sensitive:10"),
    ):
        assert load_config(["--lora.layers", given], FinetuneConfig).lora.layers == expected
    modules = load_config(["--lora.modules", "[q_proj, v_proj]"], FinetuneConfig).lora.modules
    assert modules == ("q_proj", "v_proj")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--lora.layers=[0,x]", r"lora\.layers\.1 = x must be a whole number"),
        ("--lora.layers=[0,[1]]", r"lora\.layers\.1 = \[1\] must be a whole number"),
        ("--lora.layers=[0,40", r"lora\.layers = \[0,40 must be a list, such as \[a, b\] or a,b: "),
        ("--lora.modules=[q_proj,wq]", r"lora\.modules\.1 = wq must be one of 'q_proj'"),
        ("--lora.modules=['q_proj]", r"lora\.modules = \['q_proj\] must be a list"),
    ],
)
def test_what_is_no_list_is_refused_by_name(option, said):
    with pytest.raises(ConfigError, match=said):
        load_config([option], FinetuneConfig)
