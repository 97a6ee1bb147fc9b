"""Line charts and heat maps as SVG inside a page: drawn by matplotlib, with the page's fonts and its light or dark colours.

matplotlib draws with the light colours of `THEME`; in its SVG they become the page's variables. Each series also has its own marker,
so that it can be told apart without colours. Points and cells show their values when the pointer rests on them.
"""

import io
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Literal
from xml.etree import ElementTree

from markupsafe import Markup

from farsight.plots import MAP, PALETTE, line_style, styled, write_cells

_DARK = ("#56a8e0", "#f0803c", "#1fc596", "#e29cc4", "#f5f7f9", "#9bd8ff", "#f0b429")
"""The palette, lighter."""
THEME = {
    "paper": ("#fefefe", "#14171b"),
    "ink": ("#1b1f24", "#e6e9ed"),
    "soft": ("#5b6470", "#9aa4b0"),
    "rule": ("#d5dae0", "#343b44"),
    "panel": ("#f5f7f9", "#1d2228"),
    "warn": ("#8a4b00", "#ffc266"),
    "warn-panel": ("#fff4e0", "#33270f"),
    "reference": ("#7d8691", "#98a2ad"),
    **{f"series-{number}": pair for number, pair in enumerate(zip(PALETTE, _DARK, strict=True))},
}
"""Colours of the page by variable of its style sheet: on light and on dark paper. White is left for writing on dark cells."""
_PAPER, _INK, _SOFT, _RULE, _PANEL, _REFERENCE = (
    THEME[name][0] for name in ("paper", "ink", "soft", "rule", "panel", "reference")
)
WIDTH, HEIGHT, HEAT_MAP_WIDTH = 440, 300, 400
_ROOM_FOR_FIGURES = 32.0
"""Width of a cell that its percentage fits into."""
_BETWEEN_LABELS = 6.0
_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"

_STYLE = {
    **dict.fromkeys(("text.color", "xtick.labelcolor", "ytick.labelcolor"), _SOFT),
    **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize", "xtick.labelsize", "ytick.labelsize"), 12),
    **dict.fromkeys([f"axes.spines.{side}" for side in ("left", "right", "top", "bottom")], False),
    **dict.fromkeys(("grid.color", "xtick.color"), _RULE),
    "figure.dpi": 72,  # an inch has 72 units in an SVG, which are pixels here
    "figure.frameon": False,
    "grid.alpha": 1,
    "lines.markersize": 7.5,
    "svg.fonttype": "none",
    "text.parse_math": False,
    "ytick.major.size": 0,
}

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line."""

    name: str
    points: Sequence[Point]
    """x and y; a y that is not finite leaves a gap."""
    number: int | None
    """Selects colour and marker; None is the grey of a reference line."""
    dashed: bool = False
    markers: bool = True
    thin: bool = False

    @property
    def style(self) -> dict[str, Any]:
        """In matplotlib's terms."""
        style = line_style(self.number or 0, self.dashed) | {"linewidth": 1.1 if self.thin else 2.0}
        if self.number is None:
            style |= {"color": _REFERENCE}
        hollow = {"markerfacecolor": _PAPER, "markeredgecolor": style["color"], "markeredgewidth": 1.6}
        style |= hollow if self.dashed else {"markeredgecolor": _PAPER, "markerfacecolor": style["color"]}
        return style | ({} if self.markers else {"marker": ""}) | ({"alpha": 0.6} if self.thin else {})


@dataclass(frozen=True)
class Axis:
    """One axis of a chart; labels that would touch are left out."""

    title: str
    scale: Literal["linear", "whole", "log", "auto"] = "linear"
    """whole: ticks at whole numbers alone. auto: log where the largest value is more than five times the smallest, else linear."""
    ticks: Sequence[float] = ()
    """Where the labels are; if empty, at round numbers."""
    text: Callable[[float], str] = "{:,.10g}".format
    """Labels of ticks."""
    say: Callable[[float], str] = "{:,.0f}".format
    """A value as it is in tables and under the pointer."""
    base: int = 10
    """Of a logarithmic axis' round numbers."""
    ends: tuple[float, float] | None = None


