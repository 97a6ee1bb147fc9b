"""Output options of tools that measure one or more models: a JSON file of figures, and a picture."""

import argparse
import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from farsight.errors import UserError
from farsight.files import prepare_file, write_text


def output_file(text: str) -> Path:
    """An argparse type for a file to write: makes its folder, and refuses a path that can't be written."""
    path = Path(text)
    try:
        prepare_file(path)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def _picture_file(text: str) -> Path:
    path = output_file(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text} must end with .png, .svg or .pdf")
    return path


def add_json_option(parser: argparse.ArgumentParser, content: str = "the figures") -> None:
    """Adds --json; `content` says what the file holds."""
    parser.add_argument("--json", type=output_file, metavar="F", help=f"write {content} here too")


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Adds --json and --picture."""
    add_json_option(parser)
    parser.add_argument("--picture", type=_picture_file, metavar="F", help="draw the figures (.png, .svg, .pdf)")


def write_json(path: Path | None, figures: Mapping[str, Any], allow_nan: bool = True) -> None:
    """Writes the figures if there is a path: --json may have named none.

    Raises:
        ValueError: without `allow_nan`, a figure is NaN or infinite.
    """
    if path:
        write_text(path, json.dumps(figures, indent=2, allow_nan=allow_nan) + "\n")


def write_figures(path: Path | None, results: Mapping[str, dict[str, Any]], allow_nan: bool = True) -> None:
    """Writes the figures of one model, or {"models": {path: figures}} for several, if --json named a file.

    Raises:
        ValueError: as write_json.
    """
    write_json(path, next(iter(results.values())) if len(results) == 1 else {"models": dict(results)}, allow_nan)


def write_picture(path: Path | None, draw: Callable[..., None], *figures: Any) -> None:
    """Draws the figures and prints the picture's name, if --picture gave one."""
    if path:
        draw(*figures, path)
        print(path)


def short_name(folder: str) -> str:
    """The end of a model's path, for titles; a `model` directory is named after its run folder."""
    parts = Path(os.path.abspath(folder)).parts
    return "/".join((parts[:-1] if parts[-1] == "model" else parts)[-2:])


def short_names(folders: Collection[str]) -> list[str]:
    """The shortest path suffixes that tell the models apart; a `model` directory is named after its run folder."""
    parts = [Path(os.path.abspath(folder)).parts for folder in folders]
    parts = [part[:-1] if part[-1] == "model" else part for part in parts]
    names: list[str] = []
    for kept in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-kept:]) for part in parts]
        if len(set(names)) == len(names):
            break
    return names
