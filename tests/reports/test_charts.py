"""Charts of a page: points, cells and ticks are at the places of their values, and their colours and texts are the page's."""

import itertools
import math
import random
import re
from xml.etree import ElementTree

import matplotlib
import pytest

from farsight.reports.charts import (
    THEME,
    Axis,
    Mark,
    Series,
    heat_map,
    length_axis,
    line_chart,
    map_scale,
    short_tokens,
    swatch,
)

NUMBER = re.compile(r"-?[\d.]+")


def place(path):
    """First x and y of a path, or of where it is moved to."""
    x, y = NUMBER.findall(path.get("transform") or path.get("d"))[:2]
    return float(x), float(y)


def labels(chart, anchor):
    """Places and numbers of the labels below the chart (middle) or beside it (end)."""
    found = [text for text in chart.iter("text") if f"text-anchor: {anchor}" in text.get("style")]
    numbers = [text for text in found if re.fullmatch(r"-?[\d.,]+(e[+-]\d+)?", text.text)]
    return [(float(text.get("x")), float(text.get("y")), float(text.text.replace(",", ""))) for text in numbers]


def inverse(first, last, log):
    """A function from place to value, from two ticks of an axis."""
    (p, a), (q, b) = first, last
    if log:
        return lambda at: a * (b / a) ** ((at - p) / (q - p))
    return lambda at: a + (b - a) * (at - p) / (q - p)


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_points_stand_where_their_values_are(scale):
    draw = random.Random(4)
    points = [(draw.uniform(3, 9000), draw.uniform(0.02, 700)) for _ in range(40)]
    series = [Series("a", points[:30], 0), Series("b", [*points[30:], (50.0, math.nan)], 1, dashed=True)]
    axes = Axis("across", scale, say=repr), Axis("up", scale, say=repr)
    svg = line_chart(series, *axes, [Mark(100.0, "here"), Mark(200.0)], lambda s, x: f" of {s.name}{x:.0f}")
    chart = ElementTree.fromstring(svg)
    across = [(x, value) for x, _, value in labels(chart, "middle")]
    lines = sorted({place(e)[1] for e in chart.iter("path") if "--rule" in e.get("style") and not e.get("transform")})
    up = [(min(lines, key=lambda line: abs(line - y)), value) for _, y, value in labels(chart, "end")]
    assert len(across) > 2
    assert len(up) > 2
    assert max(across)[1] > min(across)[1]  # to the right
    assert max(up)[1] < min(up)[1]  # upwards
    x_of, y_of = inverse(min(across), max(across), scale == "log"), inverse(min(up), max(up), scale == "log")
    drawn = [e for e in chart.iter("path") if e.find("title") is not None]
    assert len(drawn) == len(points)
    for element, (x, y) in zip(drawn, points, strict=True):
        at = place(element)
        assert x_of(at[0]) == pytest.approx(x, rel=2e-3, abs=0.3)
        assert y_of(at[1]) == pytest.approx(y, rel=1e-2, abs=0.05)
        name = "b" if "fill: var(--paper)" in element.get("style") else "a"
        assert element.find("title").text == f"{name}\nacross: {x}\nup: {y} of {name}{x:.0f}"
        assert f"var(--series-{'ab'.index(name)})" in element.get("style")
    upright = [e for e in chart.iter("path") if re.fullmatch(r"M ([\d.]+) [\d.]+ L \1 [\d.]+", e.get("d"))]
    (dotted,) = [e for e in upright if "stroke-dasharray" in e.get("style")]
    assert x_of(place(dotted)[0]) == pytest.approx(100, rel=2e-3, abs=0.3)
    (plain,) = [e for e in upright if "stroke-width: 2;" in e.get("style")]
    assert x_of(place(plain)[0]) == pytest.approx(200, rel=2e-3, abs=0.3)
    assert chart.get("aria-label") == "up over across: a, b"
    assert chart.get("role") == "img"