@dataclass(frozen=True)
class Mark:
    """A vertical line across a chart, dotted with a label at its top, or plain."""

    x: float
    label: str = ""


def length_axis(lengths: Iterable[int], title: str = "context length in tokens") -> Axis:
    """A logarithmic axis with a tick at each length."""
    return Axis(title, "log", sorted(set(lengths)), short_tokens, base=2)


def short_tokens(tokens: float) -> str:
    """512, 4k, 128k, 1M: k and M stand for 1,024 and 1,024²; other numbers are written in full."""
    for unit, size in (("M", 2**20), ("k", 2**10)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens / size:.0f}{unit}"
    return f"{tokens:,.0f}"


def line_chart(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    marks: Sequence[Mark] = (),
    more: Callable[[Series, float], str] = lambda series, x: "",
) -> Markup:
    """A chart of lines over a common axis.

    Args:
        more: what to show of a point beside its series and values.
    """

    def hover(one: Series, at: Point) -> str:
        return f"{one.name}\n{x.title}: {x.say(at[0])}\n{y.title}: {y.say(at[1])}{more(one, at[0])}"

    hovers = {}
    with _drawing(WIDTH, HEIGHT) as (figure, axes):
        for number, one in enumerate(series):
            hovers[f"points-{number}"] = [hover(one, at) for at in one.points if math.isfinite(at[1]) and one.markers]
            xs, ys = [at[0] for at in one.points], [at[1] for at in one.points]
            axes.plot(xs, ys, **one.style, gid=f"points-{number}", clip_on=False)
        _set_axis(axes.xaxis, x, [at[0] for one in series for at in one.points])
        _set_axis(axes.yaxis, y, [at[1] for one in series for at in one.points])
        axes.grid(False, axis="x")
        for mark in marks:
            colour, line, width = (_SOFT, (0, (1, 3)), 1) if mark.label else (_RULE, "-", 2)
            axes.axvline(mark.x, color=colour, linestyle=line, linewidth=width, zorder=0)
        top = axes.get_xaxis_transform()
        labels = [axes.text(mark.x, 1.02, mark.label, transform=top, ha="center") for mark in marks if mark.label]
        axes.set_title(y.title, loc="left", pad=22 if labels else 8, color=_INK)
        axes.set_xlabel(x.title, loc="right", color=_INK)
        figure.draw_without_rendering()
        for label in labels:
            if (
                label.get_window_extent().x0 < axes.get_window_extent().x0
            ):  # else it would touch the vertical axis' labels
                label.set_ha("left")
        for row in (axes.get_xticklabels(), labels):
            _keep_apart(row)
        said = f"{y.title} over {x.title}: {', '.join(dict.fromkeys(one.name for one in series))}"
        return _svg(figure, "chart", said, hovers)


