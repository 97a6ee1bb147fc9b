"""The style of pictures: colours that colour-blind readers can tell apart, and files that are written whole."""

import itertools

import numpy as np
import pytest

from farsight.plots import MARKERS, PALETTE, cell_map, is_dark, line_style, log_if_wide, picture
from farsight.reports.charts import THEME
from tests.running import ROOT

MACHADO = {
    "full sight": np.eye(3),
    "no red cones": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green cones": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "no blue cones": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
"""Machado, Oliveira and Fernandes (2009): what is seen of linear RGB."""


def linear(colour):
    rgb = np.array(list(bytes.fromhex(colour[1:]))) / 255
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """CIELAB of linear RGB."""
    to_xyz = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
    x, y, z = np.cbrt(np.maximum(to_xyz @ np.clip(rgb, 0, 1) / [0.95047, 1, 1.08883], 0.008856))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", MACHADO)
def test_colours_differ_for_every_reader(sight):
    for least, colours in ((15, PALETTE), (12, [THEME[f"series-{n}"][1] for n in range(len(PALETTE))])):
        seen = [lab(np.array(MACHADO[sight]) @ linear(colour)) for colour in colours]
        assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > least
    assert len({(s["color"], s["marker"]) for s in map(line_style, range(len(PALETTE) * len(MARKERS)))}) == 49


def test_writing_is_black_or_white_as_contrast_needs():
    for colour in (*PALETTE, "#777777", "#757575", "#ffffff", "#000000"):
        luminance = linear(colour) @ [0.2126, 0.7152, 0.0722]
        assert is_dark(colour) == (1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05)


def test_a_picture_is_written_whole_or_not_at_all(tmp_path):
    with pytest.raises(ZeroDivisionError), picture(tmp_path / "a.png", 2, 2):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    with picture(tmp_path / "new" / "a.svg", 2, 2) as figure:
        figure.colorbar(cell_map(figure.subplots(), [[0.1, float("nan")], [0.5, 1.0]], "{:.1f}".format))
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["a.svg"]
    assert (tmp_path / "new" / "a.svg").read_text().count("<image") == 2  # the map and its colour bar


@pytest.mark.parametrize(
    ("values", "wide"), [([1, 9], False), ([1, 11, float("nan")], True), ([0, 11], False), ([], False)]
)
def test_wide_values_have_a_logarithmic_scale(tmp_path, values, wide):
    with picture(tmp_path / "a.png", 2, 2) as figure:
        axes = figure.subplots()
        assert log_if_wide(axes, values, 10) == wide
        assert axes.get_yscale() == ("log" if wide else "linear")


def test_matplotlib_is_set_up_in_one_place():
    code = [
        path for path in ROOT.rglob("*.py") if not {".venv", "tests", "farsight"} & set(path.relative_to(ROOT).parts)
    ]
    assert len(code) > 100
    for path in code:
        text = path.read_text("utf-8")
        assert "pyplot" not in text, path
        assert "rcParams" not in text, path
        assert "savefig" not in text or path.name == "charts.py", path
