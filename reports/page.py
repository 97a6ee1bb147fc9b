"""Parts of a self-contained HTML page, which needs no network and no script.

Parts are elements rather than text, so names of models and paths are escaped when the page is written, and every tag closes.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

Part = Element | str
"""An element or plain text."""

ALLOWED = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What a browser may load or run: only the page's own styles and images."""


def tag(name: str, /, *children: Part | None, **attributes: object) -> Element:
    """An element; `class_` becomes the attribute class, `stroke_width` stroke-width, and None leaves an attribute out."""
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
    """The text of the whole file, headed by `title`."""
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
    return text.encode("utf-8", "replace").decode("utf-8")  # file names may not be valid UTF-8


def section(heading: str, *parts: Part | None) -> Element:
    return tag("section", tag("h2", heading), *parts, id="-".join(heading.lower().split()))


def note(*parts: Part) -> Element:
    """A sentence or two below a heading, on what is measured and how."""
    return tag("p", *parts, class_="note")


def warning(*parts: Part) -> Element:
    """Something to know before comparing figures."""
    return tag("p", *parts, class_="warning")


def command(text: str) -> Element:
    """A command line to copy."""
    return tag("pre", tag("code", text), class_="command")


def missing(what: str, commands: Sequence[str]) -> Element:
    """Stands in for figures that were not measured, with the commands that measure them."""
    return tag("div", tag("p", what), *map(command, commands), class_="missing")


def table(header: Sequence[Part], rows: Iterable[Sequence[Part]], caption: str, numbers: bool = True) -> Element:
    """A table whose first column names its rows; with `numbers`, the other columns are right-aligned.

    A table wider than the screen scrolls under its caption.
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
    """A picture with its caption, and further parts beside it, usually a table of its figures."""
    drawn = tag("figure", picture, tag("figcaption", caption))
    return tag("div", drawn, *beside, class_="beside" if beside else None)


def folded(summary: str, *parts: Part) -> Element:
    """Parts that unfold with a click, and in print."""
    return tag("details", tag("summary", summary), *parts)
