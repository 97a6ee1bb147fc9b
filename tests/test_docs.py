"""README.md and the pages of docs/: links lead somewhere, and the files, modules and commands they name exist."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from farsight.commands import COMMANDS
from tests.running import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = sorted(path.name for path in ROOT.glob("[a-z]*") if path.is_dir() and path.name not in ("runs", "assets"))
SUFFIXES = "css|jsonl?|md|png|py|sh|toml"
FILE = re.compile(rf"(?<![\w./])(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./*{{}},-]*\.(?:{SUFFIXES})\b")
PLACEHOLDER = re.compile(r"X|TOOL|my_\w+")
"""Names of files that stand for one of the reader's."""
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def spellings(name: str) -> Iterator[str]:
    """The names that a shell makes of one with {a,b}."""
    if braces := re.search(r"\{([^{}]*)\}", name):
        for choice in braces[1].split(","):
            yield from spellings(name[: braces.start()] + choice + name[braces.end() :])
    else:
        yield name


def missing_files(text: str) -> list[str]:
    """Files of this repository that the text names, outside links, and that neither exist nor are written by it (tutorials)."""
    written = re.findall(r'^```\w+ title="(.+)"$', text, flags=re.MULTILINE)
    names = [name for found in FILE.findall(LINK.sub("", text)) for name in spellings(found) if name not in written]
    return [name for name in names if not PLACEHOLDER.fullmatch(Path(name).stem) and not any(ROOT.glob(name))]


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text("utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    return [link for link in LINK.findall(FENCE.sub("", page.read_text("utf-8"))) if "://" not in link]


@every_page
def test_links_lead_somewhere(page):
    for link in links(page):
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not fragment or fragment in anchors(target), link


def test_pages_have_links():
    assert sum(len(links(page)) for page in PAGES) > 40


def test_every_page_is_in_an_index():
    """docs/README.md, or the README.md of the page's folder, links to it."""
    indexes = [page for page in PAGES[1:] if page.name == "README.md"]
    listed = {(index.parent / link.partition("#")[0]).resolve() for index in indexes for link in links(index)}
    assert not [page for page in PAGES[1:] if page not in indexes and page not in listed]


@every_page
def test_files_exist(page):
    assert not missing_files(page.read_text("utf-8"))


@every_page
def test_commands_exist(page):
    text = page.read_text("utf-8")
    named = re.findall(r"(?<!from )\bfarsight +([a-z][\w-]*)", text)
    added = re.findall(r'^\+ +"([\w-]+)": Command\(', text, flags=re.MULTILINE)
    assert set(named) <= {*COMMANDS, *added}


@every_page
def test_modules_exist(page):
    for name in re.findall(r"python -m ([a-z_]+(?:\.[a-z_]+)+)", page.read_text("utf-8")):
        module = ROOT.joinpath(*name.split("."))
        assert module.with_suffix(".py").exists() or (module / "__main__.py").exists(), name


def test_code_and_configs_name_pages_that_exist():
    sources = [
        path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".toml", ".sh")
    ]
    pages = re.compile(rf"\bdocs/[\w./*-]+\.(?:{SUFFIXES})\b")
    named = [(path, name) for path in [*sources, ROOT / "Makefile"] for name in pages.findall(path.read_text("utf-8"))]
    assert len(named) > 10
    assert not [(path, name) for path, name in named if not any(ROOT.glob(name))]


def test_missing_files_are_found():
    assert missing_files("`configs/nothing.toml`, configs/{load,none}.py, configs/*.none.toml, tests/test_docs.py") == [
        "configs/nothing.toml",
        "configs/none.py",
        "configs/*.none.toml",
    ]
    assert not missing_files("configs/X.toml, runs/a.json, BASE/data/none.json, configs/l*.py")