def test_axes_have_ticks_and_labels_that_do_not_touch():
    draw = random.Random(9)
    for _ in range(30):
        low = 10 ** draw.uniform(-3, 9)
        ys = [low * draw.uniform(1, 10 ** draw.uniform(0.01, 6)) for _ in range(3)]
        xs = sorted(draw.randrange(1, 2**20) for _ in ys)
        for scale, x in (("linear", length_axis(xs)), ("auto", Axis("x")), ("log", Axis("x", "log", base=2))):
            svg = line_chart([Series("", list(zip(xs, ys, strict=True)), 0)], x, Axis("y", scale))
            chart = ElementTree.fromstring(svg)
            middle = [text for text in chart.iter("text") if "middle" in text.get("style")]
            across = sorted((float(text.get("x")), text.text) for text in middle)
            assert across
            ends = [(at - 3.5 * len(text), at + 3.5 * len(text)) for at, text in across]  # digits are 7 wide or so
            assert all(right < left for (_, right), (left, _) in itertools.pairwise(ends))
            if x.ticks:
                assert across[-1][1] == short_tokens(xs[-1])
            up = [value for _, _, value in labels(chart, "end")]
            assert 2 <= len(up) <= 9
            if scale == "linear":  # begins and ends at a line
                assert min(up) <= min(ys) <= max(ys) <= max(up)


def test_lengths_are_written_short():
    said = [short_tokens(tokens) for tokens in (1, 512, 1000, 1024, 1536, 131072, 2**20)]
    assert said == ["1", "512", "1,000", "1k", "1,536", "128k", "1M"]
    svg = line_chart([Series("", [(4096, 1), (512, 2)], 0)], length_axis([4096, 512, 4096]), Axis("y"))
    assert [text for text in re.findall(r">([^<>]+)</text>", svg) if text in ("512", "4k")] == ["512", "4k"]


def test_heat_maps_show_each_cell_in_its_colour():
    shares = {(c, r): (c + 3 * r) / 11 for c in range(3) for r in range(4) if (c, r) != (1, 2)}
    svg = heat_map(["1k", "2k", "4k"], list("abcd"), shares, lambda c, r: f"{c},{r}", ("length", "depth"), 2)
    chart = ElementTree.fromstring(svg)
    boxes = {e.find("title").text: e for e in chart.iter("path") if e.find("title") is not None}
    assert len(boxes) == 12
    assert "fill: var(--panel)" in boxes["1,2"].get("style")
    sides = {name: [float(n) for n in NUMBER.findall(box.get("d"))] for name, box in boxes.items()}
    left, top = sides["0,0"][:2]
    width, height = sides["1,1"][0] - left, sides["1,1"][1] - top
    written = {(float(e.get("x")), e.text): e.get("style") for e in chart.iter("text")}
    for (c, r), share in shares.items():
        fill = re.search("fill: #(......)", boxes[f"{c},{r}"].get("style"))[1]
        expected = [255 * part for part in matplotlib.colormaps["viridis"](share)[:3]]
        assert list(bytes.fromhex(fill)) == pytest.approx(expected, abs=1)
        assert sides[f"{c},{r}"][:2] == pytest.approx([left + c * width, top + r * height], abs=0.05)
        style = next(
            s
            for (x, text), s in written.items()
            if text == f"{100 * share:.0f}" and abs(x - left - (c + 0.5) * width) < 1
        )
        assert ("#ffffff" in style) == (share < 0.4)  # above, black is easier to read
    lines = [e for e in chart.iter("path") if "stroke: var(--ink)" in e.get("style")]
    assert [place(line)[0] for line in lines] == [pytest.approx(sides["2,0"][0], abs=0.05)]
    assert chart.get("aria-label") == "accuracy by length and depth"


def test_charts_take_the_page_s_colours_and_fonts():
    charts = [
        line_chart([Series("<b>&{x}", [(0, 1), (1, 2)], number) for number in range(7)], Axis("x"), Axis("y")),
        heat_map(["1"], ["2"], {(0, 0): 0.3}, lambda *_: "", ("x", "y")),
        swatch(Series("", (), None, dashed=True)),
    ]  # fmt: skip
    for svg in (*charts, map_scale()):
        ElementTree.fromstring(svg)
        assert not re.search(r"font|url\(|href|\bid=|http", svg)
        assert not any(light in svg for light, _ in THEME.values())
    assert set(re.findall(r"--series-\d", charts[0])) == {f"--series-{number}" for number in range(7)}
    assert charts[0].count("<title>&lt;b&gt;&amp;{x}\nx: ") == 14
    # The colours of maps stay as they are.
    fixed = {matplotlib.colors.to_hex(matplotlib.colormaps["viridis"](n)) for n in range(256)} | {"#ffffff", "#000000"}
    assert not fixed & {light for light, _ in THEME.values()}
