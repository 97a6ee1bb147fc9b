"""Line charts and heat maps as SVG elements, so that a page needs no script.

Colours are classes in `page.css`; each series also has its own marker, so that it can be told apart without colours. Points and
cells show their values when the pointer rests on them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from farsight.reports.page import tag
from farsight.reports.svg_axes import Axis

WIDTH, HEAT_MAP_WIDTH = 480.0, 400.0
CHARACTER = 8.0
"""Upper bound on the width of a digit at the page's font size."""

COLOURS = 8
_MARKERS = (
    "M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0-7.2 0z",  # circle
    "M-3.3-3.3h6.6v6.6h-6.6z",  # square
    "M0-4.4L4.2 3.2H-4.2z",  # triangle
    "M0-4.7L4.7 0L0 4.7L-4.7 0z",  # diamond
    "M0 4.4L4.2-3.2H-4.2z",  # triangle, point down
    "M-1.4-4.2h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8v-2.8h-2.8v-2.8h2.8z",  # plus
    "M0-4.6L4.4-1.4L2.7 3.7H-2.7L-4.4-1.4z",  # pentagon
)

_VIRIDIS = (
    (68, 1, 84), (72, 36, 117), (65, 68, 135), (53, 95, 141), (42, 120, 142), (33, 145, 140),
    (34, 168, 132), (68, 191, 112), (122, 209, 81), (189, 223, 38), (253, 231, 37),
)  # fmt: skip
"""Smith and van der Walt's colour map at equal steps from 0 to 1: perceptually uniform, also for colour-blind readers."""

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
    def classes(self) -> str:
        return "series-dense" if self.number is None else f"series-{self.number % COLOURS}"


@dataclass(frozen=True)
class Mark:
    """A vertical line across a chart, with a label at its top."""

    x: float
    label: str = ""


@dataclass(frozen=True)
class _Plot:
    """The place of a chart's axes in its picture."""

    x: Axis
    y: Axis
    left: float
    right: float
    top: float
    bottom: float

    def at(self, x: float, y: float) -> Point:
        """The place of a value in the picture."""
        across, up = self.x.share(x), self.y.share(y)
        return self.left + across * (self.right - self.left), self.bottom - up * (self.bottom - self.top)


def line_chart(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    hover: Callable[[Series, float, float], str],
    marks: Sequence[Mark] = (),
    height: float = 300.0,
) -> Element:
    """A chart of lines over a common axis.

    Args:
        hover: returns the text shown for a point, from its series and values.
    """
    left = 10 + CHARACTER * max((len(label) for _, label in y.ticks), default=0)
    end = CHARACTER * len(x.ticks[-1][1]) / 2 if x.ticks else 0
    plot = _Plot(x, y, left, WIDTH - max(8.0, end), 24.0 + 14 * any(mark.label for mark in marks), height - 38)
    chart = _svg(height, f"{y.title} over {x.title}: {', '.join(dict.fromkeys(s.name for s in series))}")
    chart.append(tag("text", y.title, x=0, y=12, class_="title"))
    chart.append(tag("text", x.title, x=_round(plot.right), y=height - 4, text_anchor="end", class_="title"))
    _draw_ticks(chart, plot)
    _draw_marks(chart, plot, marks)
    for one in series:
        _draw_line(chart, plot, one)
    for one in series:  # points are drawn over all lines
        if one.markers:
            _draw_points(chart, plot, one, hover)
    return chart


def _draw_ticks(chart: Element, plot: _Plot) -> None:
    for value, label in plot.y.ticks:
        _, y = plot.at(plot.x.low, value)
        chart.append(
            tag("line", x1=_round(plot.left), x2=_round(plot.right), y1=_round(y), y2=_round(y), class_="grid")
        )
        chart.append(tag("text", label, x=_round(plot.left - 6), y=_round(y + 4), text_anchor="end", class_="y-tick"))
    places = [plot.at(value, plot.y.low)[0] for value, _ in plot.x.ticks]
    written = apart(places, [label for _, label in plot.x.ticks])
    for number, (x, (_, label)) in enumerate(zip(places, plot.x.ticks, strict=True)):
        long = 5 if number in written else 3
        chart.append(tag("line", x1=_round(x), x2=_round(x), y1=plot.bottom, y2=plot.bottom + long, class_="grid"))
        if number in written:
            chart.append(tag("text", label, x=_round(x), y=plot.bottom + 17, text_anchor="middle", class_="x-tick"))