def heat_map(
    columns: Sequence[str],
    rows: Sequence[str],
    shares: Mapping[tuple[int, int], float],
    hover: Callable[[int, int], str],
    titles: tuple[str, str],
    trained: int | None = None,
    of: str = "accuracy",
) -> Markup:
    """Cells coloured from dark (0) to bright (1), with their percentages where there is room.

    Args:
        shares: 0 to 1, by column and row; missing cells stay empty.
        hover: returns the text shown for a cell.
        titles: titles of the columns and of the rows.
        trained: draws a line after this many columns, the end of the trained length; None draws none.
        of: what the cells measure, for the description.
    """
    places = [(column, row) for row in range(len(rows)) for column in range(len(columns))]
    values = [[shares.get((column, row), math.nan) for column in range(len(columns))] for row in range(len(rows))]
    with _drawing(HEAT_MAP_WIDTH, 80 + 24 * len(rows)) as (figure, axes):
        mesh = _cells(axes, values, edgecolor=_PAPER, linewidth=1.5, gid="cells")
        axes.invert_yaxis()
        axes.tick_params(length=0)
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_title(titles[1], loc="left", color=_INK, pad=8 if trained is None else 24)
        axes.set_xlabel(titles[0], loc="right", color=_INK)
        if trained is not None:
            for colour, width in ((_PAPER, 7), (_INK, 2)):
                axes.axvline(trained - 0.5, 0, 1.03, color=colour, linewidth=width, clip_on=False)
            side, label = ("right", "trained ←") if 2 * trained > len(columns) else ("left", "← trained")
            axes.text(trained - 0.5, 1.05, label, transform=axes.get_xaxis_transform(), ha=side)
        figure.draw_without_rendering()
        _keep_even(axes.get_xticklabels())
        if axes.get_window_extent().width / len(columns) >= _ROOM_FOR_FIGURES:
            write_cells(axes, mesh, values, lambda share: f"{100 * share:.0f}")
        said = f"{of} by {titles[0]} and {titles[1]}"
        return _svg(figure, "chart", said, {"cells": [hover(*place) for place in places]})


@cache
def map_scale() -> Markup:
    """The colours of heat maps from 0 to 1."""
    with _drawing(220, 12, whole=True) as (figure, axes):
        _cells(axes, [[number / 10 for number in range(11)]])
        return _svg(figure, "scale")


def swatch(series: Series) -> Markup:
    """A sample of a series' line and marker, for legends."""
    return _swatch(series.number, series.dashed, series.markers)


@cache
def _swatch(number: int | None, dashed: bool, markers: bool) -> Markup:
    with _drawing(34, 12, whole=True) as (figure, axes):
        axes.plot([1, 17, 33], [0, 0, 0], **Series("", (), number, dashed, markers).style, markevery=[1])
        axes.set(xlim=(0, 34), ylim=(-1, 1))
        return _svg(figure, "swatch")


@contextmanager
def _drawing(width: int, height: int, whole: bool = False) -> Iterator[tuple[Any, Any]]:
    """Yields a figure of a size in CSS pixels and its axes, which fill it if `whole` and have no ticks then."""
    from matplotlib.figure import Figure

    with styled(_STYLE):
        figure = Figure(figsize=(width / 72, height / 72), layout=None if whole else "constrained")
        axes = figure.add_axes((0, 0, 1, 1)) if whole else figure.subplots()
        axes.patch.set_visible(False)
        if whole:
            axes.set_axis_off()
        yield figure, axes


def _cells(axes: Any, values: Sequence[Sequence[float]], **more: Any) -> Any:
    """Cells centred at whole numbers."""
    from matplotlib import colormaps

    axes.grid(False)
    edges = [[number - 0.5 for number in range(count + 1)] for count in (len(values[0]), len(values))]
    colours = colormaps[MAP].with_extremes(bad=_PANEL)
    return axes.pcolormesh(*edges, values, vmin=0, vmax=1, cmap=colours, **more)


def _set_axis(axis: Any, asked: Axis, values: Iterable[float]) -> None:
    from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

    known = [value for value in values if math.isfinite(value)] or [1.0]
    ratio = max(known) / min(known) if min(known) > 0 else 0
    steps = MaxNLocator(6, steps=(1, 2, 2.5, 5, 10), integer=asked.scale == "whole")
    axis.set_major_locator(steps)
    if asked.scale == "log" or (asked.scale == "auto" and ratio > 5):
        getattr(axis.axes, f"set_{axis.axis_name}scale")("log", base=asked.base)
        low, high = axis.get_view_interval()
        powers = LogLocator(asked.base, (1, 2, 5) if asked.base == 10 and ratio < 100 else (1,), numticks=7)
        inside = [value for value in powers.tick_values(low, high) if low <= value <= high]
        axis.set_major_locator(powers if len(inside) > 1 else steps)
        axis.set_minor_locator(NullLocator())
    elif axis.axis_name == "y" and not asked.ends:  # begin and end at a line
        lines = steps.tick_values(min(known), max(known))
        axis.axes.set_ylim(lines[0], lines[-1])
        axis.set_major_locator(FixedLocator(lines))  # for the wider limits, the steps may be others
    if asked.ticks:
        axis.set_major_locator(FixedLocator(asked.ticks))
    axis.set_major_formatter(lambda value, _: asked.text(value))
    if asked.ends:
        getattr(axis.axes, f"set_{axis.axis_name}lim")(asked.ends)


