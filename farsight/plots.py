"""Pictures: the style and colours of all of them, and what they share. Nothing else sets up matplotlib.

Figures are made without pyplot, so they need no display and are freed like other objects. Functions import matplotlib when they
draw, as importing it takes long.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from farsight.files import written_whole

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#202020", "#56b4e9", "#e69f00")
"""Colours that colour-blind readers can tell apart (Okabe and Ito, 2008, without their yellow, which is too pale for lines)."""
GREY = "#808080"
"""What lines are compared with: references, borders."""
MAP, DIVERGING = "viridis", "RdBu_r"
"""Colour maps for amounts, dark to bright, and for deviations to either side of white."""
MARKERS = "osD^v<>"
STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.prop_cycle": f"cycler(color={list(PALETTE)})",
    "axes.titlesize": "medium",
    "figure.titlesize": "medium",
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "grid.alpha": 0.3,
    "image.aspect": "auto",
    "image.cmap": MAP,
    "image.interpolation": "nearest",
    "legend.fontsize": "small",
    "legend.frameon": False,
    "lines.markersize": 5,
    "savefig.dpi": 120,
    "svg.hashsalt": "farsight",  # ids, and so files, are the same each time
}


@contextmanager
def styled(more: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Draws in our style inside, with `more` of matplotlib's settings."""
    import matplotlib

    settings: Any = {**STYLE, **(more or {})}  # matplotlib's types list every key
    with matplotlib.rc_context(settings):
        yield


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Any]:
    """Yields an empty figure to draw on, of a size in inches, and then writes it, whole or not at all.

    Args:
        path: PNG, SVG or PDF file.
    """
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        with written_whole(path) as part:
            figure.savefig(part, format=path.suffix.removeprefix("."))


def line_style(number: int, hollow: bool = False) -> dict[str, Any]:
    """Colour, marker and line of a model, in matplotlib's terms.

    Args:
        number: the model's place on the command line.
        hollow: dashed, with hollow markers; for figures measured with scopes that grow with the sequence.
    """
    colour = PALETTE[number % len(PALETTE)]
    return {
        "color": colour,
        "marker": MARKERS[(number + number // len(PALETTE)) % len(MARKERS)],
        "linestyle": "--" if hollow else "-",
        "markerfacecolor": "white" if hollow else colour,
    }


def shades(count: int) -> list[Any]:
    """Colours of an ordered set of lines, dark to bright."""
    from matplotlib import colormaps

    return [colormaps[MAP](0.9 * number / max(1, count - 1)) for number in range(count)]


def is_dark(colour: Any) -> bool:
    """Whether white is easier to read on a colour than black (relative luminance, WCAG 2)."""
    from matplotlib.colors import to_rgb

    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] <= 0.179


def cell_map(axes: Any, values: Sequence[Sequence[float]], text: Callable[[float], str] | None, **more: Any) -> Any:
    """Draws a map of cells, in each of which `text` writes its value; returns matplotlib's image.

    Args:
        values: rows from the top; NaN leaves a cell empty.
        more: arguments of matplotlib's `imshow`.
    """
    image = axes.imshow(values, **more)
    axes.grid(False)
    if text is not None:
        write_cells(axes, image, values, text, fontsize="x-small")
    return image


def write_cells(
    axes: Any, image: Any, values: Sequence[Sequence[float]], text: Callable[[float], str], **more: Any
) -> None:
    """Writes each value into its cell, centred at its column and row, in black or white as its colour needs."""
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            if math.isfinite(value):
                colour = "white" if is_dark(image.to_rgba(value)) else "black"
                axes.text(column, row, text(value), ha="center", va="center", color=colour, **more)


def whole_numbers(axis: Any) -> None:
    """Puts ticks at whole numbers alone."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def length_ticks(axes: Any, lengths: Sequence[int], **more: Any) -> None:
    """Makes the horizontal axis logarithmic, with a tick at each length.

    Args:
        more: arguments of matplotlib's `set_xticks`.
    """
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], **more)
    axes.minorticks_off()


def log_if_wide(axes: Any, values: Iterable[float], ratio: float) -> bool:
    """Makes the vertical axis logarithmic if the largest finite value is more than `ratio` times the smallest, above 0."""
    known = [value for value in values if math.isfinite(value)]
    wide = bool(known) and min(known) > 0 and max(known) > ratio * min(known)
    if wide:
        axes.set_yscale("log")
    return wide


def token_unit(most: float) -> tuple[str, float]:
    """The unit of an axis of training tokens up to `most`, and its size."""
    return ("billion", 1e9) if most >= 2e9 else ("million", 1e6)


def borders(axes: Any, places: Iterable[float]) -> None:
    """Dotted grey lines upwards, such as at the ends of stages and at trained lengths."""
    for place in places:
        axes.axvline(place, color=GREY, linestyle=":", linewidth=1.2)


def legend_below(figure: Any, columns: int, of: Any = None) -> None:
    """A legend below the whole figure.

    Args:
        of: the axes whose lines it names; None for all of them.
    """
    named = of.get_legend_handles_labels() if of is not None else ()
    figure.legend(*named, loc="outside lower center", ncols=columns)
