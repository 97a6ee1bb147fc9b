"""SVG charts: points, cells and ticks are at the places of their values."""

import itertools
import math
import random
import re
from xml.etree import ElementTree

import matplotlib
import pytest

from farsight.reports.svg_axes import length_axis, linear_axis, log_axis, short_tokens
from farsight.reports.svg_charts import CHARACTER, Mark, Series, apart, colour, heat_map, line_chart


def ticks(chart, kind, place):
    """Place and number of each labelled tick."""
    found = [element for element in chart.iter("text") if element.get("class") == kind]
    return [(float(element.get(place)), float(element.text.replace(",", ""))) for element in found]


def inverse(first, last, log):
    """A function from place to value, from two ticks of an axis."""
    (p, a), (q, b) = first, last
    if log:
        return lambda place: a * (b / a) ** ((place - p) / (q - p))
    return lambda place: a + (b - a) * (place - p) / (q - p)


@pytest.mark.parametrize("log", [False, True])
def test_points_stand_where_their_values_are(log):
    draw = random.Random(4)
    points = [(draw.uniform(3, 9000), draw.uniform(0.02, 700)) for _ in range(40)]
    series = [Series("a", points[:30], 0), Series("b", [*points[30:], (50.0, math.nan)], 1, dashed=True)]
    xs, ys = zip(*points, strict=True)
    axes = [log_axis(v, "v", "{:g}".format) if log else linear_axis(v, "v") for v in (xs, ys)]
    chart = line_chart(series, *axes, lambda s, x, y: f"{s.name} {x} {y}", [Mark(100.0, "here")])
    x_ticks, y_ticks = ticks(chart, "x-tick", "x"), ticks(chart, "y-tick", "y")
    x_of = inverse(min(x_ticks), max(x_ticks), log)
    y_of = inverse(*((place - 4, value) for place, value in (min(y_ticks), max(y_ticks))), log)  # text stands 4 lower
    assert max(x_ticks)[1] > min(x_ticks)[1]  # to the right
    assert max(y_ticks)[1] < min(y_ticks)[1]  # upwards
    drawn = [e for e in chart.iter("path") if e.get("transform")]
    assert len(drawn) == len(points)
    for element, (x, y) in zip(drawn, points, strict=True):
        across, down = map(float, re.findall(r"[\d.]+", element.get("transform")))
        assert x_of(across) == pytest.approx(x, rel=2e-3, abs=0.2)
        assert y_of(down) == pytest.approx(y, rel=1e-2, abs=0.05)
        name = {"point series-0": "a", "dashed-point series-1": "b"}[element.get("class")]
        assert element.find("title").text == f"{name} {x} {y}"
    mark = next(e for e in chart.iter("line") if e.get("class") == "mark")
    assert x_of(float(mark.get("x1"))) == pytest.approx(100, rel=2e-3, abs=0.2)


def test_axes_have_ticks_inside_and_labels_apart():
    draw = random.Random(9)
    for _ in range(500):
        low = 10 ** draw.uniform(-3, 9)
        values = [low * draw.uniform(1, 10 ** draw.uniform(0.01, 6)) for _ in range(3)]
        for axis in (
            linear_axis(values, ""), linear_axis(values, "", snug=True),
            log_axis(values, "", "{:.6g}".format), log_axis(values, "", "{:.6g}".format, base=2),
        ):  # fmt: skip
            assert 2 <= len(axis.ticks) <= 8
            assert all(-1e-9 <= axis.share(value) <= 1 + 1e-9 for value in [*values, *(tick for tick, _ in axis.ticks)])
        for value, label in linear_axis(values, "").ticks:
            assert float(label.replace(",", "")) == pytest.approx(value, rel=1e-9, abs=1e-12)
    for _ in range(200):
        places = sorted(draw.uniform(0, 480) for _ in range(12))
        labels = [str(10 ** draw.randrange(6)) for _ in places]
        written = sorted(apart(places, labels))
        assert written[-1] == 11
        ends = [
            (places[i] - CHARACTER * len(labels[i]) / 2, places[i] + CHARACTER * len(labels[i]) / 2) for i in written
        ]
        assert all(right < left for (_, right), (left, _) in itertools.pairwise(ends))


def test_lengths_are_written_short():
    said = [short_tokens(tokens) for tokens in (1, 512, 1000, 1024, 1536, 131072, 2**20)]
    assert said == ["1", "512", "1,000", "1k", "1,536", "128k", "1M"]
    assert [label for _, label in length_axis([4096, 512, 4096]).ticks] == ["512", "4k"]


def test_heat_maps_show_each_cell_in_its_colour():
    shares = {(c, r): (c + 3 * r) / 11 for c in range(3) for r in range(4) if (c, r) != (1, 2)}
    chart = heat_map(["1k", "2k", "4k"], list("abcd"), shares, lambda c, r: f"{c},{r}", ("length", "depth"), 2)
    boxes = {e.find("title").text: e for e in chart.iter("rect")}
    assert len(boxes) == 12
    assert boxes["1,2"].get("fill") is None
    for (c, r), share in shares.items():
        box = boxes[f"{c},{r}"]
        seen = tuple(int(box.get("fill")[i : i + 2], 16) for i in (1, 3, 5))
        expected = [255 * part for part in matplotlib.colormaps["viridis"](share)[:3]]
        assert seen == pytest.approx(expected, abs=4)
        assert float(box.get("x")) == pytest.approx(
            float(boxes["0,0"].get("x")) + c * float(box.get("width")), abs=0.05
        )
        assert float(box.get("y")) == float(boxes["0,0"].get("y")) + r * float(box.get("height"))
    (line,) = [e for e in chart.iter("line") if e.get("class") == "trained"]
    assert float(line.get("x1")) == pytest.approx(float(boxes["2,0"].get("x")), abs=0.05)
    assert colour(-1.0) == colour(0.0) == (68, 1, 84)
    ElementTree.tostring(chart)