def _keep_apart(labels: Sequence[Any]) -> None:
    """Hides the labels of a row in a laid out figure that would touch one further to the right."""
    free = math.inf
    for label in sorted(labels, key=lambda label: -label.get_position()[0]):
        place = label.get_window_extent()
        label.set_visible(place.x1 < free)
        free = place.x0 - _BETWEEN_LABELS if label.get_visible() else free


def _keep_even(labels: Sequence[Any]) -> None:
    """Shows every label of a row in a laid out figure or, if some would touch, every second, third … from the last."""
    places = [label.get_window_extent() for label in labels]
    for step in range(1, len(labels) + 1):
        shown = places[::-step]
        if all(left.x1 + _BETWEEN_LABELS < right.x0 for right, left in itertools.pairwise(shown)):
            break
    for number, label in enumerate(reversed(labels)):
        label.set_visible(number % step == 0)


def _svg(figure: Any, kind: str, label: str = "", hovers: Mapping[str, Sequence[str]] = MappingProxyType({})) -> Markup:
    """The figure as an element of a page.

    Args:
        kind: its class.
        label: says what it shows; decorations have none.
        hovers: texts for the points or cells of matplotlib's artists, by their ids.
    """
    file = io.StringIO()
    figure.savefig(file, format="svg")
    root = ElementTree.fromstring(file.getvalue())
    shapes = {shape.get("id"): shape for shape in root.iter(f"{_SVG}path")}
    for name, texts in hovers.items():
        drawn = root.find(f".//{_SVG}g[@id='{name}']")
        if drawn is not None and texts:
            shown = list(drawn.iter(f"{_SVG}use")) or list(drawn.iter(f"{_SVG}path"))
            for element, text in zip(shown, texts, strict=True):
                ElementTree.SubElement(element, f"{_SVG}title").text = text
    for parent in list(root.iter()):
        for child in [child for child in parent if child.tag in (f"{_SVG}defs", f"{_SVG}metadata")]:
            parent.remove(child)
    for element in root.iter():
        if element.tag == f"{_SVG}use":  # markers are repeated in their places, so that a page has no ids to keep apart
            place = f"translate({element.attrib.pop('x')} {element.attrib.pop('y')})"
            shape = shapes[element.attrib.pop(_LINK).removeprefix("#")].get("d", "")
            element.tag, element.attrib = f"{_SVG}path", element.attrib | {"d": shape, "transform": place}
        element.tag = element.tag.removeprefix(_SVG)
        element.text, element.tail = (element.text or "").strip() or None, None
        kept = {key: value for key, value in element.items() if key not in ("id", "clip-path")}
        element.attrib = {key: _for_page(value) for key, value in kept.items() if "rotate(-0" not in value}
    body = "".join(ElementTree.tostring(child, encoding="unicode", method="html") for child in root)
    role = Markup('role="img" aria-label="{}"').format(label) if label else Markup('aria-hidden="true"')
    return Markup('<svg viewBox="{}" class="{}" {}>{}</svg>').format(root.get("viewBox"), kind, role, Markup(body))


def _for_page(attribute: str) -> str:
    """An attribute without fonts, which the page sets, with its variables for colours, and with shorter numbers."""
    attribute = re.sub(r"font[\w-]*: [^;]*;? ?", "", " ".join(attribute.split()))
    attribute = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", attribute)
    for name, (light, _) in THEME.items():
        attribute = attribute.replace(light, f"var(--{name})")
    return attribute