def apart(places: Sequence[float], labels: Sequence[str]) -> set[int]:
    """Numbers of the labels, centred at these places, that fit without touching: the rightmost, then leftwards what fits."""
    written: set[int] = set()
    free = math.inf
    for number in sorted(range(len(places)), key=lambda number: -places[number]):
        half = CHARACTER * len(labels[number]) / 2
        if places[number] + half <= free:
            written.add(number)
            free = places[number] - half - CHARACTER
    return written


def _draw_marks(chart: Element, plot: _Plot, marks: Sequence[Mark]) -> None:
    places = [plot.at(mark.x, plot.y.low)[0] for mark in marks]
    written = apart(places, [mark.label for mark in marks])
    for number, (mark, x) in enumerate(zip(marks, places, strict=True)):
        kind = "mark" if mark.label else "boundary"
        chart.append(tag("line", x1=_round(x), x2=_round(x), y1=plot.top - 6, y2=plot.bottom, class_=kind))
        if mark.label and number in written:
            half = CHARACTER * len(mark.label) / 2
            middle = min(max(x, half), WIDTH - half)
            chart.append(tag("text", mark.label, x=_round(middle), y=plot.top - 10, text_anchor="middle"))


def _draw_line(chart: Element, plot: _Plot, series: Series) -> None:
    steps, broken = [], True
    for x, y in series.points:
        if math.isfinite(y):
            across, down = plot.at(x, y)
            steps.append(f"{'M' if broken else 'L'}{_round(across)} {_round(down)}")
        broken = not math.isfinite(y)
    kind = "line" + " dashed" * series.dashed + " thin" * series.thin
    chart.append(tag("path", d="".join(steps), class_=f"{kind} {series.classes}"))


def _draw_points(chart: Element, plot: _Plot, series: Series, hover: Callable[[Series, float, float], str]) -> None:
    kind = "dashed-point" if series.dashed else "point"
    for x, y in series.points:
        if math.isfinite(y):
            across, down = plot.at(x, y)
            place = f"translate({_round(across)} {_round(down)})"
            title = tag("title", hover(series, x, y))
            chart.append(
                tag("path", title, d=_marker(series.number), transform=place, class_=f"{kind} {series.classes}")
            )


def _marker(number: int | None) -> str:
    return _MARKERS[0 if number is None else number % len(_MARKERS)]


def swatch(series: Series) -> Element:
    """A sample of a series' line and marker, for legends."""
    kind = "line" + " dashed" * series.dashed
    picture = tag("svg", viewBox="0 0 34 12", class_="swatch", aria_hidden="true")
    picture.append(tag("path", d="M1 6H33", class_=f"{kind} {series.classes}"))
    if series.markers:
        kind = "dashed-point" if series.dashed else "point"
        picture.append(
            tag("path", d=_marker(series.number), transform="translate(17 6)", class_=f"{kind} {series.classes}")
        )
    return picture


def legend(series: Sequence[Series]) -> Element:
    """A legend of the lines, which charts below one another may share."""
    return tag("ul", *(tag("li", swatch(one), one.name) for one in series), class_="legend")


