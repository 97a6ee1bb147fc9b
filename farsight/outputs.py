"""Output options of tools that measure one or more models: a JSON file of figures, and a picture."""

import argparse
import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from farsight.errors import UserError
from farsight.files import prepare_file, write_text


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Adds --json and --picture."""
    parser.add_argument("--json", type=Path, metavar="F", help="write the figures here too")
    parser.add_argument("--picture", type=Path, metavar="F", help="draw the figures (.png, .svg, .pdf)")


def check_outputs(parser: argparse.ArgumentParser, options: argparse.Namespace, *more: str) -> None:
    """Makes the folders of the output files, and ends the tool if one can't be written.

    Args:
        more: further options that name an output file, besides --json and --picture.
    """
    for name in ("json", "picture", *more):
        path = getattr(options, name, None)
        if path is None:
            continue
        try:
            prepare_file(path)
        except UserError as error:
            parser.error(f"--{name}: {error}")
        if name == "picture" and path.suffix not in (".png", ".svg", ".pdf"):
            parser.error(f"--picture {path} must end with .png, .svg or .pdf")


def of_models(results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The figures of one model, or {"models": {path: figures}} for several: what --json writes."""
    return next(iter(results.values())) if len(results) == 1 else {"models": dict(results)}


def write_outputs(
    options: argparse.Namespace, figures: Mapping[str, Any], draw: Callable[[Path], object] | None = None
) -> None:
    """Writes the figures to --json, draws --picture and prints its path, each if it was asked for.

    Args:
        draw: writes the picture to a path; None for tools without --picture.
    """
    if options.json:
        write_text(options.json, json.dumps(figures, indent=2) + "\n")
    if draw and options.picture:
        draw(options.picture)
        print(options.picture)


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
