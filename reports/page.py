"""One HTML page that needs nothing else: no network, no script. Pages of figures are made of its parts.

Parts are elements, not text: what a model or a path is called is escaped when the page is written, and tags always close.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

Part = Element | str
"""An element, or text as it is."""

ALLOWED = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What a browser may load or run: the styles in the page, and nothing else."""


def tag(name: str, /, *children: Part | None, **attributes: object) -> Element:
    """An element; `class_` is the attribute class, `stroke_width` is stroke-width, and what is None is left out."""
    given = {key.rstrip("_").replace("_", "-"): str(value) for key, value in attributes.items() if value is not None}
    element = Element(name, given)
    for child in children:
        if isinstance(child, Element):
            element.append(child)
        elif child is not None and len(element):
            element[-1].tail = (element[-1].tail or "") + child
        elif child is not None:
            element.text = (element.text or "") + child
    return element


def page(title: str, *parts: Part) -> str:
    """The whole file, whose heading is `title`."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    html = tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", http_equiv="Content-Security-Policy", content=ALLOWED),
            tag("link", rel="icon", href="data:,"),
            tag("title", title),
            tag("style", style),
        ),
        tag("body", tag("main", tag("h1", title), *parts)),
        lang="en",
    )
    text = "<!DOCTYPE html>\n" + ElementTree.tostring(html, encoding="unicode", method="html") + "\n"
    return text.encode("utf-8", "replace").decode("utf-8")  # a file's name need not be UTF-8


def section(heading: str, *parts: Part | None) -> Element:
    return tag("section", tag("h2", heading), *parts, id="-".join(heading.lower().split()))


def note(*parts: Part) -> Element:
    """A sentence or two below a heading: what is measured, and how."""
    return tag("p", *parts, class_="note")


def warning(*parts: Part) -> Element:
    """What a reader has to know before comparing figures."""
    return tag("p", *parts, class_="warning")


def command(text: str) -> Element:
    """A command line to copy."""
    return tag("pre", tag("code", text), class_="command")


def missing(what: str, commands: Sequence[str]) -> Element:
    """In the place of figures that were not measured: what, and the commands that measure it."""
    return tag("div", tag("p", what), *map(command, commands), class_="missing")


def table(header: Sequence[Part], rows: Iterable[Sequence[Part]], caption: str, numbers: bool = True) -> Element:
    """A table whose first column names its rows; with `numbers`, the other columns are aligned to the right.

    Where it is wider than the screen it scrolls, and its caption does not.
    """
    head = tag("tr", *(tag("th", cell, scope="col") for cell in header))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    element = tag(
        "table", tag("thead", head), tag("tbody", *body), class_="numbers" if numbers else None, aria_label=caption
    )
    return tag(
        "div", tag("p", caption, class_="caption"), tag("div", element, class_="scrolls", tabindex="0"), class_="table"
    )


def figure(picture: Element, caption: str, *beside: Part) -> Element:
    """A picture with its caption, and its figures in a table beside it."""
    drawn = tag("figure", picture, tag("figcaption", caption))
    return tag("div", drawn, *beside, class_="beside" if beside else None)


def folded(summary: str, *parts: Part) -> Element:
    """Parts that open with a click, and on paper."""
    return tag("details", tag("summary", summary), *parts)
