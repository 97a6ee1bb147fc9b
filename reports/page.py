"""A self-contained HTML page, which needs no network and no script, and its parts.

The markup is in Jinja's templates beside this file, which escape names of models, paths and other text that is not `Markup`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from farsight.reports.charts import THEME, Axis, Mark, Series, line_chart, map_scale, swatch

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
)
_PARTS: Any = _TEMPLATES.get_template("parts.html").module  # has the macros as attributes


def page(
    title: str,
    intro: str,
    sections: Sequence[Markup],
    made_by: str,
    files: Sequence[Path],
    notes: Sequence[str] = (),
    refresh: int | None = None,
) -> str:
    """The text of the whole file.

    Args:
        made_by: the command line, shown at the page's end.
        files: what the figures come from.
        notes: sentences for the page's end.
        refresh: seconds after which browsers load the page again; None for a page that stays as it is.
    """
    text = _TEMPLATES.get_template("page.html").render(
        title=title,
        intro=f"{intro} Made on {datetime.now():%d %B %Y, %H:%M}.",
        sections=sections,
        made_by=made_by,
        files=dict.fromkeys(map(str, files)),
        notes=notes,
        theme=THEME,
        refresh=refresh,
    )
    return text.encode("utf-8", "replace").decode("utf-8")  # file names may not be valid UTF-8


def section(heading: str, *parts: Markup) -> Markup:
    return _PARTS.section(heading, parts)


def heading(text: str) -> Markup:
    return Markup("<h3>{}</h3>").format(text)


def note(text: str) -> Markup:
    """A sentence or two below a heading, on what is measured and how; what is between backticks is code."""
    words = [
        Markup("<code>{}</code>").format(part) if number % 2 else part for number, part in enumerate(text.split("`"))
    ]
    return Markup('<p class="note">{}</p>').format(Markup().join(words))


def warning(text: str) -> Markup:
    """Something to know before comparing figures."""
    return Markup('<p class="warning">{}</p>').format(text)


def small(text: str, more: str) -> Markup:
    """Text with more in a softer colour after it."""
    return Markup("{} <small>{}</small>").format(text, more)


def missing(what: str, commands: Sequence[str]) -> Markup:
    """Stands in for figures that were not measured, with the commands that measure them."""
    return _PARTS.missing(what, commands)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], caption: str, numbers: bool = True) -> Markup:
    """A table whose first column names its rows; with `numbers`, the other columns are right-aligned.

    A table wider than the screen scrolls under its caption.
    """
    return _PARTS.table(header, list(rows), caption, numbers)


def figure(picture: Markup, caption: str, *beside: Markup) -> Markup:
    """A picture with its caption, and further parts beside it, usually a table of its figures."""
    return _PARTS.figure(picture, caption, beside)


def line_figure(
    lines: Sequence[Series],
    x: Axis,
    y: Axis,
    captions: tuple[str, str],
    marks: Sequence[Mark] = (),
    more: Callable[[Series, float], str] = lambda series, x: "",
    rows: Sequence[Sequence[str]] = (),
) -> Markup:
    """A legend, and a chart of lines beside a table of their figures.

    Args:
        captions: of the chart and of the table.
        marks, more: see `line_chart`.
        rows: further rows for the table.
    """
    known = [{at: y.say(value) for at, value in line.points if not math.isnan(value)} for line in lines]
    places = sorted({at for line in lines for at, _ in line.points})
    cells = [[x.say(at), *(values.get(at, "–") for values in known)] for at in places]
    figures = table([x.title, *(line.name for line in lines)], [*cells, *rows], captions[1])
    return legend(lines) + figure(line_chart(lines, x, y, marks, more), captions[0], figures)


def panels(maps: Iterable[tuple[str, Markup, str]]) -> Markup:
    """Heat maps side by side, each with its name and caption, below their common scale."""
    return _PARTS.panels(map_scale(), list(maps))


def legend(series: Iterable[Series]) -> Markup:
    """A legend of lines, which charts below one another may share."""
    return _PARTS.legend([(swatch(one), one.name) for one in series])


def folded(summary: str, *parts: Markup) -> Markup:
    """Parts that unfold with a click, and in print."""
    return _PARTS.folded(summary, parts)


def facts(entries: Mapping[str, str]) -> Markup:
    """A list of names with their values."""
    return _PARTS.facts(entries)