def heat_map(
    columns: Sequence[str],
    rows: Sequence[str],
    shares: Mapping[tuple[int, int], float],
    hover: Callable[[int, int], str],
    titles: tuple[str, str],
    trained: int | None = None,
    of: str = "accuracy",
) -> Element:
    """Cells coloured from dark (0) to bright (1), with their percentages where there is room.

    Args:
        shares: 0 to 1, by column and row; missing cells stay empty.
        hover: returns the text shown for a cell.
        titles: titles of the columns and of the rows.
        trained: draws a line after this many columns, the end of the trained length; None draws none.
        of: what the cells measure, for the description.
    """
    left = 10 + CHARACTER * max(map(len, rows))
    top, across, down = 30.0, (HEAT_MAP_WIDTH - left - 2) / len(columns), 24.0
    height = top + down * len(rows) + 40
    chart = _svg(height, f"{of} by {titles[0]} and {titles[1]}", HEAT_MAP_WIDTH)
    chart.append(tag("text", titles[1], x=0, y=12, class_="title"))
    chart.append(tag("text", titles[0], x=HEAT_MAP_WIDTH - 2, y=height - 4, text_anchor="end", class_="title"))
    for column in range(len(columns)):
        for row in range(len(rows)):
            x, y = left + column * across, top + row * down
            share = shares.get((column, row))
            fill = None if share is None else _hex(share)
            chart.append(
                tag(
                    "rect",
                    tag("title", hover(column, row)),
                    x=_round(x),
                    y=_round(y),
                    width=_round(across),
                    height=down,
                    class_="cell unmeasured" if share is None else "cell",
                    fill=fill,
                )
            )
            if share is not None and across >= 4 * CHARACTER:
                chart.append(
                    tag(
                        "text",
                        f"{100 * share:.0f}",
                        x=_round(x + across / 2),
                        y=_round(y + down / 2 + 4),
                        text_anchor="middle",
                        class_="on-light" if _is_light(share) else "on-dark",
                        pointer_events="none",
                    )
                )
    for row, label in enumerate(rows):
        chart.append(
            tag("text", label, x=_round(left - 6), y=_round(top + row * down + down / 2 + 4), text_anchor="end")
        )
    places = [left + (column + 0.5) * across for column in range(len(columns))]
    for column in apart(places, columns):
        y = top + down * len(rows) + 16
        chart.append(tag("text", columns[column], x=_round(places[column]), y=_round(y), text_anchor="middle"))
    if trained is not None:
        x = left + trained * across
        for kind in ("trained-room", "trained"):
            chart.append(tag("line", x1=_round(x), x2=_round(x), y1=top - 8, y2=top + down * len(rows), class_=kind))
        side = "end" if x > HEAT_MAP_WIDTH / 2 else "start"
        label = "trained ←" if side == "end" else "← trained"
        chart.append(tag("text", label, x=_round(x), y=top - 12, text_anchor=side))
    return chart


def heat_map_scale() -> Element:
    """The colour scale of heat maps, which maps below one another may share."""
    picture = tag("svg", viewBox="0 0 220 12", class_="scale", aria_hidden="true")
    for number in range(11):
        picture.append(tag("rect", x=20 * number, y=0, width=20, height=12, fill=_hex(number / 10)))
    return tag("p", "0 % ", picture, " 100 %", class_="legend")


def colour(share: float) -> tuple[int, int, int]:
    """The colour of a share from 0 to 1, as red, green and blue from 0 to 255."""
    place = min(max(share, 0.0), 1.0) * (len(_VIRIDIS) - 1)
    below = min(int(place), len(_VIRIDIS) - 2)
    part = place - below
    low, high = _VIRIDIS[below], _VIRIDIS[below + 1]
    red, green, blue = (round(a + part * (b - a)) for a, b in zip(low, high, strict=True))
    return red, green, blue


def _hex(share: float) -> str:
    return "#" + "".join(f"{part:02x}" for part in colour(share))


def _is_light(share: float) -> bool:
    """Whether black is easier to read on the colour than white (relative luminance, WCAG 2)."""
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour(share)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.179


def _svg(height: float, label: str, width: float = WIDTH) -> Element:
    return tag("svg", viewBox=f"0 0 {width:g} {height:g}", class_="chart", role="img", aria_label=label)


def _round(place: float) -> float:
    return round(place, 2)
