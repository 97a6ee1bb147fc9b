"""A section of `farsight report`: the command whose figures it shows, and how they are found and drawn."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import Element

from farsight.reports.page import Part
from farsight.reports.results import Result


@dataclass(frozen=True)
class ToolSection:
    """A section with the results of one command."""

    command: str
    """Name of the command of `farsight`; it is the kind of its results."""
    is_result: Callable[[Mapping[str, Any]], bool]
    """Whether a JSON object is a result of the command."""
    arguments: Callable[[list[str], list[str]], list[str]]
    """From text files and context lengths, the command's arguments between the model and --json."""
    render: Callable[[Sequence[Result], Sequence[Part]], Element] | None
    """The section, from the results and the parts that stand for missing ones. None: the section on costs shows them."""
    measured: bool = False
    """Whether `--measure` runs the command for models without a result."""


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number; true and false are not."""
    return type(value) in (int, float)
